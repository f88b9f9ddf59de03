# SPDX-License-Identifier: Apache-2.0
"""Create, use and delete a pod of TPU VMs: python pod.py SUBCOMMAND [--flag=value ...] [-- COMMAND ...]

A setting is a flag (--zone=us-central2-b) or an environment variable (ZONE); the flag wins. `python pod.py help` lists
all settings.
"""

import dataclasses
import importlib
import os
import pathlib
import signal
import sys
import traceback

from files.paths import PathError
from core import interpreter

try:
    from configs.errors import ConfigError, did_you_mean, similar
    from core import ending
    from pods import settings as table
    from pods.connection import connect
    from pods.errors import PodError, usage_error
    from settings.environment import unread_lines
except ModuleNotFoundError as missing:
    interpreter.restart(missing)

INTERRUPTED = 130


@dataclasses.dataclass(frozen=True)
class Subcommand:
    """A subcommand of this program."""

    group: str
    function: str  # module.name in pods/, which returns the exit status; None: 0
    meaning: str
    takes: str = "nothing"  # what its arguments are: nothing, paths or command
    calls: bool = True  # whether it talks to a pod
    keys: bool = False  # whether it takes --config.KEY=VALUE


SUBCOMMANDS = {
    "versions": Subcommand("create", "life.versions", "list the zone's software versions and accelerators"),
    "create": Subcommand(
        "create", "life.create", "create the pod; --zones=A,B --wait tries zones until one has it", keys=True
    ),
    "wait": Subcommand("create", "life.wait", "wait until the pod can be used"),
    "describe": Subcommand("create", "life.describe", "print state, health and addresses"),
    "delete": Subcommand("create", "life.delete", "delete the pod"),
    "setup": Subcommand("prepare", "life.setup", "install code, packages and optimizations on every host", keys=True),
    "setup_optimizations": Subcommand(
        "prepare", "deploy.setup_optimizations", "copy the switches to every host and compile the step there", keys=True
    ),
    "validate": Subcommand(
        "prepare", "checks.readiness.validate", "check on all hosts that the run is ready to train", keys=True
    ),
    "launch": Subcommand("train", "launch.launch", "start the recipe, or COMMAND, on all hosts", "command", keys=True),
    "launch_optimized": Subcommand(
        "train", "launch.launch_optimized", "start the recipe with the enabled switches", "command", keys=True
    ),
    "launch_pretrain_hf": Subcommand(
        "train", "launch.launch_pretrain_hf", "start the recipe on DATASET", "command", keys=True
    ),
    "supervise": Subcommand("train", "supervise.supervise", "restart the run from a checkpoint when a process dies"),
    "stop": Subcommand("train", "launch.stop", "let the run save, then end it"),
    "restart": Subcommand("train", "launch.restart", "stop, and launch the same again"),
    "status": Subcommand("watch", "watch.status", "print each worker's process, step, memory and code"),
    "metrics": Subcommand("watch", "watch.metrics", "print loss, speed, time left and cost of the run"),
    "tail": Subcommand("watch", "life.tail", "follow the log of a worker"),
    "copy": Subcommand("access", "life.copy", "copy SOURCE to TARGET; one of them is NAME:PATH", "paths"),
    "ssh": Subcommand("access", "life.ssh", "run COMMAND on the hosts", "command"),
    "backup": Subcommand("access", "backup.backup", "copy the run to this machine [FOLDER]", "paths"),
    "manifest": Subcommand(
        "other",
        "manifests.manifest",
        "print the run as a manifest for --gke or --slurm",
        "command",
        calls=False,
        keys=True,
    ),
    "help": Subcommand("other", "", "print this text, with the values of all settings", "paths", calls=False),
}
ALIASES = dict.fromkeys(("launch_pretrain_hf_optimized", "launch_pretrain_optimized"), "launch_optimized")


def main(arguments: list[str]) -> int:
    """Run the subcommand of the command line; return the exit status."""
    typed, dashes, command = arguments, False, []
    if "--" in arguments:
        at = arguments.index("--")
        typed, dashes, command = arguments[:at], True, arguments[at + 1 :]
        table.check_command(command)
    wants_help = [word for word in typed if word in ("-h", "--help", "-help")]
    settings, positional = table.read([word for word in typed if word not in wants_help])
    if wants_help or positional[:1] == ["help"]:
        print(help_text(settings))
        return 0
    if not positional:
        raise usage_error(f"no subcommand is given; use one of {', '.join(SUBCOMMANDS)}")
    name = ALIASES.get(positional[0], positional[0])
    if name not in SUBCOMMANDS:
        near = did_you_mean(similar(name, [*SUBCOMMANDS, *ALIASES]))
        raise usage_error(f"{positional[0]} is not a subcommand{near or '; `pod.py help` lists them'}")
    check_flags(settings, name)
    rest = what_follows(name, positional[1:], dashes, command)
    for line in unread_lines(os.environ, table.UNREAD):
        print(line, file=sys.stderr)
    transport = connect(settings) if SUBCOMMANDS[name].calls else None
    module, _, function = SUBCOMMANDS[name].function.rpartition(".")
    return getattr(importlib.import_module(f"pods.{module}"), function)(settings, transport, rest) or 0


def check_flags(settings: table.Settings, subcommand: str) -> None:
    """Raise PodError for a typed flag or key that is for other subcommands, as `stop --worker=1`: it stops all."""
    for name, field in table.FIELDS.items():
        takers = field.metadata["of"]
        if takers and settings.origins[name] == "flag" and subcommand not in takers.split(", "):
            raise usage_error(f"{subcommand} does not take --{name}, which is for {takers}")
    if settings.overrides and not SUBCOMMANDS[subcommand].keys:
        key, takers = settings.overrides[0].partition("=")[0], [name for name, one in SUBCOMMANDS.items() if one.keys]
        raise usage_error(f"{subcommand} does not take --config.{key}, which is for {', '.join(takers)}")


def what_follows(name: str, positional: list[str], dashes: bool, command: list[str]) -> list[str]:
    """Return the paths or the command that a subcommand takes; PodError for other arguments."""
    takes = SUBCOMMANDS[name].takes
    if takes == "paths":
        return positional + command
    if positional:
        hint = f"; write a command after --: pod.py {name} -- {' '.join(positional)}" if takes == "command" else ""
        raise usage_error(f"{name} does not take the argument {positional[0]!r}{hint}")
    if dashes and takes == "nothing":
        raise usage_error(f"{name} takes no command after --")
    return command


def help_text(settings: table.Settings) -> str:
    """Return the subcommands by group, and every setting with its value and origin."""
    lines = [__doc__.strip()]
    for group in dict.fromkeys(subcommand.group for subcommand in SUBCOMMANDS.values()):
        lines += ["", f"{group}:"]
        lines += [f"  {name:20} {each.meaning}" for name, each in SUBCOMMANDS.items() if each.group == group]
    lines += ["", *table.lines(settings), "  --config.SECTION.KEY=VALUE: any key of configs/base.py, for the run"]
    return "\n".join(lines)


def run(arguments: list[str]) -> int:
    """Run the subcommand and return the exit status; print an expected error as one line on stderr."""
    try:
        status = main(arguments)
        sys.stdout.flush()
        return status
    except BrokenPipeError:
        if not ending.stdout_has_no_reader():
            raise
        discard_output()
        print("error: the program that reads this output has closed it", file=sys.stderr)
        return 1
    except (PodError, ConfigError, PathError) as error:
        if ending.stdout_has_no_reader():
            discard_output()
        sys.stdout.flush()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted; launched programs keep running", file=sys.stderr)
        return INTERRUPTED


def discard_output() -> None:
    """Send what is printed and not yet written, and what follows, nowhere; Python writes it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def end_with_one_line(kind: type, error: BaseException, trace) -> None:
    """Print the traceback of an unexpected error, then one last line with the error and its place."""
    traceback.print_exception(kind, error, trace)
    frame = traceback.extract_tb(trace)[-1]
    place = f"{pathlib.Path(frame.filename).name}:{frame.lineno}"
    print(f"error: {kind.__name__}: {' '.join(str(error).split())} ({place})", file=sys.stderr)


if __name__ == "__main__":
    sys.excepthook = end_with_one_line
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends a foreground command like Ctrl-C
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # so does the end of its terminal, without nohup
        signal.signal(signal.SIGHUP, signal.default_int_handler)
    sys.exit(run(sys.argv[1:]))
