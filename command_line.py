# SPDX-License-Identifier: Apache-2.0
"""What every command shares: flags, the resolved configuration, the platform, and how it ends.

A command imports this file first and calls `parse` before jax is imported: a mistake is answered at once, and
the platform and the number of simulated devices are settled before anything touches a device.

Exit status: 0 finished; 2 usage or configuration; 3 loss or gradient not finite; 75 interrupted, run again to go
on; 1 anything else. Every other than 0 ends with one line on stderr.
"""

import contextlib
import dataclasses
import difflib
import faulthandler
import functools
import logging
import math
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
import types
from collections.abc import Callable

try:
    from absl import flags

    from configs import base, loading, simulation, topologies, validation
    from configs.base import ConfigError
    from input_pipeline.cache import cache_path
    from parallelism import identity, processes, startup
    from training.bucket import Bucket, open_bucket
except ModuleNotFoundError as missing:
    sys.exit(f"error: Python package {missing.name} is not installed here; run `make setup`, then .venv/bin/python")

STARTED = time.monotonic()  # of this process, but for a part of a second
FLAGS = flags.FLAGS
_ending = threading.Lock()
LOG = logging.getLogger("torus")  # a command with a workdir adds its file to it
INTERRUPTED = 75
LAST_WORD_SECONDS = 5.0
BLAME_SECONDS = 5.0  # for the hub to notice who died, when a collective of this process failed because of it

flags.DEFINE_string(
    "config",
    "configs/tiny.py",
    "recipe: a Python file with get_config(), or a run's folder; default: of an import, or of train.init_from, its own",
)
flags.DEFINE_string("topology", "", f"hardware preset: {', '.join(topologies.SLICES)}; default: what is attached")
flags.DEFINE_bool("print_config", False, "print every key, its value and where it is from, and do nothing else")
flags.DEFINE_string("workdir", "", "folder of the run; default: runs/<recipe>[-<topology>]")
flags.DEFINE_integer("join_seconds", 300, "how long the processes of a run wait for each other at its start", 1)


@dataclasses.dataclass(frozen=True)
class Command:
    """What was asked for: a validated configuration on a settled platform.

    Where --workdir is in a bucket, `workdir` is its local copy. `group` is None for a process alone; `num_devices` are
    those of all processes, None where only jax knows; `scaled_down` maps each key that a simulation shrank to (old,
    new), None where nothing is simulated.
    """

    loaded: loading.Loaded
    workdir: pathlib.Path
    bucket: Bucket | None
    accelerator: str
    group: processes.Group | None
    num_devices: int | None
    scaled_down: dict[str, tuple] | None

    @property
    def config(self):
        """The configuration with everything applied."""
        return self.loaded.config

    @property
    def address(self) -> str | pathlib.Path:
        """Where the run's checkpoints are."""
        return self.bucket.url if self.bucket else self.workdir

    def banner(self) -> list[str]:
        """Return the lines that say which variables are not read, what is simulated, and what that shrank."""
        notes = startup.notes(os.environ, self.config.model.dtype)
        if self.scaled_down is None:
            return notes
        topology, mesh = self.loaded.topology, self.loaded.environment_mesh
        what = topology.name if topology else f"TPU_MESH_CONFIG={','.join(map(str, mesh.values()))}"
        changes = [f"  {key} {old} -> {new}" for key, (old, new) in self.scaled_down.items()]
        return [
            *notes,
            f"SIMULATION: no accelerator here, so {what} is {self.num_devices} simulated CPU devices, with the same",
            "mesh and the sizes of the recipe scaled down; the speed says nothing about a TPU.",
            *changes,
        ]


def parse_flags(description: str) -> dict[str, str]:
    """Parse sys.argv by absl; return the `--config.key=value` overrides as typed. Installs the exit hooks."""
    sys.excepthook = _end_with_one_line
    threading.excepthook = lambda args: _end_with_one_line(args.exc_type, args.exc_value, args.exc_traceback)
    sys.unraisablehook = functools.partial(_end_if_interrupted, sys.unraisablehook)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, until a loop takes it over
    overrides, rest = split_overrides(sys.argv)
    if {"-h", "--help", "-help"} & set(rest):
        _print_help(description)
        sys.exit(0)
    try:
        stray = FLAGS(rest)[1:]
    except flags.UnrecognizedFlagError as error:
        raise ConfigError(f"--{error.flagname} is no flag; nearest: {_nearest_options(error.flagname)}") from None
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if stray:
        raise ConfigError(f"stray argument {stray[0]!r}; options are written --name=value")
    if empty := [name for name in ("config", "topology", "workdir") if FLAGS[name].present and not FLAGS[name].value]:
        raise ConfigError(f"--{empty[0]}= has no value; give it one, or leave it out")
    return overrides


def parse(
    description: str, *, stored: Callable[[flags.FlagValues], bool] = lambda parsed: False, one_device: bool = False
) -> Command:
    """Parse the command line and settle configuration and platform; any mistake ends the process with status 2.

    Args:
      description: for --help.
      stored: whether, given the flags, the configuration is the one that a run left in its workdir.
      one_device: whether the command uses one device, however many there are.
    """
    loaded = parse_configuration(description, stored=stored)
    if "train.init_from" in loaded.typed and not (FLAGS.workdir or FLAGS["config"].present):
        raise ConfigError(f"train.init_from={loaded.config.train.init_from} begins a new run; name a --workdir for it")
    accelerator = startup.attached_accelerator()
    startup.choose_platform(loaded.topology, accelerator, cache_path(loaded.config.data.cache_dir))
    group = None if one_device else processes.find(os.environ, accelerator, FLAGS.join_seconds)
    chips = loaded.topology.chips if loaded.topology else math.prod(loaded.environment_mesh.values())
    num_devices = scaled_down = None
    if accelerator == "cpu":
        simulated = startup.is_simulation(loaded.topology, accelerator) or bool(loaded.environment_mesh)
        num_devices = startup.simulate(chips if loaded.topology or simulated else 0, group.count if group else 1)
        num_devices = 1 if one_device else num_devices
        validation.resolve_mesh(loaded.config, num_devices, loaded)
        if simulated:
            scaled_down = simulation.scale_down(loaded.config, loaded.typed)
        validation.validate(loaded.config, num_devices, loaded)
    return Command(loaded, *_workdir(), accelerator, group, num_devices, scaled_down)


def join(command: Command, *, shares_folder: bool = True) -> None:
    """Join the other processes of the run, if it has any, before any device is touched, and then touch them.

    Args:
      shares_folder: whether the workdir, where it is a local one, is the same folder on all hosts.

    Raises:
      RunError: not all came within --join_seconds.
      ConfigError: they are not all the same in configuration, code, libraries or variables; the secret of the run
        cannot be read or written; jax does not compute on the attached accelerator.
    """
    if command.group is not None:
        folder = command.workdir if shares_folder and command.bucket is None else None
        processes.start(command.group, FLAGS.join_seconds, _end_with_the_others, folder)
        keys = loading.flat(command.config)
        processes.check_same({key: keys[key] for key in keys.keys() - set(loading.OF_THE_HOST)}, "their configuration")
        identity.check_same()
    startup.check_platform(command.accelerator)


def parse_configuration(
    description: str, *, stored: Callable[[flags.FlagValues], bool] = lambda parsed: False
) -> loading.Loaded:
    """Return the configuration that the command line asks for; with --print_config print it and end."""
    overrides = parse_flags(description)
    if stored(FLAGS):
        unread = [name for name in ("config", "topology") if FLAGS[name].present and FLAGS.workdir]
        if unread:
            raise ConfigError(f"--{unread[0]} is not read here, where --workdir has the configuration; leave it out")
        workdir, bucket = _workdir()
        if bucket:
            startup.choose_libraries()
            bucket.fetch()
        loaded = loading.load_stored(workdir, overrides)
    else:
        loaded = loading.load(recipe(overrides), FLAGS.topology, overrides, os.environ)
    if FLAGS.print_config:
        validation.check_keys(loaded.config)
        print(config_text(loaded), end="")
        sys.exit(0)
    return loaded


def split_overrides(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Separate `--config.a.b=value` and `--config.a.b value` from the rest; a bare boolean key is true."""
    overrides, rest, arguments = {}, [], list(argv)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not name.startswith("config."):
            rest.append(argument)
        elif equals:
            overrides[name.removeprefix("config.")] = value
        else:
            takes_next = bool(arguments) and not arguments[0].startswith("--")
            overrides[name.removeprefix("config.")] = arguments.pop(0) if takes_next else "true"
    return overrides, rest


def config_text(loaded: loading.Loaded) -> str:
    """Return a line for each key with its value and where that is from."""
    values = loading.flat(loaded.config).items()
    return "".join(f"{key} = {value!r}  ({loaded.origins.get(key, 'configs/base.py')})\n" for key, value in values)


def check_file_to_write(flag: str) -> None:
    """Raise ConfigError where the file that a flag names cannot be written, before what is to be in it is made."""
    path = pathlib.Path(FLAGS[flag].value).expanduser()
    if FLAGS[flag].value and not path.parent.is_dir():
        raise ConfigError(f"--{flag}={path}: there is no folder {path.parent}")
    if FLAGS[flag].value and path.is_dir():
        raise ConfigError(f"--{flag}={path} is a folder; name a file in it")


def log_to(workdir: pathlib.Path) -> None:
    """From now on write messages and tracebacks to `workdir`/logs/train_worker_<process>.out."""
    handler = logging.FileHandler(processes.log_file(workdir), delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    logging.raiseExceptions = False  # on a full disk lines are lost, and the run goes on
    LOG.propagate = False
    LOG.setLevel(logging.INFO)


def _workdir() -> tuple[pathlib.Path, Bucket | None]:
    """Return the local folder of the run, and the bucket that it is a copy of, if it is one."""
    if bucket := open_bucket(FLAGS.workdir, cache_path("")):
        return bucket.folder, bucket
    if "://" in FLAGS.workdir:
        raise ConfigError(f"--workdir={FLAGS.workdir}: runs are kept in local folders and in gs:// buckets")
    topology = f"-{FLAGS.topology}" if FLAGS.topology else ""
    return pathlib.Path(FLAGS.workdir or f"runs/{pathlib.Path(FLAGS.config).stem}{topology}").expanduser(), None


def recipe(overrides: dict[str, str]) -> str:
    """Return the recipe that is asked for; where none is, the run that this one begins from, or an import's own."""
    source = overrides.get("train.init_from", "")
    if source and not FLAGS["config"].present:
        if "://" in source:
            raise ConfigError(f"train.init_from={source}: give --config too, which is read from local folders alone")
        if source.endswith(".py"):
            return source
        there = pathlib.Path(source).expanduser().is_dir()
        begun = (pathlib.Path(FLAGS.workdir).expanduser() / "config.json").is_file()
        return FLAGS.workdir if begun and not there else str(loading.run_folder("train.init_from", source))
    imported = pathlib.Path(FLAGS.workdir).expanduser() / "recipe.py"
    left = FLAGS.workdir and not FLAGS["config"].present and imported.is_file()
    return str(imported) if left else FLAGS.config


def _own_flags() -> list[flags.Flag]:
    return FLAGS.get_flags_for_module(sys.modules["__main__"]) + FLAGS.get_flags_for_module(__name__)


def _nearest_options(name: str) -> str:
    """Return what may have been meant by a flag that is none: keys of that name, else a flag like it, else keys."""
    keys = loading.nearest_keys(name, loading.flat(base.get_config()))
    close = difflib.get_close_matches(name, [flag.name for flag in _own_flags()], n=1)
    known = name in loading.NAMES_ELSEWHERE or keys[0].split(".")[-1] == name
    return f"--{close[0]}" if close and not known else " or ".join(f"--config.{key}" for key in keys)


def _print_help(description: str) -> None:
    print(description.strip() + "\n\nFlags:")
    for flag in _own_flags():
        default = f" (default {flag.default!r})" if flag.default not in (None, "", []) else ""
        print(f"  --{flag.name}: {flag.help}{default}")
    print("  --config.SECTION.KEY=VALUE: any key of configs/base.py, where each is documented")


def _end_with_one_line(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """The last line on stderr says what and where; the traceback goes to the log, or before it without one."""
    for number in (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ():
        signal.signal(number, signal.SIG_IGN)
    message = " ".join(str(error).split()) or kind.__name__
    match error:
        case KeyboardInterrupt():
            line, status = "interrupted; run the same command to go on", INTERRUPTED
        case BaseException(exit_status=status):
            line = message if status == INTERRUPTED else f"error: {message}"
        case _:
            frame, status = traceback.extract_tb(trace)[-1], 1
            note = "".join(f"; traceback in {os.path.relpath(file)}" for file in _log_files())
            line = f"error: {kind.__name__}: {message[:400]} ({frame.filename}:{frame.lineno}{note})"
            LOG.error("ended by", exc_info=(kind, error, trace))
            if processes.count() > 1 and kind.__module__.startswith("jax"):
                time.sleep(BLAME_SECONDS)  # where another's death is the cause, its notice ends this process meanwhile
    if status == INTERRUPTED and kind is not KeyboardInterrupt:  # all were asked and have saved
        processes.leave()
    else:
        processes.fail(line, status)
    _end(line, status)


def _end_if_interrupted(usual: Callable, unraisable) -> None:
    """A signal may come while a callback runs whose exceptions Python ignores, such as a garbage collector's."""
    if unraisable.exc_type is KeyboardInterrupt:
        _end_with_one_line(KeyboardInterrupt, KeyboardInterrupt(), None)
    usual(unraisable)


def _end_with_the_others(line: str, status: int) -> None:
    """Another process has died or failed: keep where this one was, and end as the other did."""
    processes.settle()
    with contextlib.suppress(OSError):  # a full disk
        for file in _log_files():
            with file.open("a") as log:
                log.write(f"{line}; this process was here:\n")
                log.flush()
                faulthandler.dump_traceback(log, all_threads=True)
    _end(line if status == INTERRUPTED else f"error: {line.removeprefix('error: ')}", status)


def _end(line: str, status: int) -> None:
    _ending.acquire()  # for good: one line is the last
    speaker = threading.Thread(target=_say_last, args=[line], daemon=True)
    speaker.start()
    speaker.join(LAST_WORD_SECONDS)  # nobody may read the pipe
    os._exit(status)  # without waiting for threads that the failure may have left hanging


def _say_last(line: str) -> None:
    for say in (sys.stdout.flush, lambda: print(line, file=sys.stderr, flush=True)):
        with contextlib.suppress(OSError, ValueError):  # a full disk, a reader that is gone, a stream that is closed
            say()


def _log_files() -> list[pathlib.Path]:
    """Return the files of the log, in folders that are there."""
    files = [pathlib.Path(h.baseFilename) for h in LOG.handlers if isinstance(h, logging.FileHandler)]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    return files
