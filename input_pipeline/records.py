# SPDX-License-Identifier: Apache-2.0
"""Files of many documents: each is read from its front, and a document is its place in the order.

Whatever the format and however it is compressed, going on to a later document reads what lies between, and
going back begins the file anew. All that reads a corpus goes through it in order, so nothing is read twice
for it, no index is needed, and a document costs a hundred bytes until it is opened.
"""

import csv
import io
import lzma
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import pyarrow as pa

from input_pipeline.errors import BadDocument, DataError

# What broken files raise; MemoryError: a library tried to hold more than this machine has.
UNREADABLE = (OSError, EOFError, ValueError, csv.Error, zlib.error, lzma.LZMAError, MemoryError, pa.ArrowException)
TOO_LARGE = object()  # in place of a record that is larger than data.max_document_mib


class RecordFile:
    """A file of many documents; a subclass for each format.

    Attributes:
        path: of the file, as messages name it.
        field: the key or column that holds the text.
        most_bytes: the largest record, and the largest document in one.
        unit: what stands between path and number where a record is named.
    """

    unit = ":"

    def __init__(self, path: Path | str, field: str, most_bytes: int):
        self.path, self.field, self.most_bytes = path, field, most_bytes

    def values(self) -> Iterator[tuple[int, object]]:
        """Yield (number, record) from the front; numbers rise. TOO_LARGE stands for a record over `most_bytes`."""
        raise NotImplementedError

    def text(self, number: int, value) -> bytes:
        """Return the document in a record. Raises BadDocument where there is none."""
        raise NotImplementedError

    def name(self, number: int) -> str:
        """Return what messages call a record."""
        return f"{self.path}{self.unit}{number}"

    def too_large(self, number: int) -> BadDocument:
        """Return what to say of a record over `most_bytes`."""
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
    """Reads the records of several files, of which one is open at a time."""

    def __init__(self):
        self._file: RecordFile | None = None
        self._values: Iterator[tuple[int, object]] = iter(())
        self._number, self._value, self._text = 0, None, None

    def records(self, files: Iterable[RecordFile]) -> Iterator[Record]:
        """Yield the documents of the files in order; to open each before the next comes costs no search."""
        for file in files:
            self._begin(file)
            while self._advance():
                number = self._number
                yield Record(self, file, number)
                assert (self._file, self._number) == (file, number), "an earlier document was opened meanwhile"

    def text(self, file: RecordFile, number: int) -> bytes:
        """Return the document `number` of a file; DataError where the file lost it since."""
        if file is not self._file or number < self._number:
            self._begin(file)
        while self._number < number and self._advance():
            pass
        if self._number != number:
            raise DataError(f"{file.name(number)}: gone since it was first read; run again when the file is still")
        if self._text is None:
            self._text = self._made(file, number)
        return self._text

    def _made(self, file: RecordFile, number: int) -> bytes:
        """Return the document in the present record."""
        if self._value is TOO_LARGE:
            raise file.too_large(number)
        try:
            text = file.text(number, self._value)
        except MemoryError as error:
            raise BadDocument(file.name(number), "larger than the memory that is free") from error
        if len(text) > file.most_bytes:
            raise file.too_large(number)
        return text

    def _begin(self, file: RecordFile) -> None:
        self._file, self._values = file, file.values()
        self._number, self._value, self._text = 0, None, None

    def _advance(self) -> bool:
        """Go on to the next record; false at the end of the file, where the last one stays."""
        try:
            following = next(self._values, None)
        except DataError:
            raise
        except UNREADABLE as error:
            where = f"after {self._file.name(self._number)}" if self._number else "from its beginning on"
            raise DataError(f"{self._file.path}: cannot be read {where}: {reason(error)}; mend or remove it") from error
        if following is not None:
            (self._number, self._value), self._text = following, None
        return following is not None


def reason(error: BaseException) -> str:
    """Return the first line of what a library says."""
    said = error.strerror if isinstance(error, OSError) else str(error)
    return (said or str(error) or type(error).__name__).splitlines()[0]
