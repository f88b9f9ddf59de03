# SPDX-License-Identifier: Apache-2.0
"""Reads documents piece by piece, checks and hashes them, splits them at line starts, holds some out by content.

Nothing here holds more than a few pieces of text in memory, whatever the size of the corpus.
"""

import codecs
import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import BinaryIO, NamedTuple, Protocol

import numpy as np

from input_pipeline.errors import BadDocument, DataError
from input_pipeline.progress import progress

PIECE_BYTES = 1 << 18  # text is read, tokenized and written in pieces of about this size


class Document(Protocol):
    """One document of a source: a name for messages, and how to open its UTF-8 bytes (again each time).

    Opening raises BadDocument if the source can tell that this one document is invalid.
    """

    @property
    def name(self) -> str: ...

    def open(self) -> BinaryIO: ...


class TextFile(NamedTuple):
    """A file that is a document."""

    name: str

    def open(self) -> BinaryIO:
        return open(self.name, "rb")


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes start:stop of a document. begins, ends: whether a document of the split begins, ends with them."""

    document: Document
    digest: bytes  # of the whole document
    start: int
    stop: int
    begins: bool = True
    ends: bool = True

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def key(self) -> bytes:
        """A key that identifies these bytes."""
        return self.digest + self.start.to_bytes(8) + self.stop.to_bytes(8)

    def blocks(self) -> Iterator[bytes]:
        """Yield the bytes, at most PIECE_BYTES at a time; DataError if they cannot be read."""
        try:
            with self.document.open() as file:
                file.seek(self.start)
                remaining = self.size
                while remaining and (block := file.read(min(remaining, PIECE_BYTES))):
                    remaining -= len(block)
                    yield block
        except OSError as error:
            raise DataError(f"{self.document.name}: {error.strerror or error}") from error

    def text(self) -> Iterator[str]:
        """Yield the text in pieces that end at a line's end, or at a character's in a line longer than a piece.

        The ends of pieces depend only on the bytes, so the tokens do too.
        """
        pending = b""
        for block in self.blocks():
            if pending:
                cut = pending.rfind(b"\n") + 1 or _last_character(pending)
                yield self._decode(pending[:cut])
                pending = pending[cut:]
            pending += block
        if pending:
            yield self._decode(pending)

    def cut(self, offset: int, slack: int) -> tuple["Span", "Span"]:
        """Cut in two at the line start nearest to `offset` within `slack` bytes, else at the nearest character.

        Raises:
            DataError: there is one character, and nothing to cut.
        """
        low, high = max(self.start, offset - slack), min(self.stop, offset + slack)
        window = replace(self, start=low, stop=high)
        block = np.frombuffer(b"".join(window.blocks()), np.uint8)
        for borders in (np.flatnonzero(block == ord("\n")) + 1, np.flatnonzero(block & 0xC0 != 0x80)):
            inside = borders + low
            inside = inside[(inside > self.start) & (inside < self.stop)]
            if inside.size:
                middle = int(inside[np.abs(inside - offset).argmin()])
                return replace(self, stop=middle, ends=False), replace(self, start=middle, begins=False)
        raise DataError(f"{self.document.name}: too short to be split; add more text")

    def _decode(self, block: bytes) -> str:
        try:
            return block.decode()
        except UnicodeDecodeError as error:  # it was UTF-8 when it was scanned
            raise _changed(self.document) from error


def scan(
    documents: Iterable[Document],
    bad_documents: str = "error",
    announce: Callable[[str], object] = print,
    note: Callable[[str], object] | None = None,
) -> list[Span]:
    """Return a span for each document that has text, with the digest of its content.

    Empty documents are skipped, and so are unusable ones if `bad_documents` is `skip`. A line to `note`, by default
    `announce`, says how many and which is the first. Raises BadDocument if a document is not UTF-8, or its source says
    that it is invalid.
    """
    spans, skipped = [], []
    with progress("reading documents", None, announce) as advance:
        for span in _usable(documents, bad_documents, skipped):
            spans.append(span)
            advance(span.size)
    if skipped:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in Counter(kind for kind, _ in skipped).most_common())
        number = len(spans) + len(skipped)
        first = skipped[0][1].name.encode(errors="backslashreplace").decode()  # a name of a file need not be UTF-8
        (note or announce)(f"skipped {len(skipped):,} of {number:,} documents: {kinds}; first: {first}")
    return spans


def _usable(documents: Iterable[Document], bad_documents: str, skipped: list) -> Iterator[Span]:
    """Yield the spans of usable documents; append (error, document) to `skipped` for the others."""
    for document in documents:
        if isinstance(document, str | bytes | Path):
            raise TypeError(f"a data source yielded {str(document)[:40]!r}, which is not a Document")
        try:
            span = _whole(document)
        except BadDocument as error:
            if bad_documents != "skip":
                raise
            skipped.append((error.kind, document))
            continue
        if span.size:
            yield span
        else:
            skipped.append(("empty", document))


def _whole(document: Document) -> Span:
    """Read a whole document; BadDocument names the byte and the line if the bytes are not UTF-8."""
    whole = Span(document, b"", 0, 1 << 62)
    digest, size = hashlib.blake2b(digest_size=16), 0
    decoder = codecs.getincrementaldecoder("utf-8")()
    for block in chain(whole.blocks(), [b""]):
        try:
            decoder.decode(block, final=not block)
        except UnicodeDecodeError as error:  # in this block, or from the unfinished character of the block before
            before = replace(whole, stop=size + len(block) - len(error.object) + error.start)
            line = 1 + sum(part.count(b"\n") for part in before.blocks())
            raise BadDocument(document.name, "not valid UTF-8", f" at byte {before.stop} (line {line})") from error
        digest.update(block)
        size += len(block)
    return Span(document, digest.digest(), 0, size)


def hold_out(spans: list[Span], fraction: float) -> tuple[list[Span], list[Span]]:
    """Split some documents into (training, held-out) by the hash of the content, so that copies fall on one side.

    Neither side is empty: of two documents or more, the one with the smallest hash is held out and the one with the
    largest is not. Of a single document (or copies of one), the last tenth is held out. Raises DataError for a single
    document of one character, or for a fraction outside 0 to 1.
    """
    if not 0 < fraction < 1:
        raise DataError(f"data.holdout_fraction={fraction} is not between 0 and 1; the default is 0.05")
    distinct = sorted({span.digest for span in spans})
    if len(distinct) == 1:
        halves = [span.cut(span.size * 9 // 10, slack=min(max(4, span.size // 20), PIECE_BYTES)) for span in spans]
        return [replace(head, ends=True) for head, _ in halves], [replace(tail, begins=True) for _, tail in halves]
    border = sum(int.from_bytes(digest) < fraction * 2**128 for digest in distinct)
    held_out = set(distinct[: min(max(border, 1), len(distinct) - 1)])
    train = [span for span in spans if span.digest not in held_out]
    return train, [span for span in spans if span.digest in held_out]


def check_unchanged(spans: list[Span], announce: Callable[[str], object] = print) -> None:
    """Read the documents again; DataError if one has changed since `scan`."""
    with progress("checking documents", None, announce) as advance:
        for span in {id(span.document): span for span in spans}.values():
            now = _whole(span.document)
            if now.digest != span.digest:
                raise _changed(span.document)
            advance(now.size)


def _changed(document: Document) -> DataError:
    return DataError(f"{document.name}: changed while it was being read; run again when nothing writes to it")


def _last_character(block: bytes) -> int:
    """Return the start of the last character of a block without line ends: it may continue in the next block."""
    for cut in range(len(block) - 1, max(0, len(block) - 4), -1):
        if block[cut] & 0xC0 != 0x80:
            return cut
    return len(block)
