# SPDX-License-Identifier: Apache-2.0
"""List the runs below a folder with their state, last step and losses: python scripts/list_runs.py [FOLDER]

`make runs` lists the runs in runs/.
"""

import pathlib
import shlex
import sys
from typing import NamedTuple

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

from core import interpreter

try:
    from configs.errors import visible
    from core import ending
    from settings import stored_config
    from settings.stored_config import ORIGIN, Origin
    from files.json_reader import JsonError, Object, parse_json, read_json
    from files.lock import is_held
    from reporting.display import aligned
    from reporting.metrics import without_abandoned
except ModuleNotFoundError as missing:
    interpreter.restart(missing)

END_BYTES = 64 << 20  # of metrics.jsonl, which are read for its last lines
STEP_BYTES = 1 << 20  # of those, in which the last logged step is looked for; evaluations are fewer, and further apart
OTHERS = b'{"kind": "eval"', b'{"kind": "event"'  # the first words of lines that say how the run stands
DEEPEST = 3  # levels of folders below FOLDER that are searched


class Line(Object, total=False):
    """The keys that are read from a line of metrics.jsonl."""

    kind: str
    event: str
    step: int
    loss: float | None
    eval_loss: float | None


class Worker(Object, total=False):
    """The key that is read from workers/0.json, see cluster/watch.py."""

    phase: str


class Run(NamedTuple):
    """A row of the list; `command` started the run last."""

    folder: str
    state: str
    step: str
    loss: str
    heldout: str
    command: str


def main(arguments: list[str]) -> None:
    """Print the list; a usage error ends with status 2."""
    if {"-h", "--help"} & set(arguments):
        print(__doc__.strip())
        return
    if len(arguments) > 1 or (arguments and not pathlib.Path(arguments[0]).is_dir()):
        print(f"error: {' '.join(arguments)} is not a folder; usage: list_runs.py [FOLDER]", file=sys.stderr)
        sys.exit(2)
    root = pathlib.Path(arguments[0] if arguments else "runs")
    runs = [look(folder) for folder in folders(root)]
    if not runs:
        print(f"There are no runs below {root}. `make train` starts one.")
        return
    rows = [("run", "state", "step", "loss", "held out"), *(run[:-1] for run in runs)]
    heading, *lines = aligned(rows)
    print(heading)
    for run, line in zip(runs, lines, strict=True):
        print(visible(f"{line}\n    {run.command}" if run.command else line))
    sys.stdout.flush()  # here, so that a pipe without a reader is an error of this command


def folders(root: pathlib.Path, depth: int = DEEPEST) -> list[pathlib.Path]:
    """Return the folders of runs below a folder in order of their names; a run's folder is not searched further."""
    if is_listed(root):
        return [root]
    below = sorted(path for path in root.iterdir() if path.is_dir()) if root.is_dir() and depth else []
    return [run for path in below for run in folders(path, depth - 1)]


def is_listed(folder: pathlib.Path) -> bool:
    """Return whether a folder holds a run whose configuration can be read; published models have a config.json too."""
    try:
        return "model.name" in read_json(folder / stored_config.CONFIG, Object)
    except JsonError:  # a damaged configuration of a run
        return True
    except OSError:
        return False


def look(folder: pathlib.Path) -> Run:
    """Return the row of a run; its checkpoints are not opened."""
    lines = last_lines(folder)
    trained = next((line for line in reversed(lines) if line.get("kind") == "train"), {})
    evaluated = next((line for line in reversed(lines) if line.get("kind") == "eval"), {})
    logged, saved = trained.get("step"), stored_config.trained_to(folder)  # a stop saves a step that is not logged
    step = max((step for step in (logged, saved) if step is not None), default=None)
    origin = read(folder / ORIGIN, Origin)
    return Run(
        str(folder), state(folder, step), "-" if step is None else f"{step:,}", number(trained.get("loss")),
        number(evaluated.get("eval_loss")), shlex.join(origin.get("command", [])),
    )  # fmt: skip


def state(folder: pathlib.Path, step: int | None) -> str:
    """Return whether the run is running, finished, stopped, failed, imported or not saved."""
    if is_held(folder / "lock"):
        return "running"
    if (folder / stored_config.SUMMARY).is_file():
        return "finished"
    if step is not None:
        return "failed" if read(folder / "workers" / "0.json", Worker).get("phase") == "failed" else "stopped"
    return "imported" if (folder / "checkpoints" / "0").is_dir() else "not saved"


def read(path: pathlib.Path, schema: type) -> dict:
    """Return the content of a JSON file; {} if it cannot be read."""
    try:
        return read_json(path, schema)
    except (OSError, JsonError):
        return {}


def last_lines(folder: pathlib.Path) -> list[Line]:
    """Return the last valid lines of a run's metrics.jsonl; [] if there is no such file.

    Lines of training are only those of the last STEP_BYTES.
    """
    try:
        with (folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - END_BYTES))
            content = file.read()
    except OSError:
        return []
    begin, found = max(0, content.rfind(b"\n", 0, max(0, len(content) - STEP_BYTES))), []
    earlier = [text for text in content[:begin].splitlines() if text.startswith(OTHERS)]
    for text in [*earlier, *content[begin:].splitlines()]:
        try:
            found.append(parse_json(text, Line, "metrics.jsonl"))
        except JsonError:  # the first line is cut, and the last one may be torn
            continue
    return without_abandoned(found)


def number(value: float | None) -> str:
    """Return a loss as text."""
    return "-" if value is None else f"{value:.4f}"


if __name__ == "__main__":
    ending.install()
    main(sys.argv[1:])
