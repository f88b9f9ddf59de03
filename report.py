# SPDX-License-Identifier: Apache-2.0
"""Write a page about one or several runs: python report.py runs/mine [runs/other ...] --html=report.html

It shows losses, speed, memory, goodput, events, evaluations and the configuration, of several runs over each other. A
run may still be going on, and may be in a gs:// folder. docs/observability.md describes the page.
"""

from files.paths import expanded
from core import command_line

import os
import pathlib
import sys

from checkpointing.bucket import open_bucket
from cluster import startup
from cluster.hub import RunError
from configs.errors import ConfigError, check_text
from core import output_files
from input_pipeline.cache import cache_path
from reporting.display import listed

PAGE = "report.html"
NOT_READ = ("config", "topology", "print_config", "workdir", "join_seconds")  # flags of the other commands
command_line.flags.DEFINE_string("html", PAGE, "file of the page")


def main(arguments: list[str]) -> None:
    """Read the runs that the command line names, and write their page."""
    words, rest = positional(arguments)
    sys.argv = [sys.argv[0], *rest]
    command_line.parse_flags(__doc__, NOT_READ, "a report shows runs as they are")
    if not words:
        raise ConfigError(f"no run is named; give its folder, as in report.py runs/mine --html={PAGE}")
    output_files.check("html")
    named = by_name(words)
    from reporting.run_report import page, reading  # numpy is imported only for a command line without mistakes

    folders = {name: local_folder(place) for name, place in named.items()}
    local = {name: folder for name, folder in folders.items() if "://" not in named[name]}
    others = [name for name, folder in local.items() if folder.exists() and not reading.holds_run(folder)]
    if others and len(others) < len(folders):  # as in runs/*
        print(f"left out, since they hold no run that was trained: {listed(others, page.MOST_NAMED)}", file=sys.stderr)
        folders = {name: folder for name, folder in folders.items() if name not in others}
    made = page.page([reading.read_run(folder, name) for name, folder in folders.items()])
    print(f"report: {output_files.write('html', made)}")


def positional(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the words that name runs, and the flags; the value of --html may be the next word."""
    words, rest = [], []
    for before, word in zip(["", *arguments], arguments, strict=False):
        (rest if word.startswith("-") or before == "--html" else words).append(word)
    return words, rest


def by_name(places: list[str]) -> dict[str, str]:
    """Return {name of a run: its folder}; ConfigError if two have the same name."""
    named: dict[str, str] = {}
    for place in places:
        name = os.path.basename(os.path.abspath(place)) or place
        check_text("run", name)
        if name in named:
            raise ConfigError(
                f"{named[name]} and {place} are both named {name}, by which the page tells runs apart; rename one, or "
                "give a link to it"
            )
        named[name] = place
    return named


def local_folder(place: str) -> pathlib.Path:
    """Return the folder of a run; of one in a bucket, a local copy of its small files."""
    if bucket := open_bucket(place, cache_path("")):
        startup.choose_libraries()
        try:
            bucket.fetch(keep_newer=True)
        except (ConfigError, RunError) as error:
            raise type(error)(str(error).removeprefix("--workdir=")) from None
        return bucket.folder
    return expanded(place)


if __name__ == "__main__":
    main(sys.argv[1:])
