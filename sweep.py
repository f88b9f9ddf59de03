# SPDX-License-Identifier: Apache-2.0
"""Run studies, groups of training runs that answer questions: python sweep.py run exp08-ema --workers=2

  plan NAME      resolve and check every configuration; print steps, hours and cost on --topology
  run NAME       queue what has no trial yet, and work until every trial has ended
  status [NAME]  print queued, running, done and failed trials, chip-hours and cost
  report [NAME]  write an HTML page: a section per group, the answer first
  cancel NAME    end waiting trials, and let running ones save and stop
  retry NAME     queue failed trials again; each resumes from its checkpoint
  search         train configurations of --config from --space, chosen by --method, and print the best

NAME is a group (exp08-ema), a suite of configs/experiments/ (trm), or a suite with a base (trm-mini). Run a command
again to continue after any interruption. It needs `make setup EXTRAS=studies`; docs/studies.md is the guide.
"""

from core import command_line

import dataclasses
import functools
import importlib
import os
import pathlib
import signal
import sys
from collections.abc import Callable

from cluster import processes, startup
from configs.errors import ConfigError, did_you_mean, shown, similar
from reporting.display import aligned
from studies import pod, suites

METHODS = ("random", "tpe", "cmaes", "evolution", "local_search")  # see studies/samplers.py
PRUNERS = ("none", "median", "asha")
flags = command_line.flags
flags.DEFINE_string("storage", "sqlite:///studies.db", "database of the studies: sqlite:///FILE or postgresql://...")
flags.DEFINE_string("root", "", "folder or gs:// folder of the trials' folders; default: runs/STUDY")
flags.DEFINE_string("base", "", "base of the suite, as paper; default: the first")
flags.DEFINE_integer("workers", 1, "processes that run trials at the same time", 1, 1000)
flags.DEFINE_integer("seeds", 0, "run each configuration with the seeds 0 to SEEDS - 1; 0: the recipe's", 0, 1000)
flags.DEFINE_bool("dry_run", False, "print what would run, and change nothing")
flags.DEFINE_string("space", "spaces/lr.py", "search: Python file with the SPACE of keys and their values")
flags.DEFINE_enum("method", "evolution", METHODS, "search: how the next configuration is chosen")
flags.DEFINE_enum("prune", "none", PRUNERS, "search: which trials end early, by their held-out loss")
flags.DEFINE_integer("trials", 40, "search: number of trials", 1, 1_000_000)
flags.DEFINE_integer("search_seed", 0, "search: seed of the method", 0, 2**31)
flags.DEFINE_string("name", "", "search: name of the study; default: RECIPE-SPACE-METHOD")
flags.DEFINE_string("html", "studies.html", "file of the report")
OF_SEARCH = ("space", "method", "prune", "trials", "search_seed", "name", "config")
OF_GROUPS = ("base", "seeds", "html", "dry_run")
SEARCH = "search"
NOT_READ = ("workdir", "print_config", "join_seconds")  # flags of the other commands


def main(arguments: list[str]) -> int:
    """Run the subcommand of the command line; return the exit status."""
    words, rest = positional(arguments)
    sys.argv = [sys.argv[0], *rest]
    overrides = command_line.parse_flags(__doc__)
    known = [*SUBCOMMANDS, SEARCH]
    if not words or words[0] not in known:
        near = did_you_mean(similar(words[0], known)) if words else ""
        what = f"{shown(words[0])} is not a subcommand{near}" if words else "no subcommand is given"
        raise ConfigError(f"{what} (all: {', '.join(known)})")
    for flag in NOT_READ:
        if command_line.FLAGS[flag].present:
            raise ConfigError(f"--{flag} is not read here: a study has its recipe and the folders of its trials")
    for flag in OF_GROUPS if words[0] == SEARCH else OF_SEARCH:
        if command_line.FLAGS[flag].present:
            raise ConfigError(f"--{flag} is not read by {words[0]}; omit it")
    name, *more = words[1:] or [""]
    if more or (name and words[0] == SEARCH):
        takes = "takes no name; --name names its study" if words[0] == SEARCH else "takes one name"
        raise ConfigError(f"stray argument {shown((more or [name])[0])!r}; {words[0]} {takes}")
    if words[0] == SEARCH:
        return search(overrides)
    if not name:
        if words[0] not in ("status", "report"):
            raise ConfigError(f"{words[0]} needs the name of a group or suite (all: {', '.join(suites.suite_names())})")
        name = suites.suite_names()[0]
    asked = Asked(name, overrides)
    if words[0] not in ("plan", "run") and not command_line.FLAGS.dry_run:
        importlib.import_module("studies.storage")  # says so if a package is missing
    return SUBCOMMANDS[words[0]](asked)


def positional(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that come before any flag, and the rest; flags may be written with hyphens (--dry-run)."""
    first = next((at for at, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    rest = []
    for word in arguments[first:]:
        flag, equals, value = word.partition("=")
        is_ours = flag.startswith("--") and not flag.startswith("--config.")
        rest.append((f"--{flag[2:].replace('-', '_')}" if is_ours else flag) + equals + value)
    return arguments[:first], rest


class Asked:
    """What the command line asks for.

    Attributes:
      study: with its groups.
      groups: names of those that are asked for.
      members: the configurations of these groups, resolved.
      overrides: typed text by dotted key.
    """

    def __init__(self, name: str, overrides: dict[str, str]):
        parsed = command_line.FLAGS
        self.overrides, self.topology = overrides, parsed.topology
        self.study, self.groups = suites.find(name, parsed.base)
        self.how = dict(seeds=parsed.seeds, topology=parsed.topology, overrides=overrides)
        self.members = suites.members(self.study, self.groups, **self.how)
        self.root = suites.runs_of(parsed.root or f"runs/{self.study.name}")

    @property
    def runnable(self) -> list[suites.Member]:
        """The configurations that are not refused."""
        return [member for member in self.members if not member.refusal]

    @property
    def digests(self) -> set[str]:
        """The digests of all configurations that can run."""
        return {member.digest for member in self.runnable}

    def orders(self) -> list:
        """Return an order for each different configuration; the first member of the whole study names its folder."""
        from studies.trials import Order

        owners = suites.owners(self.study, **self.how)
        return [
            Order(owner, suites.folder(self.root, owner), self.topology)
            for digest, owner in owners.items() if digest in self.digests
        ]  # fmt: skip

    def queue(self, *, create: bool):
        """Return the queue of the study; ConfigError if there is none and it is not to be created."""
        from studies.storage import open_storage
        from studies.trials import Queue

        storage = open_storage(command_line.FLAGS.storage, create=create)
        return Queue(storage, self.study.name, self.study.suite.direction, create=create)


def plan(asked: Asked) -> int:
    """Print the table of a plan."""
    from studies import planning

    print("\n".join(planning.table(asked.study, asked.members, asked.topology)))
    return 0


def run(asked: Asked) -> int:
    """Queue and run; print each trial's end. On several hosts process 0 does this, and the others follow it."""
    if command_line.FLAGS.dry_run:
        from studies import planning

        print("\n".join(planning.table(asked.study, asked.members, asked.topology)))
        print("dry run: nothing was queued or started")
        return 0
    group = group_of_hosts()
    if group is None:
        importlib.import_module("studies.storage")  # says so if a package is missing
        from studies import launch

        signal.signal(signal.SIGTERM, signal.default_int_handler)
        queue_and_work(asked, launch.in_processes)
        return 0
    check_flags_of_pod(group)
    pod.join(group, command_line.FLAGS.join_seconds, command_line.end_with_the_others, asked.root)
    return (pod.follow() if processes.index() else lead(asked)).tell()


def group_of_hosts() -> processes.Group | None:
    """Return the group of hosts on which this command was started; None for a single host."""
    group = processes.find(os.environ, startup.attached_accelerator(), command_line.FLAGS.join_seconds)
    return group if group and group.count > 1 else None


def lead(asked: Asked) -> pod.End:
    """Queue and run on all hosts; return how the study ended."""
    importlib.import_module("studies.storage")
    from studies import leading

    return leading.lead(functools.partial(queue_and_work, asked, leading.on_all_hosts))


def queue_and_work(asked: Asked, start: Callable) -> None:
    """Queue what has no trial yet, and work until all trials have ended; `start` is that of launch.run."""
    from studies import launch

    refused = [f"{member.title} is left out: {member.refusal}" for member in asked.members if member.refusal]
    queue = asked.queue(create=True)
    if refused:
        print("\n".join(refused), flush=True)
    added, all_of_them = queue.enqueue(asked.orders()), len(asked.digests)
    shared = len(asked.runnable) - all_of_them
    note = f" ({shared} configurations share the trial of an equal one)" if shared else ""
    print(f"{asked.study.name}: {all_of_them} trials{note}, {added} of them new; {asked.root}", flush=True)
    launch.run(
        queue, asked.digests, asked.study.suite.metric, command_line.FLAGS.storage, command_line.FLAGS.workers,
        root=asked.root, start=start,
    )  # fmt: skip


def check_flags_of_pod(group: processes.Group) -> None:
    """Raise ConfigError for flags that cannot be used on several hosts."""
    if command_line.FLAGS.workers > 1:
        raise ConfigError(
            f"--workers={command_line.FLAGS.workers}: the {group.count} hosts train one trial at a time; omit the flag"
        )
    if not command_line.FLAGS.root:
        raise ConfigError(f"the {group.count} hosts need a --root that all of them see, as gs://BUCKET/runs/STUDY")


def status(asked: Asked) -> int:
    """Print the table of trials by group."""
    from studies import summary

    print("\n".join(summary.lines(asked.study, asked.members, asked.queue(create=False))))
    return 0


def report(asked: Asked) -> int:
    """Write the page."""
    from studies import answers, page

    command_line.check_file_to_write("html")
    found = answers.of_study(asked.study, asked.members, asked.queue(create=False).latest())
    path = pathlib.Path(command_line.FLAGS.html).expanduser()
    path.write_text(page.page(asked.study, found))
    print(f"wrote {path}")
    return 0


def cancel(asked: Asked) -> int:
    """Cancel all trials of the groups that have not ended."""
    ended, told = asked.queue(create=False).cancel(asked.digests)
    print(f"{ended} waiting trials are cancelled; {told} running ones save and stop within seconds")
    return 0


def retry(asked: Asked) -> int:
    """Queue failed trials again."""
    count = asked.queue(create=False).retry(asked.digests)
    print(f"{count} failed trials are queued again; `sweep.py run` starts them")
    return 0


def search(overrides: dict[str, str]) -> int:
    """Train what the method chooses until all trials have ended; print the best."""
    if group := group_of_hosts():
        raise ConfigError(f"a search trains on one host, but this is one of {group.count} ({group.source}); use one")
    from studies import launch, searching
    from studies.spaces import read
    from studies.suites import runs_of

    parsed = command_line.FLAGS
    read(parsed.space)  # reports mistakes before anything is stored
    parts = [pathlib.Path(path).stem for path in (parsed.config, parsed.space)]
    name = parsed.name or "-".join([*parts, parsed.method])
    asked = searching.Search(
        parsed.storage, name, parsed.config, parsed.space, parsed.method, parsed.prune, parsed.trials,
        parsed.search_seed, "eval_loss", runs_of(parsed.root or "runs/searches"), parsed.topology, overrides,
        list(launch.TRAIN),
    )  # fmt: skip
    queue = searching.begin(asked)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    statuses = launch.work("studies.searching", dataclasses.asdict(asked), min(parsed.workers, parsed.trials))
    print("\n".join(aligned(searching.table(queue))))
    searching.judge(queue, asked.count, statuses)
    return 0


SUBCOMMANDS: dict[str, Callable[[Asked], int]] = {
    "plan": plan, "run": run, "status": status, "report": report, "cancel": cancel, "retry": retry,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
