# SPDX-License-Identifier: Apache-2.0
"""Run studies, groups of training runs that answer questions: python sweep.py run exp08-ema --workers=2

  plan NAME      resolve and check every configuration; print steps, hours and cost on --topology
  run NAME       queue what has no trial yet, and work until every trial has ended
  status [NAME]  print queued, running, done and failed trials, chip-hours and cost
  report [NAME]  write an HTML page: a section per group, the answer first
  guide [NAME]   print the guide of a group: hypothesis, how to run, expected, analysis, troubleshooting
  folders NAME   list the folder of each configuration below --root, and check that no two have the same
  cancel NAME    end waiting trials, and let running ones save and stop
  retry NAME     queue failed and cancelled trials again; each resumes from its checkpoint
  search         train configurations of --config from --space, chosen by --method, and print the best

NAME is a group (exp08-ema), a suite of configs/experiments/ (trm), or a suite with a base (trm-mini); for status,
report and retry also a search. Without a name, status and report show the only study of --storage. Run a command again
to continue after any interruption. It needs `make setup EXTRAS=studies`; docs/studies.md is the guide.
"""

from core import command_line, ending

import importlib
import math
import sys
from collections.abc import Callable

from core import output_files
from configs.errors import ConfigError, did_you_mean, shown, similar
from reporting.display import aligned, counted
from settings.keys import check_no_secrets
from studies.cost import limits
from studies import running, suites
from studies.asked import StudyRequest, estimates

METHODS = ("random", "tpe", "cmaes", "evolution", "local_search", "pbt")  # see studies/search/
PRUNERS = ("none", "median", "asha")
ALSO = ("parameters", "step_seconds")  # see studies/search/second_objective.py
flags = command_line.flags
flags.DEFINE_string("storage", "sqlite:///studies.db", "database of the studies: sqlite:///FILE or postgresql://...")
flags.DEFINE_string("root", "", "folder or gs:// folder of the trials' folders; default: runs/STUDY")
flags.DEFINE_string("base", "", "base of the suite, as paper; default: the first")
flags.DEFINE_integer("workers", 1, "processes that run trials at the same time", 1, 1000)
flags.DEFINE_integer("seeds", 0, "run each configuration with the seeds 0 to SEEDS - 1; 0: the recipe's", 0, 1000)
flags.DEFINE_bool("dry_run", False, "print what would run, and change nothing")
flags.DEFINE_float("price", None, "dollars per chip-hour, also 0; default: the list price of --topology")
flags.DEFINE_float("grant_days", None, "plan, status: days of --topology that are granted; prints what fits")
flags.DEFINE_float("storage_price", None, "plan: dollars per GB and month, for the checkpoints that --keep keeps")
flags.DEFINE_bool("rehearse", False, "plan: compile the steps whose time is not known; takes a minute each or more")
flags.DEFINE_float("budget", None, "run, status: most chip-hours of all trials of the study")
flags.DEFINE_enum("keep", "all", limits.KEEP, "run, plan: checkpoints of trials that are done; best: of each group")
flags.DEFINE_bool("allow_local", False, "run, search: let trials on a pod write to a local folder")
flags.DEFINE_bool("skip_small", False, "run: launch a recipe on several hosts that has not run on fewer")
flags.DEFINE_string("space", "spaces/lr.py", "search: Python file with the SPACE of keys and their values")
flags.DEFINE_enum("method", "tpe", METHODS, "search: how the next configuration is chosen")
flags.DEFINE_enum("prune", "none", PRUNERS, "search: which trials end early, by their held-out loss")
flags.DEFINE_enum("also", None, ALSO, "search: minimize this too; step_seconds: as rehearsed for --topology")
flags.DEFINE_integer("trials", 40, "search: number of trials", 1, 1_000_000)
flags.DEFINE_integer(
    "population", 8, "search: members of --method=pbt; --trials is generations times members", 2, 10_000
)
flags.DEFINE_integer("search_seed", 0, "search: seed of the method", 0, 2**31)
flags.DEFINE_string("name", "", "search: name of the study; default: RECIPE-SPACE-METHOD")
flags.DEFINE_string("html", "studies.html", "file of the report")
READ_BY = {  # subcommands by flag; those that all read are not listed
    "html": ("report",), "dry_run": ("run",), "workers": ("run", "search"),
    "price": ("plan", "run", "status"), "grant_days": ("plan", "status"), "storage_price": ("plan",),
    "rehearse": ("plan",),
    "budget": ("run", "status"), "keep": ("plan", "run"), "allow_local": ("run", "search"), "skip_small": ("run",),
} | dict.fromkeys(
    ("space", "method", "prune", "also", "trials", "population", "search_seed", "name", "config"), ("search",)
) | dict.fromkeys(
    ("base", "seeds"), ("plan", "run", "status", "report", "guide", "folders", "cancel", "retry")
)  # fmt: skip
SEARCH = "search"
NOT_READ = ("workdir", "print_config", "join_seconds")  # flags of the other commands


def check_strays(subcommand: str, words: list[str]) -> None:
    """Raise ConfigError if more words than one name follow a subcommand, or any word follows a search."""
    takes = "takes no name; --name names its study" if subcommand == SEARCH else "takes one name"
    if stray := words[1:] or (words if subcommand == SEARCH else []):
        raise ConfigError(f"stray argument {shown(stray[0])!r}; {subcommand} {takes}")


def name_without(subcommand: str) -> str:
    """Return the name that a subcommand means if none is typed; ConfigError if it needs one."""
    if subcommand == "guide":
        return suites.suite_names()[0]
    if subcommand in ("status", "report"):
        return stored_name()
    raise ConfigError(f"{subcommand} needs the name of a group or suite (all: {', '.join(suites.suite_names())})")


def main(arguments: list[str]) -> int:
    """Run the subcommand of the command line; return the exit status."""
    ending.install()
    words, rest = positional(arguments)
    known = [*SUBCOMMANDS, SEARCH]
    if late := [word for word in rest if word in known and not words]:
        raise ConfigError(f"{late[0]} comes before the flags, as the first word")
    sys.argv = [sys.argv[0], *rest]
    overrides = command_line.parse_flags(__doc__, NOT_READ, "a study has its recipe and the folders of its trials")
    if not words or words[0] not in known:
        near = did_you_mean(similar(words[0], known)) if words else ""
        what = f"{shown(words[0])} is not a subcommand{near}" if words else "no subcommand is given"
        raise ConfigError(f"{what} (all: {', '.join(known)})")
    check_flags(words[0])
    ending.continues(words[0] in ("run", SEARCH))
    if words[0] in ("run", SEARCH):
        check_no_secrets(overrides)
    check_amounts()
    check_strays(words[0], words[1:])
    if words[0] == SEARCH:
        return search(overrides)
    if words[0] in ("plan", "guide", "folders", "run"):
        return on_study(words, overrides)
    storage = importlib.import_module("studies.storage")  # says so if a package is missing
    with storage.reaching():
        return on_study(words, overrides)


def on_study(words: list[str], overrides: dict[str, str]) -> int:
    """Run the subcommand of a study or of a stored search; return the exit status."""
    name = words[1] if words[1:] else name_without(words[0])
    if words[0] in OF_A_SEARCH and (found := find_search(name, overrides)):
        return OF_A_SEARCH[words[0]](found) or 0
    return SUBCOMMANDS[words[0]](StudyRequest(name, command_line.FLAGS, overrides)) or 0


def check_flags(subcommand: str) -> None:
    """Raise ConfigError for a flag that the subcommand does not read."""
    for flag, readers in READ_BY.items():
        if command_line.FLAGS[flag].present and subcommand not in readers:
            readers = f", but by {' and '.join(readers)}" if len(readers) < 4 else ""
            raise ConfigError(f"--{flag} is not read by {subcommand}{readers}; omit it")


def check_amounts() -> None:
    """Raise ConfigError for a time or a price that has no meaning."""
    parsed = command_line.FLAGS
    for flag, unit in (("price", "dollars per chip-hour"), ("storage_price", "dollars per GB and month")):
        if parsed[flag].value is not None and not 0 <= parsed[flag].value < math.inf:
            raise ConfigError(f"--{flag}={parsed[flag].value} must be 0 or greater: {unit}")
    for flag, unit in (("grant_days", "days"), ("budget", "chip-hours")):
        if parsed[flag].value is not None and not 0 < parsed[flag].value < math.inf:
            raise ConfigError(f"--{flag}={parsed[flag].value} must be greater than 0: {unit}")
    for flag in ("grant_days", "rehearse"):
        if parsed[flag].value and not parsed.topology:
            raise ConfigError(f"--{flag} needs the slice; add it, as --topology=v4-64")
    if parsed.storage_price is not None and parsed.grant_days is None:
        raise ConfigError("--storage_price needs the time that checkpoints are kept; add it, as --grant_days=30")


def positional(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that come before any flag, and the rest; flags may be written with hyphens (--dry-run)."""
    first = next((at for at, word in enumerate(arguments) if word.startswith("-")), len(arguments))
    rest = []
    for word in arguments[first:]:
        flag, equals, value = word.partition("=")
        is_ours = flag.startswith("--") and not flag.startswith("--config.")
        rest.append((f"--{flag[2:].replace('-', '_')}" if is_ours else flag) + equals + value)
    return arguments[:first], rest


def stored_name() -> str:
    """Return the study or search of the storage that is meant if none is named: the first suite's, or the only one."""
    storage = importlib.import_module("studies.storage")  # says so if a package is missing
    default, stored = suites.suite_names()[0], storage.study_names(command_line.FLAGS.storage)
    if default in stored or not stored:
        return default
    if len(stored) > 1:
        raise ConfigError(f"--storage has several studies; name one (all: {', '.join(stored)})")
    return stored[0]


def find_search(name: str, overrides: dict[str, str]):
    """Return the search of a name that is neither a group nor a suite; None if it is one of these."""
    parsed = command_line.FLAGS
    try:
        suites.find(name, parsed.base)
        return None
    except ConfigError as unknown:
        if parsed.base:  # only a suite has one, so the mistake is there
            raise
        importlib.import_module("studies.storage")  # says so if a package is missing
        from studies.search import searches

        found = searches.find(parsed.storage, name, str(unknown))
    given = [f"--{flag}" for flag in ("base", "seeds", "price", "budget", "grant_days") if parsed[flag].present]
    typed = [*given, *(f"--config.{key}" for key in overrides)]
    if typed:
        raise ConfigError(f"{typed[0]} is not read for the search {name}, which has its own keys; omit it")
    return found


def plan(asked: StudyRequest) -> None:
    """Print the table of a plan; with --grant_days, also what fits into the grant."""
    from studies.cost import grant, planning, rehearsals

    parsed = command_line.FLAGS
    if parsed.rehearse:
        different = {member.digest: member for member in asked.runnable}
        for line in rehearsals.fill_cache(list(different.values()), asked.topology):
            print(line, flush=True)
    found, trials = estimates(asked)
    print("\n".join(planning.table(asked.study, asked.members, asked.topology, found)))
    if parsed.grant_days is not None:
        given = grant.Grant(
            parsed.grant_days, asked.topology, planning.price_of(asked.topology, parsed.price), parsed.storage_price,
            parsed.keep,
        )  # fmt: skip
        stored = {digest: trial.user_attrs.get("checkpoint_bytes") for digest, trial in trials.items()}
        sizes = {
            member.digest: stored.get(member.digest) or rehearsals.checkpoint_bytes(member.values, asked.topology)
            for member in asked.runnable
        }
        print("\n".join(grant.lines(given, asked.members, found, sizes)))


def status(asked: StudyRequest) -> None:
    """Print the table of trials by group, and what is left of a budget or a grant."""
    from studies.cost import budget, planning
    from studies.report import summary

    parsed, queue = command_line.FLAGS, asked.queue(create=False)
    trials = queue.latest()
    table = summary.lines(asked.study, asked.members, trials, queue.running(), parsed.price)
    print("\n".join([*table, *asked.others(trials)]))
    price, chips = planning.price_of(asked.topology, parsed.price), planning.chips_of(asked.topology)
    if parsed.budget is not None:
        print(budget.left_of("budget", parsed.budget, queue, price))
    if parsed.grant_days is not None:
        print(budget.left_of(f"grant of {parsed.grant_days:g} days", parsed.grant_days * 24 * chips, queue, price))


def report(asked: StudyRequest) -> None:
    """Write the page."""
    from studies.report import answers, page

    output_files.check("html")
    trials = asked.queue(create=False).latest()
    print("".join(f"{line}\n" for line in asked.others(trials)), end="")
    found = answers.of_study(asked.study, asked.members, trials)
    write_page(page.page(asked.study, found))


def write_page(content: str) -> None:
    """Write the file of --html, and say so."""
    print(f"wrote {output_files.write('html', content)}")


def status_of_search(found) -> None:
    """Print how a search stands, and its best trials."""
    from studies.search import searches

    print("\n".join(searches.lines(found)))


def report_of_search(found) -> None:
    """Write the page of a search."""
    from studies.search import page as search_page

    output_files.check("html")
    write_page(search_page.document(found))


def refuse_to_cancel_search(found) -> None:
    """Raise ConfigError: the workers of a search hold its trials, and none waits for others."""
    raise ConfigError(
        f"{found.name} is a search, and cancel is for groups and suites; Ctrl-C lets its `sweep.py search` save and "
        "end, and the same command continues it"
    )


def retry_search(found) -> None:
    """Queue the failed trials of a search again; ConfigError for a population, which goes on without them."""
    from studies import storage, trials

    if found.definition.get("population"):
        raise ConfigError(
            f"{found.name} is a search with --method=pbt, in which a failed member goes on with the weights of another"
        )
    queue = trials.Queue(storage.open_storage(command_line.FLAGS.storage, create=False), found.name, create=False)
    again = queue.retry({trial.user_attrs["digest"] for trial in found.trials})
    print(f"queued again: {counted(again, 'trial')}; the same `sweep.py search` starts them")


def guide(asked: StudyRequest) -> None:
    """Print the guide of a group; of a suite, the groups with their questions."""
    from studies.report import guide as guides

    if len(asked.groups) > 1:
        questions = [(name, group.question) for name, group in asked.study.groups.items()]
        print("\n".join(aligned([("group", "question"), *questions])))
    else:
        print(guides.markdown(asked.study, asked.groups[0]))


def folders(asked: StudyRequest) -> None:
    """Print the folder of each configuration."""
    found = suites.folders(asked.root, asked.members)
    print("\n".join(f"{place}/" for place in found.values()))
    print(f"{counted(len(found), 'configuration')} in {counted(len(asked.groups), 'group')}, each with its own folder")
    print("Equal configurations are one trial, in the folder of the first of them.")


def cancel(asked: StudyRequest) -> None:
    """Cancel all trials of the groups that have not ended."""
    queue = asked.queue(create=False)
    ended, stopping = queue.cancel(asked.digests)
    print(f"cancelled: {counted(ended, 'waiting trial')}; asked to save and stop: {counted(stopping, 'running trial')}")
    print("".join(f"{line}\n" for line in asked.others(queue.latest())), end="")


def retry(asked: StudyRequest) -> None:
    """Queue failed trials again."""
    queue = asked.queue(create=False)
    print(f"queued again: {counted(queue.retry(asked.digests), 'trial')}; `sweep.py run` starts them")
    print("".join(f"{line}\n" for line in asked.others(queue.latest())), end="")


def search(overrides: dict[str, str]) -> int:
    """Train what the method chooses until all trials have ended; print the best."""
    parsed = command_line.FLAGS
    root = suites.runs_of(parsed.root or "runs/searches")

    def work(on_hosts: bool, devices: list[dict[str, str]]) -> None:
        from studies.search import training

        if on_hosts:
            from studies.leading import search_on_all_hosts as start
        else:
            start = training.in_processes
        asked = training.asked(parsed, overrides, root)
        running.make_root(root)
        training.train(asked, devices, start)

    return running.on_hosts_or_here(parsed, root, work)


SUBCOMMANDS: dict[str, Callable[[StudyRequest], int | None]] = {  # they return the exit status; None: 0
    "plan": plan, "run": running.run, "status": status, "report": report, "guide": guide, "folders": folders,
    "cancel": cancel, "retry": retry,
}  # fmt: skip
OF_A_SEARCH: dict[str, Callable] = {
    "status": status_of_search, "report": report_of_search, "cancel": refuse_to_cancel_search,
    "retry": retry_search,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
