# SPDX-License-Identifier: Apache-2.0
"""Manifests are read as those who take them would: a JobSet by its schema, a batch file by bash."""

import json
import os
import pathlib
import re
import shlex
import signal
import subprocess
import time

import pytest
import yaml

from configs import topologies
from pods import manifests, settings
from pods.errors import PodError

SCHEMA = json.loads(pathlib.Path(__file__).with_name("jobset_schema.json").read_text())
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}
TPUS = [name for name in topologies.SLICES if topologies.get(name).accelerator == "tpu"]


def violations(value, schema: dict, place: str = "") -> list[str]:
    """Return where a value breaks a JSON schema, for the keywords that SCHEMA uses."""
    if "$ref" in schema:
        return violations(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], place)
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(isinstance(value, TYPES[k]) and (k == "boolean") == isinstance(value, bool) for k in kinds):
        return [f"{place} is no {kinds}: {value!r}"]
    found = [
        ("const" in schema and value != schema["const"], "const"),
        ("enum" in schema and value not in schema["enum"], "enum"),
        ("pattern" in schema and not re.search(schema["pattern"], str(value)), "pattern"),
        ("minimum" in schema and value < schema["minimum"], "minimum"),
        ("maximum" in schema and value > schema["maximum"], "maximum"),
        (isinstance(value, list) and len(value) < schema.get("minItems", 0), "minItems"),
        (isinstance(value, str) and len(value) < schema.get("minLength", 0), "minLength"),
    ]
    lines = [f"{place} breaks {keyword}: {value!r}" for broken, keyword in found if broken]
    if isinstance(value, dict):
        lines += [f"{place} lacks {key}" for key in schema.get("required", []) if key not in value]
        for key, below in value.items():
            others = schema.get("additionalProperties", True)
            known = schema.get("properties", {}).get(key, others)
            lines += [f"{place}.{key} is unknown"] if known is False else []
            lines += violations(below, known, f"{place}.{key}") if isinstance(known, dict) else []
    if isinstance(value, list):
        lines += [
            line for i, item in enumerate(value) for line in violations(item, schema.get("items", {}), f"{place}[{i}]")
        ]
    return lines


@pytest.fixture
def manifest(capsys):
    def make(text: str, rest=()) -> str:
        given, _ = settings.read(shlex.split(text), {})
        manifests.manifest(given, None, list(rest))
        return capsys.readouterr().out

    return make


@pytest.mark.parametrize(
    "text",
    ["caf\u00e9 \U0001f30d", "\x7f\x85\u2028\ufeff", "'\"\\ : # {x}", "$(HF_TOKEN) $$(HF_TOKEN) $HOME", "a\nb\t"],
)
def test_every_character_of_an_argument_arrives_in_the_container(manifest, text):
    """kubectl reads the YAML, Kubernetes replaces $(NAME) and $$ in a command, bash expands the rest."""
    [document] = yaml.safe_load_all(
        manifest(
            "--gke --accel=v4-8 --bucket=b --image=i --model_size=tiny --batch_size=64", [f"--config.data.path={text}"]
        )
    )
    [container] = document["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["containers"]
    command = re.sub(r"\$\$|\$\(\w+\)", lambda found: "$" if found[0] == "$$" else "REPLACED", container["command"][2])
    assert shlex.split(command)[-1] == f"--config.data.path={text}"


@pytest.mark.parametrize("accel", TPUS)
def test_a_jobset_keeps_to_the_schema_and_fits_the_slice(manifest, accel):
    text = manifest(f"--gke --accel={accel} --bucket=b --image=gcr.io/p/torus:1 --model_size=tiny --batch_size=64 "
                    "--grace_seconds=99")  # fmt: skip
    jobset, topology = yaml.safe_load(text), topologies.get(accel)
    assert violations(jobset, SCHEMA) == []
    [replicated] = jobset["spec"]["replicatedJobs"]
    job = replicated["template"]["spec"]
    pod = job["template"]["spec"]
    [container] = pod["containers"]
    assert job["parallelism"] == job["completions"] == topology.hosts
    assert container["resources"]["limits"] == {"google.com/tpu": topology.chips_per_host}
    shape = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"]
    assert eval(shape.replace("x", "*")) == topology.chips
    assert pod["terminationGracePeriodSeconds"] == 99
    secrets = {variable["name"]: variable["valueFrom"]["secretKeyRef"] for variable in container["env"]}
    assert {name: secret["key"] for name, secret in secrets.items()} == {
        name: name for name in ("HF_TOKEN", "TORUS_RUN_SECRET")
    }
    assert all("value" not in variable for variable in container["env"])
    assert f"--workdir=gs://b/runs/torus/tiny --topology={accel}" in container["command"][2]


def test_a_saved_run_starts_again_and_a_wrong_configuration_does_not(manifest):
    jobset = yaml.safe_load(manifest("--gke --bucket=b --image=i --model_size=tiny --max_restarts=4"))
    [rule] = jobset["spec"]["replicatedJobs"][0]["template"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob" and rule["onExitCodes"]["values"] == [2, 3]
    assert jobset["spec"]["failurePolicy"]["maxRestarts"] == 4
    [at_once] = jobset["spec"]["failurePolicy"]["rules"]  # all other failures: RestartJobSet, the default
    assert (at_once["action"], at_once["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


@pytest.mark.parametrize(
    "change", ["spec.replicas=1", "spec.failurePolicy.maxRestarts='a'", "kind='Job'", "metadata.name='A b'"]
)
def test_the_schema_refuses_what_is_wrong(manifest, change):
    jobset = yaml.safe_load(manifest("--gke --bucket=b --image=i --model_size=tiny"))
    keys, _, value = change.partition("=")
    *above, last = keys.split(".")
    section = jobset
    for key in above:
        section = section[key]
    section[last] = yaml.safe_load(value)
    assert len(violations(jobset, SCHEMA)) == 1


@pytest.mark.parametrize("accel, nodes, gpus", [("h100-8", 1, 8), ("v4-32", 4, None), ("cpu", 1, None)])
def test_a_batch_file_is_bash_and_fits_the_slice(manifest, accel, nodes, gpus):
    text = manifest(f"--slurm --accel={accel} --model_size=tiny", ["--config.data.path=it's here"])
    assert subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True).stderr == ""
    options = re.findall(r"^#SBATCH --(.*)$", text, re.MULTILINE)
    assert {f"nodes={nodes}", "ntasks-per-node=1", "signal=B:TERM@120", "requeue"} <= set(options)
    assert (f"gpus-per-node={gpus}" in options) == (gpus is not None)


@pytest.mark.parametrize("status, requeued", [(75, True), (0, False), (1, False)])
def test_a_batch_job_lets_the_run_save_and_is_queued_again_on_75(manifest, tmp_path, status, requeued):
    """With commands that do what Slurm's would: scancel signals the steps alone."""
    programs = {
        "bin/srun": 'while [ "${1#--}" != "$1" ]; do shift; done\nSLURM_PROCID=0 "$@" & echo $! > step.pid; wait $!',
        "bin/scancel": 'echo "$@" >> scancel.txt; kill -TERM "$(cat step.pid)"',
        "bin/scontrol": 'echo "$@" >> scontrol.txt',
        ".venv/bin/python": f'trap "exit {status}" TERM; echo "$@"; echo "$TORUS_RUN_SECRET" > secret; touch started; '
        "while :; do sleep 0.05; done",
    }
    for name, text in programs.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/bash\n{text}\n")
        path.chmod(0o755)
    (tmp_path / "job.sh").write_text(manifest("--slurm --accel=h100-8 --model_size=tiny"))
    environment = os.environ | {"PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "SLURM_JOB_ID": "41"}
    job = subprocess.Popen(["bash", "job.sh"], cwd=tmp_path, env=environment)
    while not (tmp_path / "started").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(timeout=20) == status
    assert (tmp_path / "scancel.txt").read_text() == "--signal=TERM 41\n"
    assert (tmp_path / "scontrol.txt").exists() == requeued
    if requeued:
        assert (tmp_path / "scontrol.txt").read_text() == "requeue 41\n"
    assert "train.py --config=configs/tiny.py" in (tmp_path / "logs/train_worker_0.out").read_text()
    assert re.fullmatch(r"[0-9a-f]{64}\n", (tmp_path / "secret").read_text())


@pytest.mark.parametrize(
    "typed, message",
    [
        ("", "one of --gke and --slurm"),
        ("--gke --slurm", "one of --gke and --slurm"),
        ("--gke --bucket=b", "--image is not set"),
        ("--gke --image=i", "BUCKET=my-bucket"),
        ("--gke --bucket=b --image=i --accel=h100-8", "h100-8 is not a TPU of GKE"),
        ("--slurm --accel=v9-8", "ACCEL=v9-8"),
    ],
)
def test_what_cannot_be_is_told(typed, message):
    given, _ = settings.read(["--model_size=tiny", *shlex.split(typed)], {})
    with pytest.raises(PodError) as error:
        manifests.manifest(given, None, [])
    assert message in str(error.value) and error.value.exit_status == 2
