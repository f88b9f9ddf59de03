# SPDX-License-Identifier: Apache-2.0
"""Read what a run wrote into its folder, as far as a report shows it."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence

import numpy as np

from configs.errors import ConfigError
from files.json_reader import JsonError, Object, Scalar, parse_json, read_json
from reporting import metrics
from reporting.goodput import last_account, newest_parts
from settings.stored_config import CONFIG, ORIGIN, SUMMARY, Origin

METRICS = "metrics.jsonl"
TRAIN, EVENT = "train", "event"  # kinds of lines
TAIL_BYTES = 1 << 18  # of rollouts.jsonl, which are read for its last answers
MOST_ANSWERS = 8
LARGEST = 1e300  # of a figure; sums of larger ones are not finite
Columns = Mapping[str, np.ndarray]  # float64 by name, among them "step" and "time"; NaN is not known


class Table(Object):
    """A table of profile.json; a cell may be any scalar."""

    title: str
    columns: list[str]
    rows: list[list[Scalar]]


class Profile(Object):
    """The content of profile.json that a report shows."""

    summary: list[str]
    tables: list[Table]


class Answer(Object, total=False):
    """A line of rollouts.jsonl."""

    step: int
    prompt: str
    answer: str
    reward: float | None


class Memory(Object, total=False):
    """Of a rehearsal, GiB of a chip."""

    total: float | None


class Rehearsal(Object, total=False):
    """The figures of `rehearse.py --json` that a run measures too."""

    topology: str
    fits: bool | None
    step_seconds: float | None
    mfu: float | None
    tokens_per_second: float | None
    hbm_gib: Memory


@dataclasses.dataclass(frozen=True)
class RunRecord:
    """What a run wrote.

    Attributes:
      kinds: the figures of each kind of line, the last line of each step, in order of the steps, without steps that
        were undone and not repeated.
      progress: (Unix seconds, step) of the logged steps as they were written, also of steps that were repeated.
      events: all events, as they were written.
      seconds: the account of the run's time by part, see reporting/goodput.py; {} if there is none.
      config: {key: value}, and `recipe` the values of the recipe; {} if unknown.
      summary: text that the run printed at its end; "" if it has not finished.
      answers: the last lines of rollouts.jsonl.
    """

    name: str
    kinds: Mapping[str, Columns]
    progress: np.ndarray
    events: Sequence[metrics.Line]
    seconds: Mapping[str, float]
    config: Mapping[str, Scalar]
    recipe: Mapping[str, Scalar]
    command: Sequence[str]
    summary: str
    answers: Sequence[Answer]
    profile: Profile | None
    rehearsal: Rehearsal | None

    def column(self, kind: str, name: str) -> tuple[np.ndarray, np.ndarray]:
        """Return (steps, values) of a figure; both are empty if it has no finite value."""
        columns = self.kinds.get(kind, {})
        if name not in columns:
            return np.empty(0), np.empty(0)
        known = np.isfinite(columns[name])
        return columns["step"][known], columns[name][known]


def holds_run(folder: pathlib.Path) -> bool:
    """Return whether a run was trained in a folder."""
    return (folder / METRICS).is_file()


def read_run(folder: pathlib.Path, name: str) -> RunRecord:
    """Return what a run wrote into its folder; the report calls it `name`.

    Raises:
      ConfigError: there is no such folder, it holds no run, or a file cannot be read.
      JsonError: a file is damaged; the message has the file and the line.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder; name the folder of a run")
    if not holds_run(folder):
        raise ConfigError(f"{folder} has no {METRICS}, so it holds no run that was trained; name the folder of one")
    try:
        lines = metrics.read_lines(folder / METRICS)
        origin = _optional(folder / ORIGIN, Origin) or {}
        progress = [(line["time"], line["step"]) for line in lines if line["kind"] == TRAIN and "time" in line]
        events = [line for line in lines if line["kind"] == EVENT and "time" in line]
        seconds = newest_parts(last_account(folder / "workers" / "0.json"), events)
        return RunRecord(
            name, kinds_of(lines), np.array(progress).reshape(-1, 2), events, seconds,
            _optional(folder / CONFIG, dict[str, Scalar]) or {}, origin.get("recipe_config", {}),
            origin.get("command", []), _text(folder / SUMMARY), _last_answers(folder / "rollouts.jsonl"),
            _profile(folder / "profile.json"), _optional(folder / "rehearsal.json", Rehearsal),
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(f"{error.filename}: {error.strerror}; name a run that can be read") from None


def kinds_of(lines: Sequence[metrics.Line]) -> dict[str, Columns]:
    """Return the figures by kind; the last line of a step counts, since steps are repeated after a restart."""
    lines = metrics.without_abandoned(lines)
    kinds = dict.fromkeys(line["kind"] for line in lines if "step" in line and line["kind"] != EVENT)
    return {kind: _columns(metrics.steps_of(lines, kind)) for kind in kinds}


def _columns(lines: list[metrics.Line]) -> Columns:
    """Return every figure of these lines; what is not a number becomes NaN."""
    names = dict.fromkeys(name for line in lines for name in line)
    columns = {name: np.array([_number(line.get(name)) for line in lines]) for name in names}
    return {name: values for name, values in columns.items() if np.isfinite(values).any()}


def _number(value: object) -> float:
    return float(value) if isinstance(value, int | float) and abs(value) < LARGEST else np.nan


def _optional(path: pathlib.Path, schema: type):
    """Return the content of a file; None if there is no such file."""
    try:
        return read_json(path, schema)
    except FileNotFoundError:
        return None


def _profile(path: pathlib.Path) -> Profile | None:
    """Return the content of profile.json; JsonError if a table has rows of different lengths."""
    profile = _optional(path, Profile)
    for table in profile["tables"] if profile else ():
        wrong = next((row for row in table["rows"] if len(row) != len(table["columns"])), None)
        if wrong is not None:
            what = f"a row of the table {table['title']:.60} has {len(wrong)} cells, not {len(table['columns'])}"
            raise JsonError(f"{path}: {what}")
    return profile


def _text(path: pathlib.Path) -> str:
    return path.read_text(errors="replace").strip() if path.exists() else ""


def _last_answers(path: pathlib.Path) -> list[Answer]:
    """Return the last answers of a run that samples its batches; a torn last line is left out."""
    if not path.exists():
        return []
    with path.open("rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - TAIL_BYTES))
        texts = file.read().split(b"\n")[1 if size > TAIL_BYTES else 0 : -1]
    return [parse_json(text, Answer, str(path)) for text in texts[-MOST_ANSWERS:]]
