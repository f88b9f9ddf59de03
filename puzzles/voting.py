# SPDX-License-Identifier: Apache-2.0
"""Combines the answers to the augmented versions of an ARC task by voting: each prediction is a vote.

The prediction for a version is transformed back to the original task. The grids predicted for a test input are ranked
by votes (arXiv:2510.04871, appendix "Hyper-parameters and setup"), then, as in the paper's code, by the model's mean
probability of halting.

Probabilities of votes are summed as fractions, without rounding. So tables of several processes, or of several
checkpoints, merge to the same table in any order.
"""

import dataclasses
import gzip
import io
import json
import pathlib
import zlib
from collections.abc import Iterable, Iterator, Sequence
from fractions import Fraction
from typing import Annotated, Literal, NamedTuple

import numpy as np
import pydantic

from files.atomic import writing
from files.json_reader import Object, parse_json
from input_pipeline.errors import DataError
from input_pipeline.puzzles import arc
from input_pipeline.puzzles.dataset import BLANK

PASSES = (1, 2, 5, 10, 100, 1000)
ATTEMPTS = 2  # of a submission for each test input
NO_ANSWER = [[0, 0], [0, 0]]  # a submission without a prediction, as in Kaggle's own sample
FORMAT = 1  # version of files
LARGEST = 1 << 30  # bytes of a file after decompression; a vote has about 2,000
LAST_COLOUR = 9
AT_STEP = "at_step/"  # begins the names of figures of other checkpoints


Hex = Annotated[str, pydantic.Field(pattern="^([0-9a-f]{2})*$", min_length=4, max_length=2 * (2 + 30 * 30))]
Share = Annotated[str, pydantic.Field(pattern="^[0-9]{1,1000}(/[1-9][0-9]{0,999})?$")]  # a sum, without rounding


class File(Object):
    """The content of a file of votes, see `Votes.to_bytes`."""

    format: Literal[FORMAT]
    votes: list[tuple[str, Hex, list[tuple[Hex, Annotated[int, pydantic.Field(gt=0, lt=2**48)], Share]]]]


class Candidate(NamedTuple):
    """A grid that was predicted for a test input."""

    grid: np.ndarray  # uint8 [height, width], colours 0 to 9; 0 x 0 if a prediction had no grid
    count: int  # how many versions predicted it
    probability: float  # their mean probability of halting


@dataclasses.dataclass
class Votes:
    """The table of votes: {(task, test input): {prediction: (count, sum of probabilities)}}.

    A grid in it is bytes: height, width, cells.
    """

    table: dict[tuple[str, bytes], dict[bytes, tuple[int, Fraction]]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return sum(count for pair in self.table.values() for count, _ in pair.values())

    def add(self, task: str, given: np.ndarray, predicted: np.ndarray, probability: float) -> None:
        """Add a vote: grids of the original task, and the probability of halting."""
        self._add((task, _packed(given)), _packed(predicted), 1, Fraction(float(probability)))

    def add_batch(
        self, names: Sequence[str], inputs_BT: np.ndarray, predictions_BT: np.ndarray, halt_logits_B: np.ndarray
    ) -> None:
        """Add a vote for each row that is not blank.

        Names are those of versions, "task|||t3|||0123456789", or `BLANK`. Inputs and predictions are tokens [B, 900].
        Halting logits are those after the last step; nan counts as a probability of 0.
        """
        probabilities = sigmoid(halt_logits_B).tolist()
        for name, given, predicted, sure in zip(names, inputs_BT, predictions_BT, probabilities, strict=True):
            if name != BLANK:
                task, *change = arc.parse_name(name)
                given, predicted = (arc.restore(arc.crop(tokens), *change) for tokens in (given, predicted))
                self.add(task, given, predicted, sure)

    def merge(self, others: Iterable["Votes"]) -> "Votes":
        """Return a new table with the votes of this table and the others; their order does not matter."""
        merged = Votes()
        for votes in (self, *others):
            for pair, predictions in votes.table.items():
                for predicted, (count, total) in predictions.items():
                    merged._add(pair, predicted, count, total)
        return merged

    def ranked(self, task: str, given: np.ndarray) -> list[Candidate]:
        """Return the predictions for a test input, best first; ties are sorted by the packed grid."""
        predictions = self.table.get((task, _packed(given)), {}).items()
        order = sorted((-count, -total / count, predicted) for predicted, (count, total) in predictions)
        return [Candidate(_unpacked(predicted), -count, float(-mean)) for count, mean, predicted in order]

    def to_bytes(self) -> bytes:
        """Return the serialised table; equal tables give equal bytes."""
        table = [
            [task, given.hex(), [[p.hex(), count, str(total)] for p, (count, total) in sorted(predictions.items())]]
            for (task, given), predictions in sorted(self.table.items())
        ]
        return gzip.compress(json.dumps({"format": FORMAT, "votes": table}).encode(), compresslevel=1, mtime=0)

    @classmethod
    def from_bytes(cls, content: bytes, name: str = "votes") -> "Votes":
        """Return the table from the bytes of `to_bytes`.

        Raises DataError if the bytes are not a valid table; the message begins with `name`.
        """
        try:
            with gzip.open(io.BytesIO(content)) as file:  # a small file could decompress to more than the memory
                text = file.read(LARGEST + 1)
            return cls._of_file(parse_json(text, File, "its content", max_bytes=LARGEST))
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise DataError(f"{name}: not a table of votes ({error}); evaluate that checkpoint again") from None

    @classmethod
    def _of_file(cls, file: File) -> "Votes":
        """Return the table in a file; ValueError if a grid or a sum of probabilities is invalid."""
        votes = cls()
        for task, given, predictions in file["votes"]:
            for predicted, count, total in predictions:
                if Fraction(total) > count:
                    raise ValueError(f"{count} probabilities have a sum above {count}")
                votes._add((task, _grid_bytes(given)), _grid_bytes(predicted), count, Fraction(total))
        return votes

    def save(self, path: pathlib.Path) -> None:
        """Write the table to a file atomically."""
        with writing(path) as file:
            file.write(self.to_bytes())

    @classmethod
    def load(cls, path: pathlib.Path) -> "Votes":
        """Return the table of a file; DataError if it is invalid or cannot be read."""
        try:
            content = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; evaluate that checkpoint again") from None
        return cls.from_bytes(content, str(path))

    def _add(self, pair: tuple[str, bytes], predicted: bytes, count: int, total: Fraction) -> None:
        predictions = self.table.setdefault(pair, {})
        before, sum_before = predictions.get(predicted, (0, Fraction(0)))
        predictions[predicted] = before + count, sum_before + total


def passes(votes: Votes, tasks: dict, ks: Sequence[int] = PASSES) -> dict[str, float]:
    """Return {"pass@K": mean over tasks of the share of a task's test inputs with the truth among the first K}.

    Inputs with unknown truth are skipped, and so are tasks with only such inputs; {} if no task remains. `tasks`,
    {name: {"test": [{"input": rows, "output": rows}]}}, is the content of test_puzzles.json. Raises DataError if there
    is no task, or a task has no test input.
    """
    shares = {f"pass@{k}": [] for k in ks}
    for task, pairs in _tests(tasks):
        places = [_place(votes.ranked(task, given), truth) for given, truth in pairs if truth.size]
        for k in ks if places else ():
            shares[f"pass@{k}"].append(Fraction(sum(place < k for place in places), len(places)))
    return {name: float(sum(found) / len(found)) for name, found in shares.items() if found}


def num_known(tasks: dict) -> int:
    """Return the number of tasks that `passes` counts: those with a test input whose truth is known."""
    return sum(any(truth.size for _, truth in pairs) for _, pairs in _tests(tasks))


def results(votes: Votes, tasks: dict, earlier: Sequence[Votes] = ()) -> dict[str, float]:
    """Return `passes` of these votes, and as "pooled/pass@K" together with those of `earlier` checkpoints, if any.

    Published scores are pooled: an ensemble of the checkpoints that one process evaluated.
    """
    pooled = passes(votes.merge(earlier), tasks) if earlier else {}
    return passes(votes, tasks) | {f"pooled/{name}": value for name, value in pooled.items()}


def of_steps(votes: dict[str, Votes], tasks: dict, name: str) -> dict[str, float]:
    """Return {"at_step/STEP/NAME": value} of the votes of each step alone; the last step is not always the best."""
    found = {step: passes(of_step, tasks) for step, of_step in votes.items()}
    return {f"{AT_STEP}{step}/{name}": of_step[name] for step, of_step in found.items() if name in of_step}


def submission(votes: Votes, tasks: dict) -> dict[str, list[dict]]:
    """Return Kaggle's form: {task: [{"attempt_1": rows, "attempt_2": rows} for each test input]}.

    The attempts are the two best grids of an input; a single grid is repeated. `NO_ANSWER` replaces a grid of 0 x 0
    and an input without votes.
    """
    form = {}
    for task, pairs in _tests(tasks):
        form[task] = []
        for given, _ in pairs:
            best = [candidate.grid.tolist() or NO_ANSWER for candidate in votes.ranked(task, given)[:ATTEMPTS]]
            best += (best[:1] or [NO_ANSWER]) * (ATTEMPTS - len(best))
            form[task].append({f"attempt_{number}": grid for number, grid in enumerate(best, 1)})
    return form


def sigmoid(logits) -> np.ndarray:
    """Return 1 / (1 + exp(-x)) in float64, without overflow; 0 for nan."""
    x = np.asarray(logits, np.float64)
    small = np.exp(-np.abs(x))
    return np.nan_to_num(np.where(x >= 0, 1.0, small) / (1.0 + small))


def _tests(tasks: dict) -> Iterator[tuple[str, list[tuple[np.ndarray, np.ndarray]]]]:
    """Yield each task and its test pairs (input, truth) as grids; an unknown truth is 0 x 0."""
    if not tasks:
        raise DataError("test_puzzles.json: no task to score; build the data set with its test split")
    for task, puzzle in tasks.items():
        if not puzzle["test"]:
            raise DataError(f"test_puzzles.json: task {task} has no test input; build the data set again")
        yield task, [(_grid(pair["input"]), _grid(pair.get("output", []))) for pair in puzzle["test"]]


def _grid(rows: list[list[int]]) -> np.ndarray:
    return np.array(rows, np.uint8) if rows else np.zeros((0, 0), np.uint8)


def _place(candidates: list[Candidate], truth: np.ndarray) -> float:
    """Return the rank of the truth, from 0; infinity if no version predicted it."""
    return next((place for place, candidate in enumerate(candidates) if np.array_equal(candidate.grid, truth)), np.inf)


def _packed(grid: np.ndarray) -> bytes:
    return bytes(grid.shape) + np.ascontiguousarray(grid, np.uint8).tobytes()


def _grid_bytes(text: str) -> bytes:
    """Return a packed grid from its hexadecimal form; ValueError if it is invalid."""
    packed = bytes.fromhex(text)
    if len(packed) != 2 + packed[0] * packed[1] or max(packed[2:], default=0) > LAST_COLOUR:
        raise ValueError(f"{text[:20]}... is not a grid")
    return packed


def _unpacked(packed: bytes) -> np.ndarray:
    return np.frombuffer(packed, np.uint8, offset=2).reshape(packed[0], packed[1])
