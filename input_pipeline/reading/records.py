# SPDX-License-Identifier: Apache-2.0
"""Files of many documents: each is read from its start, and a document is identified by its position.

In every format and compression, moving to a later document reads everything in between, and moving back reads the file
from its start again. All readers of a corpus read it in order, so each reads a file once for a split, no index is
needed, and a document costs a hundred bytes until it is opened.
"""

import csv
import io
import lzma
import numbers
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from input_pipeline.errors import BadDocument, DataError

# Exceptions for broken files; MemoryError: a library tried to hold more than this machine has.
UNREADABLE = (OSError, EOFError, ValueError, csv.Error, zlib.error, lzma.LZMAError, MemoryError, pa.ArrowException)
TOO_LARGE = object()  # replaces a record that is larger than data.max_document_mib


class RecordFile:
    """A file of many documents; a subclass for each format.

    Attributes:
        path: of the file, also its name in messages.
        field: the key or column that holds the text.
        most_bytes: size limit of a record, and of the document in it.
        unit: the text between path and number in the name of a record.
    """

    unit = ":"

    def __init__(self, path: Path | str, field: str, most_bytes: int):
        self.path, self.field, self.most_bytes = path, field, most_bytes

    def values(self) -> Iterator[tuple[int, object]]:
        """Yield (number, record) from the start; TOO_LARGE replaces a record over `most_bytes`.

        Numbers are at least 1, and each is greater than the one before.
        """
        raise NotImplementedError

    def text(self, number: int, value) -> bytes:
        """Return the document in a record; BadDocument if there is none."""
        raise NotImplementedError

    def name(self, number: int) -> str:
        """Return the name of a record in messages."""
        return f"{self.path}{self.unit}{number}"

    def too_large(self, number: int) -> BadDocument:
        """Return the error for a record over `most_bytes`."""
        return BadDocument(self.name(number), f"larger than {self.most_bytes >> 20} MiB", " (data.max_document_mib)")


class Record(NamedTuple):
    """A document of a RecordFile."""

    reader: "Reader"
    file: RecordFile
    number: int

    @property
    def name(self) -> str:
        return self.file.name(self.number)

    def open(self) -> BinaryIO:
        return io.BytesIO(self.reader.text(self.file, self.number))


class Reader:
    """Reads the records of several files, with one file open at a time."""

    def __init__(self):
        self._file: RecordFile | None = None
        self._values: Iterator[tuple[int, object]] = iter(())
        self._number, self._value, self._text = 0, None, None

    def records(self, file: RecordFile) -> Iterator[Record]:
        """Yield the documents of a file in order; a document that is opened before the next needs no search."""
        self._begin(file)
        while self._advance():
            number = self._number
            yield Record(self, file, number)
            assert (self._file, self._number) == (file, number), "an earlier document was opened meanwhile"

    def text(self, file: RecordFile, number: int) -> bytes:
        """Return the document `number` of a file; DataError if the file no longer has it."""
        if file is not self._file or number < self._number:
            self._begin(file)
        while self._number < number and self._advance():
            pass
        if self._number != number:
            raise DataError(
                f"{file.name(number)}: missing since it was first read; run again when nothing writes to it"
            )
        if self._text is None:
            self._text = self._made(file, number)
        return self._text

    def _made(self, file: RecordFile, number: int) -> bytes:
        """Return the document in the current record."""
        if self._value is TOO_LARGE:
            raise file.too_large(number)
        try:
            text = file.text(number, self._value)
        except MemoryError as error:
            raise BadDocument(file.name(number), "larger than the free memory") from error
        if not isinstance(text, bytes | bytearray):
            raise TypeError(f"text of {type(file).__name__} returned {text!r:.60}; it must return bytes")
        if len(text) > file.most_bytes:
            raise file.too_large(number)
        return text

    def _begin(self, file: RecordFile) -> None:
        self._file, self._values = file, file.values()
        self._number, self._value, self._text = 0, None, None

    def _advance(self) -> bool:
        """Move to the next record; return False at the end of the file, which keeps the last record."""
        try:
            following = next(self._values, None)
        except DataError:
            raise
        except UNREADABLE as error:
            where = f"after {self._file.name(self._number)}" if self._number else "from the start"
            raise DataError(f"{self._file.path}: cannot be read {where}: {reason(error)}; fix or remove it") from error
        if following is None:
            return False
        is_pair = isinstance(following, tuple) and len(following) == 2 and isinstance(following[0], numbers.Integral)
        if not is_pair or following[0] <= self._number:
            raise TypeError(
                f"values of {type(self._file).__name__} yielded {following!r:.60} after number {self._number}; it must "
                "yield (number, record), with numbers that begin with 1 and rise"
            )
        (self._number, self._value), self._text = following, None
        return True


def reason(error: BaseException) -> str:
    """Return the first line of a library's error message."""
    said = error.strerror if isinstance(error, OSError) else str(error)
    return (said or str(error) or type(error).__name__).splitlines()[0]
