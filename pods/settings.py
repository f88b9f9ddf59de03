# SPDX-License-Identifier: Apache-2.0
"""The table of pod.py's settings: every flag and environment variable with its default and meaning.

A flag wins over the environment, the environment over the preset, and the preset over the default. A flag has the name
of a field below (--zone). The environment variable has the same name in capitals (ZONE). The names are those of the
earlier systems.
"""

import dataclasses
import os
import pathlib
import re
import shlex
from collections.abc import Mapping

from absl import flags

from configs import topologies
from configs.base import keys_of
from configs.errors import did_you_mean, shown, similar
from configs.key import SECRET
from files.paths import expanded
from pods.errors import usage_error
from settings import loading
from settings.environment import UNREAD_VARIABLES
from settings.keys import DASHES, check_no_secrets, stray_argument, value_of_flag
from settings.loading import ROOT

TRUTH = dict.fromkeys(("true", "1", "yes", "on"), True) | dict.fromkeys(("false", "0", "no", "off"), False)
NAME = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")  # node names that Google accepts
WORKERS = re.compile(r"all|[0-9]{1,9}(-[0-9]{1,9})?(,[0-9]{1,9})*")  # values of --worker, in gcloud's syntax
PRESETS = {  # --preset: the values of some fields, in place of their defaults
    "production": {"model_size": "large", "enable_evolution": False},
    "development": {"model_size": "small", "enable_evolution": True},
    "research": {"model_size": "medium", "enable_evolution": True},
}
CHOICES = {"transport": ("gcloud", "local"), "dtype": ("", "bf16", "f32"), "preset": ("", *PRESETS)}
RUNTIMES = {"v6e": "v2-alpha-tpuv6e", "v5p": "v2-alpha-tpuv5"}  # software by chip, cloud.google.com/tpu/docs/runtimes
RUNTIMES |= dict.fromkeys(("v5e", "v5litepod"), "v2-alpha-tpuv5-lite")  # other chips keep the default of `version`
SHAPE = re.compile(r"[1-9][0-9]{0,3}(x[1-9][0-9]{0,3}){1,2}")  # of --topology, in gcloud's syntax
LARGEST = {  # the largest value of a field; for fields not named here it is LARGEST_NUMBER
    "workers": 1_000, "slices": 999, "port": 65_535, "coordinator_worker": 99_999, "retries": 20,
    "retry_seconds": 3_600.0, "join_seconds": 1_000_000,
}  # fmt: skip
POSITIVE = ("evolution_trials", "evolution_steps")  # fields that 0 does not turn off
LARGEST_NUMBER = 1_000_000_000  # as seconds, thirty years
NOT_IN_ENVIRONMENT = {  # flags for one call, or with a name that other programs use
    "type", "topology", "network", "labels", "metadata", "tags", "scopes", "worker", "lines", "json", "watch", "gke",
    "slurm", "image", "zones", "wait", "dry_run", "output_directory", "workers", "price", "alert", "preset",
}  # fmt: skip
UNREAD = UNREAD_VARIABLES | {"TPU_NAME": "NAME names the pod", "XLA_USE_BF16": "DTYPE=bf16 or f32 sets the type"}


def variable(default, meaning: str, group: str, of: str = ""):
    """Return a field of the table, with the type of its default; `of` names the only subcommands that take its flag."""
    meaning = f"{of}: {meaning}" if of else meaning
    return dataclasses.field(default=default, metadata={"meaning": meaning, "group": group, "of": of})


@dataclasses.dataclass(frozen=True)
class Settings:
    """All settings of a call. For training settings an empty string or zero means the recipe's value."""

    project: str = variable("", "Google Cloud project; needed for every call of gcloud", "pod")
    zone: str = variable("", "zone of the pod, as us-central2-b; needed for every call of gcloud", "pod")
    name: str = variable("torus", "name of the pod", "pod")
    accel: str = variable("v4-32", "accelerator type", "pod")
    version: str = variable("tpu-ubuntu2204-base", "software of the hosts; default: by the chip, see `versions`", "pod")
    transport: str = variable("gcloud", "gcloud, or local: processes of this machine in place of hosts", "pod")
    pod_root: str = variable("runs/pods", "folder here for local pods and the records of launches", "pod")
    workers: int = variable(0, "number of workers of a local pod; 0: as many as ACCEL has hosts", "pod")

    zones: str = variable("", "create: zones to try in turn, as us-central2-b,us-east1-d; also spot, queued", "call")
    wait: bool = variable(False, "create: try again until there is a pod, at most wait_seconds", "call")
    queued: bool = variable(False, "create, wait, delete: use a queued resource", "create")
    queued_resource: str = variable("", "id of the queued resource; default: NAME", "create")
    slices: int = variable(1, "slices joined by the data-center network; more than 1 needs --queued", "create")
    valid_until_duration: str = variable("", "how long the request may wait, as 6h", "create")
    spot: bool = variable(False, "use spot capacity", "create")
    reserved: bool = variable(False, "use reserved capacity", "create")
    type: str = variable("", "type of TPU, as v4; with --topology, in place of ACCEL", "create")
    topology: str = variable("", "shape of the slice, as 2x2x4; with --type, in place of ACCEL", "create")
    network: str = variable("", "network of the hosts", "create")
    subnetwork: str = variable("", "subnetwork of the hosts", "create")
    internal_ips: bool = variable(False, "no external addresses: call from their network; it needs Cloud NAT", "create")
    service_account: str = variable("", "service account of the hosts", "create")
    scopes: str = variable("", "its scopes, as https://www.googleapis.com/auth/cloud-platform", "create")
    labels: str = variable("", "KEY=VALUE,...", "create")
    metadata: str = variable("", "metadata of the hosts, KEY=VALUE,...", "create")
    tags: str = variable("", "network tags of the hosts, TAG,..., for firewall rules", "create")
    data_disk: str = variable("", "source=...,mode=read-only", "create")

    repo_url: str = variable("", "repository that the hosts clone; default: `git remote get-url origin`", "hosts")
    repo_dir: str = variable("~/torus", "folder of the code on a host", "hosts")
    python_bin: str = variable("python3", "Python of a host for .venv, if its version is 3.11 to 3.13", "hosts")
    venv_activate: str = variable("", "activate script of a host, used in place of REPO_DIR/.venv", "hosts")
    port: int = variable(12355, "port of the coordinator; setting it names the process group by variables", "hosts")
    coordinator_worker: int = variable(0, "worker that logs and backups come from; worker 0 coordinates", "hosts")

    model_size: str = variable("medium", "recipe: small, medium, large, or another of configs/", "training")
    num_experts: int = variable(0, "experts of a block; not 0: the recipe MODEL_SIZE_moe", "training")
    config: str = variable("en", "configuration of DATASET; FILE.py: a recipe in place of MODEL_SIZE", "training")
    seq_len: int = variable(0, "tokens of a sequence", "training")
    steps: int = variable(0, "steps of the run", "training")
    lr: float = variable(0.0, "peak learning rate", "training")
    batch_size: int = variable(0, "sequences of a step on all devices", "training")
    per_device_batch: int = variable(0, "sequences of a step on one chip; BATCH_SIZE wins", "training")
    dtype: str = variable("", "type of the computation, bf16 or f32", "training")
    dataset: str = variable("allenai/c4", "data set on the Hugging Face hub, for launch_pretrain_hf", "training")
    split: str = variable("train", "split of DATASET; without it, C4 up to document 1,000,000", "training")
    text_key: str = variable("text", "column with the text", "training")
    dataset2: str = variable("", "a second data set, mixed in", "training")
    config2: str = variable("", "configuration of DATASET2; CONFIG if empty", "training")
    split2: str = variable("train", "split of DATASET2", "training")
    mix_p2: float = variable(0.1, "fraction of the tokens that come from DATASET2", "training")
    spm_model: str = variable("", "SentencePiece model on the hosts, or gs://", "training")
    workdir: str = variable("", "the run's folder, such as gs://...; one on each host is lost with the pod", "training")
    ckpt_out: str = variable("", "earlier name of WORKDIR, which wins", "training")
    bucket: str = variable(
        "", "bucket for runs: gs://BUCKET/runs/NAME/RECIPE; without one they are on the hosts", "training"
    )

    preset: str = variable("", "production, development or research: MODEL_SIZE and the switches below", "switches")
    enable_optimizations: bool = variable(True, "false: all switches below are off", "switches")
    enable_tpu_opt: bool = variable(True, "bfloat16, and as few microbatches as memory allows", "switches")
    enable_neuroplasticity: bool = variable(True, "continual learning", "switches")
    enable_causal: bool = variable(True, "causal reasoning", "switches")
    enable_evolution: bool = variable(False, "architecture search; slow", "switches")
    evolution_trials: int = variable(12, "trials of the search that ENABLE_EVOLUTION makes", "switches")
    evolution_steps: int = variable(200, "steps of each of these trials", "switches")
    enable_meta_learning: bool = variable(True, "few-shot adaptation", "switches")
    optimization_config: str = variable("", "JSON file of switches", "switches")

    worker: str = variable("", "all, 0, 0-3 or 0,2; default: all, for tail the coordinator", "call", "copy, ssh, tail")
    dry_run: bool = variable(False, "print the commands and run none", "call")
    lines: int = variable(200, "number of lines to begin with", "call", "tail")
    output_directory: str = variable("", "folder here for a file of each worker", "call", "ssh, tail")
    json: bool = variable(False, "print JSON", "call", "describe, status, metrics")
    watch: bool = variable(False, "repeat until interrupted", "call", "status, metrics")
    poll_seconds: float = variable(15.0, "wait, create --zones, supervise, --watch: seconds between checks", "call")
    wait_seconds: float = variable(21600.0, "wait, create --zones, supervise: seconds to wait for a pod", "call")
    grace_seconds: int = variable(180, "stop: seconds to save before a kill", "call")
    join_seconds: int = variable(300, "seconds that hosts wait for each other at a start", "call")
    max_restarts: int = variable(10, "supervise: restarts without progress before it gives up", "call")
    hang_seconds: float = variable(600.0, "supervise: seconds without a step after which a worker hangs", "call")
    alert: str = variable("", "shell command that gets the alert as its last argument", "call", "supervise")
    price: float = variable(0.0, "metrics, validate: dollars per chip-hour, also 0; default: list price", "call")
    retries: int = variable(4, "retries of a call of gcloud after a transient failure", "call")
    retry_seconds: float = variable(2.0, "seconds before the first retry; they double for each", "call")
    gke: bool = variable(False, "a JobSet for GKE", "call", "manifest")
    slurm: bool = variable(False, "a batch file for Slurm", "call", "manifest")
    image: str = variable("", "with --gke, container image with the code in /torus", "call", "manifest")

    overrides: tuple[str, ...] = ()  # KEY=VALUE of each --config.KEY=VALUE
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)  # of each field, see `read`

    def given(self, field: str) -> bool:
        """Return whether the user set a field."""
        return self.origins.get(field) in ("flag", "environment")

    @property
    def recipe(self) -> str:
        """The path of the recipe, relative to the repository's root."""
        size = with_experts(self.model_size) if self.num_experts else self.model_size
        return self.config if self.config.endswith(".py") else f"configs/{size}.py"

    @property
    def recipe_name(self) -> str:
        """The name of the recipe."""
        return pathlib.Path(self.recipe).stem

    @property
    def request(self) -> str:
        """The id of the queued resource."""
        return self.queued_resource or self.name

    @property
    def pod_folder(self) -> pathlib.Path:
        """The local folder of this pod."""
        return expanded(self.pod_root) / self.name

    def run_folder(self, name: str = "") -> str:
        """Return the folder of the run, the same path on all hosts; its `name` is that of the recipe by default.

        A relative folder is in the bucket (`shared` of a local pod); without a bucket it is in the code's folder of
        each host. A folder below ~/ is in each host's home folder.
        """
        wanted, name = self.workdir or self.ckpt_out, name or self.recipe_name
        if "://" in wanted or wanted.startswith(("/", "~/")):
            return wanted
        if self.transport == "local":
            return str(self.pod_folder.absolute() / "shared" / (wanted or name))
        if self.bucket:
            return f"gs://{self.bucket.removeprefix('gs://').rstrip('/')}/runs/{self.name}/{wanted or name}"
        return wanted or f"runs/{name}"

    def shared_folder(self, num_workers: int, name: str = "") -> str:
        """Return `run_folder`; PodError (status 2) if each of several hosts would have its own."""
        folder = self.run_folder(name)
        if is_per_host(folder, num_workers):
            raise usage_error(
                f"{self.name} has {num_workers} hosts, and each would write its own {self.workdir or 'run folder'}; "
                "set BUCKET=my-bucket, or a folder for all hosts, WORKDIR=gs://my-bucket/runs/mine"
            )
        return folder


FIELDS = {field.name: field for field in dataclasses.fields(Settings) if field.metadata}
GROUPS = {
    "pod": "the pod",
    "create": "creation of the pod",
    "hosts": "hosts of the pod",
    "training": "training",
    "switches": "optimizations",
    "call": "a single call",
}


def is_per_host(folder: str, num_workers: int) -> bool:
    """Return whether a run has a different folder on each host: one below the code's folder or the home folder."""
    return num_workers > 1 and "://" not in folder and not folder.startswith("/")


def with_experts(size: str) -> str:
    """Return the recipe with experts for a size, which may be that recipe's own name."""
    return f"{size.removesuffix('_moe')}_moe"


def environment_name(field: str) -> str:
    """Return the environment variable of a field, or "" if it is only a flag."""
    return "" if field in NOT_IN_ENVIRONMENT else field.upper()


def read(arguments: list[str], environment: Mapping[str, str] = os.environ) -> tuple[Settings, list[str]]:
    """Return the settings and the arguments that are not flags.

    The origin of a value is "flag", "environment", "preset" or "default". Raises PodError (status 2) if a flag is
    unknown or a value is invalid; one line says what would work.
    """
    overrides, rest = _split_overrides(arguments)
    check_no_secrets(dict(override.split("=", 1) for override in overrides))
    typed, positional = _parse_flags(rest)
    preset = PRESETS.get(typed["preset"], {})
    values, origins = {}, {}
    for name, field in FIELDS.items():
        variable_name = environment_name(name)
        given, origins[name] = (preset[name], "preset") if name in preset else (None, "default")
        if typed[name] is not None:
            given, origins[name] = typed[name], "flag"
        elif environment.get(variable_name):
            given, origins[name] = environment[variable_name], "environment"
        elif variable_name == "VERSION" and variable_name in environment:
            given, origins[name] = "", "environment"  # empty: `create` lists the versions
        values[name] = field.default if given is None else _convert(name, given, field.default, origins[name])
    if origins["version"] == "default":
        values["version"] = RUNTIMES.get(values["type"] or values["accel"].partition("-")[0], values["version"])
    values["zone"] = values["zone"] or values["zones"].partition(",")[0]
    home = os.path.expanduser("~/")
    if values["repo_dir"].startswith(home):  # the local shell expanded $HOME, but the host's is meant
        values["repo_dir"] = "~/" + values["repo_dir"].removeprefix(home)
    settings = Settings(**values, overrides=tuple(overrides), origins=origins)
    _check(settings)
    return settings, positional


def lines(settings: Settings) -> list[str]:
    """Return the table with current values and their origins, by groups."""
    text = []
    for group, title in GROUPS.items():
        text.append(f"{title}:")
        for name, field in FIELDS.items():
            if field.metadata["group"] == group:
                value = getattr(settings, name)
                value = str(value).lower() if isinstance(value, bool) else shlex.quote(str(value))
                label = f"--{name}" + (f" {name.upper()}" if environment_name(name) else "")
                text.append(f"  {label:46} {value}  ({settings.origins[name]})  {field.metadata['meaning']}")
    return text


def check_command(words: list[str]) -> None:
    """Raise ConfigError if a command of a host has a secret key: it would be on command lines and in files there."""
    secret = re.compile(rf"--?config\.({'|'.join(map(re.escape, keys_of(SECRET)))})\b")
    check_no_secrets({name: "typed" for word in words for name in secret.findall(word)})


def _split_overrides(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separate --config.KEY=VALUE, which train.py reads on the hosts, from the rest."""
    overrides, rest = [], []
    for argument in arguments:
        name, _, value = argument.lstrip("-").partition("=")
        if not (argument.startswith("-") and name.startswith("config.")):
            rest.append(argument)
        elif not value:
            raise usage_error(f"{argument} has no value; write --{name}=VALUE")
        else:
            overrides.append(f"{name.removeprefix('config.')}={value}")
    return overrides, rest


def _parse_flags(arguments: list[str]) -> tuple[dict[str, str | None], list[str]]:
    """Return each field's flag as typed, None if it was not typed, and the positional arguments."""
    values = flags.FlagValues()
    for name, field in FIELDS.items():
        define = flags.DEFINE_boolean if isinstance(field.default, bool) else flags.DEFINE_string
        define(name, None, field.metadata["meaning"], flag_values=values)
    try:
        positional = values(["pod.py", *[_with_underscores(argument) for argument in arguments]])[1:]
    except flags.UnrecognizedFlagError as error:
        near = did_you_mean([f"--{name}" for name in similar(error.flagname, FIELDS)])
        raise usage_error(f"--{error.flagname} is not a flag{near or '; `pod.py help` lists them'}") from None
    except flags.Error as error:
        raise usage_error(value_of_flag(error)) from None
    if mistyped := [argument for argument in positional if argument.startswith(DASHES)]:
        raise usage_error(stray_argument(mistyped[0]))
    return {name: values[name].value for name in FIELDS}, positional


def _with_underscores(argument: str) -> str:
    """Return a flag with underscores, so that gcloud's --dry-run means --dry_run."""
    name, equals, value = argument.partition("=")
    return name.replace("-", "_").replace("__", "--", 1) + equals + value if name.startswith("--") else argument


def _convert(name: str, given, default, origin: str):
    """Return a value converted to the type of its default."""
    label = f"--{name}" if origin == "flag" else name.upper()
    if isinstance(default, bool):
        return truth(label, given)
    if isinstance(default, str):
        return given
    try:
        value = type(default)(given)
    except ValueError:
        kind = "a whole number" if isinstance(default, int) else "a number"
        raise usage_error(f"{label}={shown(given)} is not {kind}") from None
    if value < (least := 1 if name in POSITIVE else 0):
        raise usage_error(f"{label}={shown(given)} must be at least {least}")
    if not value <= (most := LARGEST.get(name, LARGEST_NUMBER)):  # also refuses nan
        raise usage_error(f"{label}={shown(given)} must be at most {most:,}")
    return value


def truth(label: str, given: str | bool) -> bool:
    """Return a value as a bool; a usage error that names it `label` if it is neither true nor false."""
    if str(given).strip().lower() not in TRUTH:
        raise usage_error(f"{label}={shown(given)} is neither true nor false")
    return TRUTH[str(given).strip().lower()]


def _check(settings: Settings) -> None:
    """Raise PodError for invalid values, before anything is called."""
    for name, choices in CHOICES.items():
        if getattr(settings, name) not in choices:
            raise usage_error(f"{name.upper()}={getattr(settings, name)} is not {' or '.join(filter(None, choices))}")
    for label, name in [("NAME", settings.name), *(("--tags", tag) for tag in settings.tags.split(",") if tag)]:
        if not NAME.fullmatch(name):
            raise usage_error(f"{label}={shown(name)}: use lowercase letters, digits and hyphens; begin with a letter")
    if settings.worker:
        check_worker(settings.worker)
    _check_shape(settings)
    if settings.slices < 1 or (settings.slices > 1 and not settings.queued):
        raise usage_error(f"--slices={settings.slices} must be 1, or greater with --queued")
    if not (ROOT / settings.recipe).is_file():
        names = [name for name in loading.recipe_names() if name != "base"]  # the base of all recipes
        near = did_you_mean(similar(settings.recipe_name, names))
        raise usage_error(f"there is no recipe {settings.recipe}{near} (recipes: {', '.join(names)})")
    if settings.repo_dir.startswith("~") and not settings.repo_dir.startswith("~/"):
        raise usage_error(f"REPO_DIR={settings.repo_dir}: write a path below the home folder as ~/FOLDER")
    if settings.transport == "local":
        topologies.get(settings.accel, "ACCEL")


def _check_shape(settings: Settings) -> None:
    """Raise PodError if --type and --topology are not a slice that gcloud can create."""
    if bool(settings.type) != bool(settings.topology):
        raise usage_error("--type and --topology must be given together: --type=v4 --topology=2x2x4")
    if settings.type not in ("", "v2", "v3", "v4"):
        raise usage_error(f"--type={shown(settings.type)}: gcloud takes v2, v3 or v4; use ACCEL=v6e-8 for other types")
    if settings.topology and not SHAPE.fullmatch(settings.topology):
        raise usage_error(f"--topology={shown(settings.topology)} is not the shape of a slice, such as 2x2x4")


def check_worker(worker: str) -> None:
    """Raise PodError unless gcloud accepts the value of --worker."""
    if not WORKERS.fullmatch(worker):
        raise usage_error(f"--worker={shown(worker)} is not all, a number, a range 0-3 or a list 0,2")


def worker_numbers(worker: str, num_workers: int) -> list[int]:
    """Return the worker numbers for "all", "0", "0-3" or "0,2"; PodError if the pod has no such worker."""
    check_worker(worker)
    if worker == "all":
        return list(range(num_workers))
    ends = [part.partition("-") for part in worker.split(",")]
    ranges = [range(int(first), int(last or first) + 1) for first, _, last in ends]
    if not all(ranges) or max(numbers.stop for numbers in ranges) > num_workers:
        raise usage_error(f"--worker={shown(worker)}: the pod has workers 0 to {num_workers - 1}, in ascending ranges")
    return sorted(set().union(*ranges))
