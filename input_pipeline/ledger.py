# SPDX-License-Identifier: Apache-2.0
"""What each step of a run trained on: WORKDIR/ledger.jsonl, a line wherever steps begin anew to map to examples.

The order of examples is a pure function, so a line (a section) holds only what the function needs. It stands for all
steps after its own `step`; where several do, the last one written holds.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, NotRequired

import numpy as np

from files.json_reader import Count, JsonError, Object, parse_json
from input_pipeline.corpus import Corpus
from input_pipeline.errors import DataError

NAME = "ledger.jsonl"
MOST_BYTES = 256 << 20  # of the file: a line has some hundred
MOST_ROWS, MOST_TOKENS = 1 << 20, 1 << 24  # of a step's batch, of a row


class Section(Object):
    """A line of the ledger, see `new_section`."""

    step: Count
    examples: Count
    global_batch: Count
    sequence_length: Count
    seed: int
    corpus: str
    mixture: list[tuple[Count, list[str]]]
    skips: list[tuple[Count, Count]]
    roll_backs: NotRequired[Count]


class Excerpt(NamedTuple):
    """Tokens of a document that a row was trained on."""

    document: str  # its name, as messages of the pipeline have it
    segment: int  # its number in the row, from 1, as in the batch's `segments`
    first: int  # place of its first token among the row's targets
    count: int  # of these tokens
    offset: int  # place of the first in the document, whose last token is its end of document


class Example(NamedTuple):
    """A row of a step's global batch."""

    row: int  # its number in the batch
    example: int  # its place in the order of examples
    part: str  # name of the part of the mixture
    window: int  # its number in the part
    excerpts: tuple[Excerpt, ...]  # what it is made of, in order


def new_section(
    corpus: Corpus, *, step: int, examples: int, global_batch: int, sequence_length: int, seed: int
) -> Section:
    """Return the section of a run that goes on from here, as JSON can hold it.

    Args:
        corpus: with the history and the skips that hold from here on.
        step: the last step that is not of this section: 0 of a fresh run, the checkpoint's of one taken up.
        examples: taken in the steps up to that one.
        seed: of the order.
    """
    return {
        "step": step,
        "examples": examples,
        "global_batch": global_batch,
        "sequence_length": sequence_length,
        "seed": seed,
        "corpus": corpus.digest,
        "mixture": corpus.train.record(),
        "skips": [list(skip) for skip in corpus.train.skips],
        "time": time.time(),  # seconds since 1970
    }


def append(folder: Path, section: Section) -> None:
    """Add a section to the ledger of a workdir, in place of a line that a killed process left unfinished.

    Raises:
        DataError: the file cannot be written.
    """
    path = folder / NAME
    try:
        with path.open("a+b") as file:
            file.seek(0)
            file.truncate(_finished(file.read()))
            file.write(json.dumps(section).encode() + b"\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; it has to be writable, with room for a line") from error


def sections(folder: Path) -> list[Section]:
    """Return the sections of a workdir in the order in which they were written; none where there is no ledger.

    Raises:
        DataError: the ledger cannot be read, or a line of it is no section.
    """
    path = folder / NAME
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    if len(content) > MOST_BYTES:
        raise DataError(f"{path}: is larger than {MOST_BYTES:,} bytes, and so no ledger of a run")
    lines = content[: _finished(content)].splitlines()
    return [_parsed(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def roll_backs(folder: Path) -> int:
    """Return how often a run has gone back, as its sections count it."""
    return max((section.get("roll_backs", 0) for section in sections(folder)), default=0)


def section_of(folder: Path, step: int, last_step: int) -> Section:
    """Return the section that a step of the run belongs to.

    Args:
        last_step: that the run has made, so far as its newest checkpoint or metrics tell.

    Raises:
        DataError: there is no ledger, or the step is none of those that it knows.
    """
    written = sections(folder)
    if not written:
        raise DataError(f"{folder / NAME}: no such file, or empty; a run keeps one from its first start on")
    first_step = 1 + min(section["step"] for section in written)
    if not first_step <= step <= last_step:
        known = f"steps {first_step} to {last_step}" if first_step <= last_step else "no step yet"
        raise DataError(f"{folder / NAME} knows {known}, and not step {step}")
    return next(section for section in reversed(written) if section["step"] < step)


def taken(section: Section, step: int) -> np.ndarray:
    """Return the numbers, as Mixture.read counts, of the examples that a step took: int64 [global_batch]."""
    first = section["examples"] + (step - section["step"] - 1) * section["global_batch"]
    return first + np.arange(section["global_batch"], dtype=np.int64)


def explain(section: Section, step: int, corpus: Corpus) -> list[Example]:
    """Return what each row of a step's global batch was made of.

    Args:
        section: the one that `section_of` gives for the step.
        corpus: prepared `with_documents`, else documents have numbers for names.

    Raises:
        DataError: the corpus is not the one that the section was trained on.
    """
    if section["corpus"] != corpus.digest:
        trained_on = section["corpus"].encode("unicode_escape").decode()[:40]
        raise DataError(
            f"step {step} was trained on another corpus ({trained_on}, now {corpus.digest}); "
            "bring its documents, tokenizer and split back as they were"
        )
    mixture, length = corpus.train.recorded(section["mixture"], section["skips"]), section["sequence_length"]
    examples = mixture.examples(taken(section, step))
    parts, windows = mixture.windows(examples, length, section["seed"])
    rows = zip(examples.tolist(), parts.tolist(), windows.tolist(), strict=True)
    return [
        Example(row, example, corpus.names[part], window, tuple(_excerpts(corpus, part, window, length)))
        for row, (example, part, window) in enumerate(rows)
    ]


def table(examples: list[Example], losses: dict[tuple[int, int], float] | None = None) -> list[str]:
    """Return the lines of a table of what a step was trained on: an excerpt each, tokens counted from 0, both ends in.

    Args:
        examples: of the step, from `explain`.
        losses: of each (row, segment), in nats per token; the highest comes first, and last what is no number.
    """
    found = [(example, excerpt) for example in examples for excerpt in example.excerpts]
    lines = [("row", "part", "document", "tokens")]
    for example, excerpt in found:
        last = excerpt.offset + excerpt.count - 1
        lines.append((str(example.row), example.part, excerpt.document, f"{excerpt.offset}..{last}"))
    if losses is not None:
        of_each = [losses[example.row, excerpt.segment] for example, excerpt in found]
        told = ["-" if math.isnan(loss) else f"{loss:.4f}" for loss in of_each]
        order = np.argsort(-np.array(of_each), kind="stable")  # which puts what is no number last
        lines = [("loss", *lines[0]), *((told[number], *lines[1 + number]) for number in order)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in lines]


def _excerpts(corpus: Corpus, part: int, window: int, sequence_length: int) -> Iterator[Excerpt]:
    """Yield what a window is made of; where documents were not kept, named as their part calls them."""
    source = corpus.train.parts[part]
    for document, *place in source.pieces(window, sequence_length):
        name = corpus.documents[part][document].name if corpus.documents else source.document_name(document)
        yield Excerpt(name, *place)


def _finished(content: bytes) -> int:
    """Return where the last whole line ends: a process that is killed may leave the beginning of another."""
    return content.rfind(b"\n") + 1


def _parsed(line: bytes, where: str) -> Section:
    try:
        section = parse_json(line, Section, where)
    except JsonError as error:
        raise DataError(f"{error}; mend the line, or remove it") from None
    for key, most in (("global_batch", MOST_ROWS), ("sequence_length", MOST_TOKENS)):
        if not 1 <= section[key] <= most:
            raise DataError(f"{where}: {key} is {section[key]}, not 1 to {most:,}; mend the line, or remove it")
    return section
