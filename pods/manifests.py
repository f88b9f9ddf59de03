# SPDX-License-Identifier: Apache-2.0
"""Prints a run as a manifest for another scheduler: a JobSet for GKE, or a batch file for Slurm.

Each manifest starts one process of train.py on each host, gives it time to save, and restarts it after exit status 75.
References: https://jobset.sigs.k8s.io/docs/reference/jobset.v1alpha2/ and GKE's "Plan TPUs"; sbatch(1).
"""

import pathlib
import shlex

from configs import topologies
from pods import recipes
from pods.errors import usage_error
from pods.hosts import ENV_FILE, FINAL, SAVED
from pods.settings import Settings

SIGNAL_SECONDS = 120  # between Slurm's signal and the end
SECRET = "torus-secrets"
JOBSET, SBATCH = (pathlib.Path(__file__).with_name(name) for name in ("jobset.yaml", "slurm.sh"))  # for str.format


def manifest(settings: Settings, transport: None, rest: list[str]) -> None:
    """Print the manifest for --gke or --slurm; `rest` has more arguments of train.py."""
    if settings.gke == settings.slurm:
        raise usage_error("manifest needs one of --gke and --slurm")
    topology = recipes.preset(settings)
    if topology is None:
        known = ", ".join(topologies.SLICES)
        raise usage_error(f"ACCEL={settings.accel}: the number of its hosts is not known; use one of {known}")
    num_hosts = topology.hosts if settings.gke else 1  # Slurm hosts share their folders
    words = recipes.arguments(settings, recipes.chosen_data_keys(settings), rest, settings.shared_folder(num_hosts))
    print(jobset(settings, topology, words) if settings.gke else sbatch(settings, topology, words), end="")


def jobset(settings: Settings, topology: topologies.Topology, arguments: list[str]) -> str:
    """Return the YAML of a JobSet: a job for each slice, a pod for each host; `kubectl apply -f -` takes it.

    The image has the code and its .venv in /torus. HF_TOKEN and TORUS_RUN_SECRET come from the optional Kubernetes
    secret torus-secrets.
    """
    if not topology.gke_name:
        known = ", ".join(name for name, chip in topologies.CHIPS.items() if "gke_name" in chip)
        raise usage_error(f"ACCEL={topology.name} is not a TPU of GKE; --gke works for {known}")
    if not settings.image:
        raise usage_error("--image is not set; name a container image with the code and its .venv in /torus")
    command = shlex.join(["exec", ".venv/bin/python", "train.py", *arguments])
    command = command.replace("$", "$$")  # Kubernetes replaces $(NAME) by a variable of the container, and $$ by $
    return JOBSET.read_text().format(
        name=settings.name, restarts=settings.max_restarts, slices=settings.slices,
        hosts=topology.hosts // settings.slices, chips=topology.chips_per_host, accelerator=topology.gke_name,
        shape=topology.compiler_name.partition(":")[2], final=list(FINAL),
        grace=settings.grace_seconds, image=_yaml(settings.image), command=_yaml(command), secret=SECRET,
        saved=SAVED,
    )  # fmt: skip


def _yaml(text: str) -> str:
    """Return a double-quoted YAML scalar in printable ASCII."""

    def escaped(character: str) -> str:
        plain = character.isascii() and character.isprintable() and character not in '"\\'
        return character if plain else f"\\U{ord(character):08x}"

    return f'"{"".join(map(escaped, text))}"'


def sbatch(settings: Settings, topology: topologies.Topology, arguments: list[str]) -> str:
    """Return a batch file to submit with `sbatch` from the code's folder; train.py finds its group through Slurm."""
    gpus = f"#SBATCH --gpus-per-node={topology.chips_per_host}\n" if topology.accelerator == "gpu" else ""
    command = shlex.join([".venv/bin/python", "train.py", *arguments])
    worker = f"exec {command} >> logs/train_worker_$SLURM_PROCID.out 2>&1"
    return SBATCH.read_text().format(
        name=settings.name, nodes=topology.hosts, gpus=gpus, seconds=SIGNAL_SECONDS, saved=SAVED,
        env_file=ENV_FILE, worker=shlex.quote(worker),
    )  # fmt: skip
