# SPDX-License-Identifier: Apache-2.0
"""Records which examples each step trained on: WORKDIR/ledger.jsonl, one line for each change of the mapping.

The order of examples is a pure function, so a line (a section) holds only the arguments of the function. It applies to
all steps after its own `step`; if several apply, the last one written wins.
"""

import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, NamedTuple, NotRequired

import numpy as np
import pydantic

from files.atomic import keep_whole_lines
from files.json_reader import Count, JsonError, Object, parse_json
from input_pipeline.corpus import Corpus
from input_pipeline.errors import DataError

NAME = "ledger.jsonl"
MOST = 10**9  # rows of a batch, and tokens of a row; as in configs/base.py
MOST_BYTES = 256 << 20  # of the file; a line has a few hundred


class Section(Object):
    """A line of the ledger, see `new_section`."""

    step: Count
    examples: Count
    global_batch: Annotated[int, pydantic.Field(ge=1, le=MOST)]  # rows
    sequence_length: Annotated[int, pydantic.Field(ge=1, le=MOST)]  # tokens
    seed: int
    corpus: str
    mixture: list[tuple[Count, list[str]]]
    skips: list[tuple[Count, Count]]
    roll_backs: NotRequired[Count]


class Excerpt(NamedTuple):
    """Tokens of a document that a row was trained on."""

    document: str  # its name in messages of the pipeline
    segment: int  # its number in the row, from 1, as in the batch's `segments`; 0: all of the row
    first: int  # index of its first token among the row's targets
    count: int  # the number of tokens
    offset: int  # index of its first token in the document, whose last token is its end of document


class Example(NamedTuple):
    """A row of a step's global batch."""

    row: int  # its number in the batch
    example: int  # its index in the order of examples
    part: str  # name of the part of the mixture
    window: int  # its number in the part
    excerpts: tuple[Excerpt, ...]  # its content, in order


def new_section(
    corpus: Corpus, *, step: int, examples: int, global_batch: int, sequence_length: int, seed: int
) -> Section:
    """Return a section that begins after `step`, as JSON-serialisable values.

    Args:
        corpus: with the history and the skips that apply from here on.
        step: the last step before this section: 0 in a fresh run, the checkpoint's step in a resumed run.
        examples: the number of examples taken in the steps up to that one.
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
    """Append a section to the ledger of a workdir, replacing a last line that a killed process left unfinished.

    Raises DataError if the file cannot be written.
    """
    path = folder / NAME
    try:
        with path.open("a+b") as file:
            keep_whole_lines(file)
            file.write(json.dumps(section).encode() + b"\n")
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}; it must be writable, on a disk with free space") from error


def sections(folder: Path) -> list[Section]:
    """Return the sections of a workdir in the order in which they were written; [] if there is no ledger.

    Raises DataError if the ledger cannot be read, or if one of its lines is not a section.
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
        raise DataError(f"{path} is larger than {MOST_BYTES:,} bytes, too large for the ledger of a run")
    lines = content[: content.rfind(b"\n") + 1].splitlines()  # a killed process may leave an incomplete one
    return [_parsed(line, f"{path}:{number}") for number, line in enumerate(lines, start=1)]


def roll_backs(folder: Path) -> int:
    """Return how often a run has rolled back, according to its last section; earlier attempts do not count."""
    written = sections(folder)
    return written[-1].get("roll_backs", 0) if written else 0


def section_of(folder: Path, step: int, last_step: int) -> Section:
    """Return the section that a step of the run belongs to.

    `last_step` is the last step of the run, according to its newest checkpoint or metrics. Raises DataError if there is
    no ledger, or if it does not cover the step.
    """
    written = sections(folder)
    if not written:
        raise DataError(f"{folder / NAME} is missing or empty; every run writes it from its first start on")
    first_step = 1 + min(section["step"] for section in written)
    if not first_step <= step <= last_step:
        known = f"steps {first_step} to {last_step}" if first_step <= last_step else "no step yet"
        raise DataError(f"{folder / NAME} covers {known}, not step {step}")
    return next(section for section in reversed(written) if section["step"] < step)


def taken(section: Section, step: int) -> np.ndarray:
    """Return the examples that a step took, numbered as in Mixture.read: int64 [global_batch]."""
    first = section["examples"] + (step - section["step"] - 1) * section["global_batch"]
    return first + np.arange(section["global_batch"], dtype=np.int64)


def explain(section: Section, step: int, corpus: Corpus) -> list[Example]:
    """Return the content of each row of a step's global batch; DataError if the section is of another corpus.

    Args:
        section: the result of `section_of` for the step.
        corpus: prepared `with_documents`; otherwise documents have numbers as names.
    """
    if section["corpus"] != corpus.digest:
        trained_on = section["corpus"].encode("unicode_escape").decode()[:40]
        raise DataError(
            f"step {step} was trained on another corpus ({trained_on}, now {corpus.digest}); "
            "restore its documents, tokenizer and split"
        )
    mixture, length = corpus.train.recorded(section["mixture"], section["skips"]), section["sequence_length"]
    examples = mixture.examples(taken(section, step))
    parts, windows = mixture.windows(examples, length, section["seed"])
    rows = zip(examples.tolist(), parts.tolist(), windows.tolist(), strict=True)
    return [
        Example(row, example, corpus.names[part], window, tuple(_excerpts(corpus, part, window, length)))
        for row, (example, part, window) in enumerate(rows)
    ]


def table(examples: list[Example], losses: dict[tuple[int, int], float] | None = None) -> list[tuple[str, ...]]:
    """Return the rows of a table, its head and one row an excerpt; token ranges count from 0 and include both ends.

    Args:
        examples: of the step, from `explain`.
        losses: of each (row, segment), in nats per token; the highest comes first, nan last.
    """
    found = [(example, excerpt) for example in examples for excerpt in example.excerpts]
    rows = [("row", "part", "document", "tokens")]
    for example, excerpt in found:
        last = excerpt.offset + excerpt.count - 1
        rows.append((str(example.row), example.part, excerpt.document, f"{excerpt.offset}..{last}"))
    if losses is not None:
        of_each = [losses[example.row, excerpt.segment] for example, excerpt in found]
        texts = ["-" if math.isnan(loss) else f"{loss:.4f}" for loss in of_each]
        order = np.argsort(-np.array(of_each), kind="stable")  # nan comes last
        rows = [("loss", *rows[0]), *((texts[number], *rows[1 + number]) for number in order)]
    return rows


def _excerpts(corpus: Corpus, part: int, window: int, sequence_length: int) -> Iterator[Excerpt]:
    """Yield the excerpts of a window; if the corpus has no documents, the part's own names are used."""
    source = corpus.train.parts[part]
    for document, *place in source.pieces(window, sequence_length):
        name = corpus.documents[part][document].name if corpus.documents else source.document_name(document)
        yield Excerpt(name, *place)


def _parsed(line: bytes, where: str) -> Section:
    try:
        return parse_json(line, Section, where)
    except JsonError as error:
        raise DataError(f"{error}; fix the line, or remove it") from None
