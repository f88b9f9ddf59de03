# SPDX-License-Identifier: Apache-2.0
"""The common part of all commands: flags, the resolved configuration, the platform and the exit status.

A command imports this file first and calls `parse` before jax is imported. So errors are reported immediately, and the
platform and the number of simulated devices are set before any device is initialized.

Exit status: 0 finished; 2 usage or configuration; 3 loss or gradient not finite; 75 interrupted, run again to resume;
1 anything else. Every status except 0 comes with one last line on stderr.
"""

import dataclasses
import itertools
import logging
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable

from core import interpreter
from files.paths import expanded

try:
    from absl import flags

    from checkpointing.bucket import Bucket, open_bucket
    from cluster import identity, processes, startup
    from cluster.group import Group, find_group
    from configs import base, topologies
    from configs.errors import ConfigError, check_text, did_you_mean, one_of, shown, similar
    from configs.key import PER_HOST
    from core import ending
    from core.overrides import split_overrides, without_secrets
    from input_pipeline.cache import cache_path
    from settings import loading, simulation, stored_config, together, validation
    from settings.keys import NAMES_ELSEWHERE, flat, similar_keys, stray_argument, value_of_flag
    from settings.resolving import Loaded
except ModuleNotFoundError as missing:
    interpreter.restart(missing)

STARTED = time.monotonic()  # start of this process, up to a fraction of a second
FLAGS = flags.FLAGS
LOG = logging.getLogger("torus")  # a command with a workdir adds its file to it
typed_by_user: list[str] = []  # what an adapter of another system has turned into sys.argv
TRAIN, READ, IGNORE = "train", "read", "ignore"  # what a command does with the run that may be in its workdir

flags.DEFINE_string(
    "config",
    "configs/tiny.py",
    "recipe: a Python file with get_config(), here or in the workspace, or a run's folder; default: the configuration "
    "of the run in --workdir, else of train.init_from",
)
flags.DEFINE_string("topology", "", f"hardware preset: {', '.join(topologies.SLICES)}; default: what is attached")
flags.DEFINE_bool("print_config", False, "print every key with its value and its origin, and exit")
flags.DEFINE_string(
    "workdir", "", "folder of the run, relative to the current folder; default: runs/<recipe>[-<topology>]"
)
flags.DEFINE_integer(
    "join_seconds", 300, "how long the processes of a run wait for each other at its start", 1, 1_000_000
)


@dataclasses.dataclass(frozen=True)
class Command:
    """A parsed command: a validated configuration, and the platform it runs on.

    Attributes:
      workdir: local folder of the run; if --workdir is in a `bucket`, its local copy.
      group: None for a single process.
      num_devices: of all processes; None if only jax knows.
      scaled_down: {key: (old, new)} of the sizes that a simulation changed; None without a simulation.
    """

    loaded: Loaded
    workdir: pathlib.Path
    bucket: Bucket | None
    accelerator: str
    group: Group | None
    num_devices: int | None
    scaled_down: dict[str, tuple] | None

    @property
    def config(self):
        return self.loaded.config

    @property
    def address(self) -> str | pathlib.Path:
        """The folder or bucket folder of the run's checkpoints."""
        return self.bucket.url if self.bucket else self.workdir

    @property
    def origin(self) -> dict:
        """The content for the run's run.json."""
        return self.loaded.origin | {"command": without_secrets(typed_by_user or sys.argv)}

    def banner(self) -> list[str]:
        """Return lines about ignored variables, the simulation, and the sizes that it changed."""
        notes = [*self.loaded.notes, *startup.notes(os.environ, self.config.model.dtype)]
        if self.scaled_down is None:
            return notes
        topology, mesh = self.loaded.topology, self.loaded.environment_mesh
        what = topology.name if topology else f"TPU_MESH_CONFIG={','.join(map(str, mesh.values()))}"
        sizes = "the sizes of the run" if self.loaded.of_run else "the sizes of the recipe scaled down"
        changes = [f"  {key} {old} -> {new}" for key, (old, new) in self.scaled_down.items()]
        return [
            *notes,
            f"SIMULATION: no accelerator here, so {what} is {self.num_devices} simulated CPU devices, with the same",
            f"mesh and {sizes}; the speed does not predict that of a TPU.",
            *changes,
        ]


def parse_flags(description: str, not_read: tuple[str, ...] = (), why: str = "") -> dict[str, str]:
    """Parse sys.argv with absl; return the `--config.key=value` overrides as text. Install the exit hooks.

    `description` is for --help. The command refuses the common flags in `not_read`, and gives `why` as the reason. With
    "config" in `not_read` it refuses all keys too.
    """
    ending.install()
    overrides, rest = split_overrides(sys.argv)
    if {"-h", "--help", "-help"} & set(rest):
        _print_help(description, not_read)
        sys.exit(0)
    _check_values(rest[1:])
    try:
        stray = FLAGS(rest)[1:]
    except flags.UnrecognizedFlagError as error:
        options = _similar_options(error.flagname, with_keys="config" not in not_read)
        near = did_you_mean(options) or "; --help lists the flags"
        raise ConfigError(f"--{error.flagname} is not a flag{near}") from None
    except flags.Error as error:
        raise ConfigError(value_of_flag(error)) from None
    if stray:
        raise ConfigError(stray_argument(stray[0]))
    given = [f"config.{key}" for key in overrides if "config" in not_read]
    if given := [*given, *(name for name in not_read if FLAGS[name].present)]:
        raise ConfigError(f"--{given[0]} is not read here: {why}; omit it")
    texts = [name for name in FLAGS if FLAGS[name].flag_type() in ("string", "comma separated list of strings")]
    if empty := [name for name in texts if FLAGS[name].present and not FLAGS[name].value]:  # of an unset variable
        raise ConfigError(f"--{empty[0]}= has no value; add one, or omit the flag")
    return overrides


def _check_values(words: list[str]) -> None:
    """Raise ConfigError for a flag without its value; absl would take the flag that follows for the value."""
    for word, following in itertools.pairwise(words):
        name = word.removeprefix("--")
        needs_value = word.startswith("--") and name in FLAGS and not FLAGS[name].boolean
        if needs_value and following.startswith("--"):
            raise ConfigError(f"{word} has no value: {following} follows it; write {word}=VALUE")


def parse(
    description: str, *, use: Callable[[flags.FlagValues], str] = lambda parsed: TRAIN, one_device: bool = False,
    chooses_mesh: bool = False,
) -> Command:  # fmt: skip
    """Parse the command line, resolve the configuration and set the platform; a mistake ends the process with 2.

    Args:
      description: for --help.
      use: flags -> TRAIN, READ or IGNORE, the use of the run in the workdir.
      one_device: whether the command uses only one device.
      chooses_mesh: whether the command chooses its mesh itself, when it knows the devices, and validates it then.
    """
    not_read = ("topology",) if one_device else ()
    loaded = parse_configuration(description, use=use, not_read=not_read, why="this command runs on one device")
    if "train.init_from" in loaded.typed and not (FLAGS.workdir or FLAGS["config"].present):
        raise ConfigError(
            f"train.init_from={loaded.config.train.init_from} begins a new run; give it a folder with --workdir"
        )
    accelerator = startup.attached_accelerator()
    workdir, bucket = _workdir()
    _choose_platform(loaded, accelerator, bucket if use(FLAGS) == TRAIN else None)
    if one_device:
        startup.use_one_device(accelerator)
    group = None if one_device else find_group(os.environ, accelerator, FLAGS.join_seconds)
    num_processes = group.count if group else 1
    startup.choose_caching(accelerator, num_processes)
    num_devices = scaled_down = None
    if accelerator == "cpu":
        num_devices = startup.simulate(_num_chips(loaded), num_processes)
        num_devices = 1 if one_device else num_devices
    if accelerator == "cpu" and not chooses_mesh:
        scaled_down = _fit_to_devices(loaded, num_devices)
    else:  # `join` initializes jax, which then knows the number of devices
        validation.check_keys(loaded.config)
    return Command(loaded, workdir, bucket, accelerator, group, num_devices, scaled_down)


def _choose_platform(loaded: Loaded, accelerator: str, bucket: Bucket | None) -> None:
    """Set the variables of the platform; the programs of a run that trains in a `bucket` are cached there.

    A run that is only read may be a stranger's, whose programs are not loaded.
    """
    cache = bucket.folder if bucket else cache_path(loaded.config.data.cache_dir)
    startup.choose_platform(loaded.topology, accelerator, cache)
    if bucket:
        os.environ.setdefault("JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES", "none")  # their folder would be in every key
        bucket.fetch_compiled()


def _num_chips(loaded: Loaded) -> int:
    """Return the chips of --topology, else of TPU_MESH_CONFIG; 0 without either."""
    if loaded.topology:
        return loaded.topology.chips
    return math.prod(loaded.environment_mesh.values()) if loaded.environment_mesh else 0


def _fit_to_devices(loaded: Loaded, num_devices: int) -> dict[str, tuple] | None:
    """Resolve the mesh, scale a simulation down, and validate; return `scaled_down` of a Command."""
    validation.resolve_mesh(loaded.config, num_devices, loaded)
    scaled_down = None
    if startup.is_simulation(loaded.topology, "cpu") or loaded.environment_mesh:  # a resumed run keeps its sizes
        scaled_down = {} if loaded.of_run else simulation.scale_down(loaded.config, loaded.typed)
    validation.validate(loaded.config, num_devices, loaded)
    return scaled_down


def join(command: Command, *, shares_folder: bool = True, chooses_mesh: bool = False) -> None:
    """Join the other processes of the run, if any, initialize the devices, and validate the configuration for them.

    Args:
      shares_folder: whether a local workdir is the same folder on all hosts.
      chooses_mesh: as of `parse`.

    Raises:
      RunError: not all processes joined within --join_seconds.
      ConfigError: processes differ in configuration, code, libraries or variables; the secret of the run cannot be read
        or written; jax does not use the attached accelerator; or the configuration does not fit the devices.
    """
    if command.group is not None:
        startup.drop_native_stdout()
        per_host = command.config.checkpoint.per_host
        folder = command.workdir if shares_folder and command.bucket is None and not per_host else None
        processes.start(command.group, FLAGS.join_seconds, ending.with_the_others, folder)
        if all(processes.gather("per host", per_host)):
            _check_hosts_have_run(command.workdir)
        values = flat(command.config)
        shared = values.keys() - base.keys_of(PER_HOST)
        processes.check_same({key: values[key] for key in shared}, "their configuration")
        identity.check_same()
    startup.check_platform(command.accelerator)
    if command.num_devices is None and not chooses_mesh:
        import jax  # the chips of all hosts can be counted only now

        validation.validate(command.config, jax.device_count(), command.loaded)


def _check_hosts_have_run(workdir: pathlib.Path) -> None:
    """Raise ConfigError if some processes have checkpoints in their own folder and others have none."""
    steps = processes.gather("trained to", stored_config.trained_to(workdir))
    absent = [processes.name(number) for number, step in enumerate(steps) if step is None]
    if absent and len(absent) < len(steps):
        raise ConfigError(
            f"--workdir={workdir}: {', '.join(absent)} without the parts of the checkpoints that others have; start on "
            "the hosts that saved them, or use another --workdir"
        )


def parse_configuration(
    description: str, *, use: Callable[[flags.FlagValues], str], not_read: tuple[str, ...] = (), why: str = ""
) -> Loaded:
    """Return the configuration of the command line; with --print_config, print it and exit.

    The arguments are those of `parse_flags` and `parse`.
    """
    overrides = parse_flags(description, not_read, why)
    used = use(FLAGS)
    ending.continues(used != READ)
    loaded = _load(overrides, used)
    if used != READ:
        from input_pipeline import sources  # a recipe may have added to them; commands that read need none

        more = "; if a recipe adds it, name that recipe by --config" if loaded.of_run else ""
        one_of("data.source", loaded.config.data.source, sorted(sources.SOURCES), more)
    if FLAGS.print_config:
        validation.check_keys(loaded.config)
        together.check_typed(loaded)
        print(config_text(loaded), end="")
        sys.exit(0)
    return loaded


def _load(overrides: dict[str, str], use: str) -> Loaded:
    """Return the configuration of the run in the workdir, or of a recipe if there is none or `use` is IGNORE."""
    if use != IGNORE:
        workdir, bucket = _workdir()
        if bucket:
            startup.choose_libraries()
            bucket.fetch(keep_newer=use == READ)
        typed = FLAGS.config if FLAGS["config"].present and not _same(FLAGS.config, workdir) else ""
        if use == READ:
            named = (typed, loading.run_recipe(typed)[0]) if typed else None
            return stored_config.load_to_read(workdir, overrides, named, FLAGS.topology)
        step = bucket.trained_to() if bucket else stored_config.trained_to(workdir)
        if stored_config.is_run(workdir) and (step is not None or not typed):
            named = (typed, loading.run_recipe(typed)[0]) if typed else None
            return stored_config.load_to_continue(workdir, step, named, FLAGS.topology, overrides, os.environ)
    return loading.load(recipe(overrides), FLAGS.topology, overrides, os.environ)


def _same(recipe: str, workdir: pathlib.Path) -> bool:
    """Return whether --config names the folder of the run."""
    path = expanded(recipe)
    return path.is_dir() and workdir.is_dir() and path.samefile(workdir)


def config_text(loaded: Loaded) -> str:
    """Return a line for each key with its value and its origin."""
    values = flat(loaded.config).items()
    return "".join(f"{key} = {value!r}  ({loaded.origins.get(key, 'configs/base.py')})\n" for key, value in values)


def log_to(workdir: pathlib.Path) -> None:
    """Write messages and tracebacks to `workdir`/logs/train_worker_<process>.out from now on."""
    handler = logging.FileHandler(processes.log_file(workdir), delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s - %(name)s - %(levelname)s - %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.raiseExceptions = False  # on a full disk, lines are lost and the run continues
    for log in (LOG, logging.getLogger("__main__")):
        log.addHandler(handler)
        log.propagate = False
        log.setLevel(logging.INFO)


def _workdir() -> tuple[pathlib.Path, Bucket | None]:
    """Return the local folder of the run, and the bucket that it is a copy of, or None."""
    if bucket := open_bucket(FLAGS.workdir, cache_path("")):
        return bucket.folder, bucket
    if "://" in FLAGS.workdir:
        raise ConfigError(f"--workdir={FLAGS.workdir}: a run can be in a local folder or in a gs:// bucket; name one")
    check_text("--workdir", FLAGS.workdir)  # tensorstore takes no other names
    topology = f"-{FLAGS.topology}" if FLAGS.topology else ""
    name = FLAGS.workdir or f"runs/{pathlib.Path(FLAGS.config).stem}{topology}"
    try:
        workdir = expanded(name)
        is_file = workdir.exists() and not workdir.is_dir()
    except (OSError, ValueError) as error:  # the name is too long, or the user unknown
        raise ConfigError(f"--workdir={shown(name)}: {' '.join(str(error).split())[:200]}") from None
    if is_file:
        raise ConfigError(f"--workdir={name} is a file; name a folder")
    return workdir, None


def recipe(overrides: dict[str, str]) -> str:
    """Return the recipe of a new run: --config if given, else the run of train.init_from, else tiny."""
    source = overrides.get("train.init_from", "")
    if FLAGS["config"].present:
        return FLAGS.config
    if not source:  # the workspace's recipe, even if the current folder has such a file
        return loading.of_workspace(FLAGS.config)
    if source.endswith(".py"):
        return source
    if "://" in source:
        raise ConfigError(
            f"train.init_from={source}: add --config, because the configuration is read from local folders only"
        )
    return str(stored_config.run_folder("train.init_from", source))


def _own_flags() -> list[flags.Flag]:
    return FLAGS.get_flags_for_module(sys.modules["__main__"]) + FLAGS.get_flags_for_module(__name__)


def _similar_options(name: str, *, with_keys: bool) -> list[str]:
    """Return suggestions for an unknown flag: keys of that name, else a similar flag, else similar keys."""
    close = similar(name, [flag.name for flag in _own_flags()])
    if not with_keys:
        return [f"--{flag}" for flag in close]
    if name in base.KEYS:
        return [f"--config.{name}"]
    keys = similar_keys(name, sorted(base.KEYS))
    known = name in NAMES_ELSEWHERE or (keys[:1] and keys[0].split(".")[-1] == name)
    return [f"--{flag}" for flag in close] if close and not known else [f"--config.{key}" for key in keys]


def _print_help(description: str, not_read: tuple[str, ...]) -> None:
    print(description.strip() + "\n\nFlags:")
    for flag in [flag for flag in _own_flags() if flag.name not in not_read]:
        default = f" (default {flag.default!r})" if flag.default not in (None, "", []) else ""
        print(f"  --{flag.name}: {flag.help}{default}")
    if "config" not in not_read:
        print("  --config.SECTION.KEY=VALUE: any key of configs/base.py, where each is documented")
