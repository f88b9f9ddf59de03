# SPDX-License-Identifier: Apache-2.0
"""What every command shares: flags, the resolved configuration, the platform, and how it ends.

A command imports this file first and calls `parse` before jax is imported: a mistake is answered at once, and
the platform and the number of simulated devices are settled before anything touches a device.

Exit status: 0 finished; 2 usage or configuration; 3 loss or gradient not finite; 75 interrupted, run again to go
on; 1 anything else. Every other than 0 ends with one line on stderr.
"""

import dataclasses
import logging
import os
import pathlib
import signal
import sys
import threading
import traceback
import types
from collections.abc import Callable

try:
    from absl import flags

    from configs import loading, simulation, topologies, validation
    from configs.base import ConfigError
    from input_pipeline.cache import cache_path
    from parallelism import startup
except ModuleNotFoundError as missing:
    sys.exit(f"error: Python package {missing.name} is not installed here; run `make setup`, then .venv/bin/python")

FLAGS = flags.FLAGS
LOG = logging.getLogger("torus")  # a command with a workdir adds its file to it
INTERRUPTED = 75

flags.DEFINE_string("config", "configs/tiny.py", "recipe: a Python file with get_config()")
flags.DEFINE_string("topology", "", f"hardware preset: {', '.join(topologies.SLICES)}; default: what is attached")
flags.DEFINE_bool("print_config", False, "print every key, its value and where it is from, and do nothing else")
flags.DEFINE_string("workdir", "", "folder of the run; default: runs/<recipe>[-<topology>]")


@dataclasses.dataclass(frozen=True)
class Command:
    """What was asked for: a validated configuration on a settled platform.

    `scaled_down` maps each key that a simulation shrank to (old, new); None where nothing is simulated.
    """

    loaded: loading.Loaded
    workdir: pathlib.Path
    accelerator: str
    num_devices: int | None
    scaled_down: dict[str, tuple] | None

    @property
    def config(self):
        """The configuration with everything applied."""
        return self.loaded.config

    def banner(self) -> list[str]:
        """Return the lines that say what is simulated and what that shrank, old -> new."""
        if self.scaled_down is None:
            return []
        name, chips = self.loaded.topology.name, self.num_devices
        changes = [f"  {key} {old} -> {new}" for key, (old, new) in self.scaled_down.items()]
        return [
            f"SIMULATION: no accelerator here, so {name} is {chips} simulated CPU devices, with the same mesh and",
            "the sizes of the recipe scaled down; the speed says nothing about a TPU.",
            *changes,
        ]


def parse_flags(description: str) -> dict[str, str]:
    """Parse sys.argv by absl; return the `--config.key=value` overrides as typed. Installs the exit hooks."""
    sys.excepthook = _end_with_one_line
    threading.excepthook = lambda args: _end_with_one_line(args.exc_type, args.exc_value, args.exc_traceback)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends as Ctrl-C does, until a loop takes it over
    overrides, rest = split_overrides(sys.argv)
    if {"-h", "--help", "-help"} & set(rest):
        _print_help(description)
        sys.exit(0)
    try:
        stray = FLAGS(rest)[1:]
    except flags.Error as error:
        raise ConfigError(" ".join(str(error).split())) from None
    if stray:
        raise ConfigError(f"stray argument {stray[0]!r}; options are written --name=value")
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
    accelerator = startup.attached_accelerator()
    simulated = startup.is_simulation(loaded.topology, accelerator)
    cache = cache_path(loaded.config.data.cache_dir)
    num_devices = startup.prepare_platform(loaded.topology, accelerator, cache)
    num_devices = 1 if one_device else num_devices
    scaled_down = None
    if num_devices is not None:
        validation.resolve_mesh(loaded.config, num_devices)
        if simulated:
            scaled_down = simulation.scale_down(loaded.config, loaded.typed)
        validation.validate(loaded.config, num_devices)
    return Command(loaded, _workdir(), accelerator, num_devices, scaled_down)


def parse_configuration(
    description: str, *, stored: Callable[[flags.FlagValues], bool] = lambda parsed: False
) -> loading.Loaded:
    """Return the configuration that the command line asks for; with --print_config print it and end."""
    overrides = parse_flags(description)
    if stored(FLAGS):
        unread = [name for name in ("config", "topology") if FLAGS[name].present and FLAGS.workdir]
        if unread:
            raise ConfigError(f"--{unread[0]} is not read here, where --workdir has the configuration; leave it out")
        loaded = loading.load_stored(_workdir(), overrides)
    else:
        loaded = loading.load(FLAGS.config, FLAGS.topology, overrides)
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
    lines = [
        f"{key} = {value!r}  ({loaded.origins.get(key, 'configs/base.py')})"
        for key, value in loading.flat(loaded.config).items()
    ]
    return "".join(line + "\n" for line in lines)


def log_to(folder: pathlib.Path, process_index: int) -> None:
    """From now on write messages and tracebacks to `folder`/log-<process>.txt."""
    handler = logging.FileHandler(folder / f"log-{process_index}.txt", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    LOG.addHandler(handler)
    LOG.propagate = False
    LOG.setLevel(logging.INFO)


def _workdir() -> pathlib.Path:
    topology = f"-{FLAGS.topology}" if FLAGS.topology else ""
    if "://" in FLAGS.workdir:
        raise ConfigError(f"--workdir={FLAGS.workdir}: only local folders work yet; mount the bucket, or name a folder")
    return pathlib.Path(FLAGS.workdir or f"runs/{pathlib.Path(FLAGS.config).stem}{topology}").expanduser()


def _print_help(description: str) -> None:
    print(description.strip() + "\n\nFlags:")
    for flag in FLAGS.get_flags_for_module(sys.modules["__main__"]) + FLAGS.get_flags_for_module(__name__):
        default = f" (default {flag.default!r})" if flag.default not in (None, "", []) else ""
        print(f"  --{flag.name}: {flag.help}{default}")
    print("  --config.SECTION.KEY=VALUE: any key of configs/base.py, where each is documented")


def _end_with_one_line(kind: type, error: BaseException, trace: types.TracebackType | None) -> None:
    """The last line on stderr says what and where; the traceback goes to the log, or before it without one."""
    status = getattr(error, "exit_status", INTERRUPTED if kind is KeyboardInterrupt else 1)
    message = " ".join(str(error).split()) or kind.__name__
    if kind is KeyboardInterrupt:
        line = "interrupted; run the same command to go on"
    elif status == 1:
        frame = traceback.extract_tb(trace)[-1]
        line = f"error: {kind.__name__}: {message[:400]} ({frame.filename}:{frame.lineno}{_log_note()})"
        for file in _log_files():
            file.parent.mkdir(parents=True, exist_ok=True)
        LOG.error("ended by", exc_info=(kind, error, trace))
    else:
        line = message if status == INTERRUPTED else f"error: {message}"
    sys.stdout.flush()
    print(line, file=sys.stderr, flush=True)
    logging.shutdown()
    os._exit(status)  # without waiting for threads that the failure may have left hanging


def _log_note() -> str:
    return "".join(f"; traceback in {os.path.relpath(file)}" for file in _log_files())


def _log_files() -> list[pathlib.Path]:
    return [pathlib.Path(h.baseFilename) for h in LOG.handlers if isinstance(h, logging.FileHandler)]
