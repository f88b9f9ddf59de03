# SPDX-License-Identifier: Apache-2.0
"""A study or search (sweep.py) as the launched program: where its trials are, and which of them runs."""

import dataclasses
import pathlib

from files.json_reader import JsonError, parse_json
from pods import hosts, recipes
from pods.answers import Progress
from pods.errors import PodError, usage_error
from pods.settings import Settings
from pods.transports import Transport

COUNTS = ("done", "pruned", "failed", "cancelled", "left")  # of trials, in study.json
FINAL = (1, 2)  # exit statuses that a restart would repeat: failed trials or a spent budget; a mistake
FILE = "study.json"


def with_root(settings: Settings, num_workers: int, words: list[str]) -> tuple[list[str], str | None]:
    """Return the words of a study or search with --root and --topology, and its root; other words, and None.

    A relative --root is in the bucket, as a relative WORKDIR is. Raises PodError if the hosts share no folder.
    """
    subcommand = words[2] if len(words) > 2 and pathlib.PurePath(words[1]).name == "sweep.py" else ""
    if subcommand not in ("run", "search"):
        return words, None
    named = [word for word in words[3:4] if not word.startswith("-")] or ["searches"]
    typed = dict(word.lstrip("-").partition("=")[::2] for word in words[3:])
    if typed.get("root") == "":
        raise usage_error("--root has no value; write --root=FOLDER")
    name = "-".join(filter(None, [pathlib.PurePath(named[0]).stem, typed.get("base")]))
    if "root" in typed:
        settings = dataclasses.replace(settings, workdir=typed["root"])
    root, topology = settings.shared_folder(num_workers, name), recipes.preset(settings)
    preset = [f"--topology={topology.name}"] if topology and "topology" not in typed else []
    shared = [] if "://" in root else ["--allow_local"]  # the hosts of this pod share it
    return [*words, *preset, *shared, f"--root={root}"], root


def with_progress(settings: Settings, transport: Transport, record: dict) -> dict:
    """Return the record of a study with the folder of the running trial as its workdir; other records as they are.

    The content of study.json is added as `progress`; it is None before the first trial, or if it cannot be read.
    """
    if not record.get("study"):
        return record
    progress = _read(settings, transport, record["study"])
    return record | {"workdir": (progress or {}).get("workdir") or None, "progress": progress}


def trained_now(settings: Settings, transport: Transport, record: dict) -> tuple[str, float]:
    """Return the folder that is trained in, and since when; PodError if no trial of a study runs."""
    now = with_progress(settings, transport, record)
    if not now["workdir"]:
        raise PodError(f"no trial runs: {'; '.join([what(now), *lines(now)])}")
    return now["workdir"], now["progress"]["time"] if record.get("study") else record["time"]


def what(record: dict) -> str:
    """Return what was launched, in words."""
    if record.get("study"):
        return f"study {record['study']}"
    return f"run {record['workdir']}" if record["workdir"] else f"program {' '.join(record['words'])[:60]}"


def lines(record: dict) -> list[str]:
    """Return a line about the trials of a study, from `with_progress`."""
    if not (progress := record.get("progress")):
        return []
    running = f"{progress['trial']} in {progress['workdir']}" if progress["trial"] else "none"
    counts = ", ".join(f"{progress[name]} {name}" for name in COUNTS if name in progress)
    return [f"trial that runs: {running}; {counts}"]


def _read(settings: Settings, transport: Transport, root: str) -> Progress | None:
    [result] = transport.run(hosts.read_command(settings, root, FILE), worker="0", show=False)
    if result.status or not result.output:
        return None
    try:
        return parse_json(result.output, Progress, f"{root}/{FILE}")
    except JsonError as error:
        raise PodError(str(error)) from None
