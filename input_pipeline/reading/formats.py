# SPDX-License-Identifier: Apache-2.0
"""Readers for file formats with many documents in a file: JSONL, CSV, Parquet, TFRecord."""

import bz2
import csv
import gzip
import io
import itertools
import lzma
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf.message import DecodeError

from input_pipeline.errors import BadDocument, DataError
from input_pipeline.reading.json_lines import ADVICE, encoded, record_of, shown, without_field
from input_pipeline.reading.records import TOO_LARGE, RecordFile
from input_pipeline.tensorflow_import import tensorflow

XZ_BYTES = 512 << 20  # memory limit for a dictionary of .xz; the largest of `xz -9` takes 65 MiB
STREAMS = {".bz2": bz2.BZ2Decompressor, ".xz": partial(lzma.LZMADecompressor, memlimit=XZ_BYTES)}
COMPRESSED = (".gz", ".zst", *STREAMS)
SKIPPED_BYTES = 1 << 20  # of skipped content, per read
LARGE_BYTES = 16 << 20  # a larger line or record is a bytearray, so that its reader can free it
CHECKSUM_MASK = 0xA282EAD8  # TFRecord adds it to checksums
ROWS = 32  # per decoded batch; few, because a document may be large
BATCH_LIMITS = 4  # a decoded batch may take this many times data.max_document_mib
LONGEST_CELL = (1 << 31) - 1  # the csv module's own limit is 128 KiB


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file for reading and decompress it according to its suffix."""
    suffix = path.suffix.lower()
    if suffix in STREAMS:
        return io.BufferedReader(Streams(path, STREAMS[suffix]), 1 << 20)
    if suffix == ".zst":
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), 1 << 20)
    return (gzip.open if suffix == ".gz" else open)(path, "rb")


class Streams(io.RawIOBase):
    """Concatenated compressed streams; bz2.open and lzma.open silently skip a later stream with a damaged header."""

    def __init__(self, path: Path, new_stream: Callable):
        self._file, self._new_stream, self._stream = io.FileIO(path), new_stream, new_stream()
        self._parts = iter(partial(self._file.read, io.DEFAULT_BUFFER_SIZE), b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        content = b""
        while not content:
            part = b""
            if self._stream.eof:
                parts = itertools.chain([self._stream.unused_data], self._parts)
                part = next(filter(None, (part.lstrip(b"\0") for part in parts)), b"")  # zeros pad streams of .xz
                if not part:
                    return 0
                self._stream = self._new_stream()
            elif self._stream.needs_input and not (part := next(self._parts, b"")):
                raise EOFError("it ends within a compressed stream")
            content = self._stream.decompress(part, len(buffer))
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self._file.close()
        super().close()


def read_lines(file: BinaryIO, most_bytes: int) -> Iterator[bytes | bytearray | object]:
    """Yield the lines of a file; TOO_LARGE replaces a longer line, which is not held in memory."""
    while line := file.readline(most_bytes + 1):
        if len(line) <= most_bytes:
            line = bytearray(line) if len(line) > LARGE_BYTES else line
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(SKIPPED_BYTES)
        yield TOO_LARGE


class JsonLines(RecordFile):
    """A file with a JSON object on each line, whose text is under one key; blank lines are skipped."""

    def values(self) -> Iterator[tuple[int, bytes | object]]:
        with open_decompressed(self.path) as file:
            for number, line in enumerate(read_lines(file, self.most_bytes), start=1):
                if line is TOO_LARGE or not line.isspace():
                    yield number, line

    def text(self, number: int, value: bytes) -> bytes:
        name = self.name(number)
        record = record_of(name, value, self.path)
        if not isinstance(record, dict):
            raise BadDocument(name, "not an object", f" ({shown(record)}; each line must be an object with a text)")
        if self.field not in record:
            chat = "messages" in record and self.field == "text"
            raise without_field(name, self.field, record, "; data.source=chat reads conversations" if chat else ADVICE)
        if not isinstance(record[self.field], str):
            raise BadDocument(name, f"without text in {self.field!r}", f" ({shown(record[self.field])})")
        return encoded(name, record[self.field])


class CsvLines:
    """An iterator over the lines of a CSV file as text, which knows where the current row begins.

    Raises:
        DataError: a row has more than `most_bytes`: its end is unknown, so no row after it can be read.
    """

    def __init__(self, table: RecordFile, file: BinaryIO):
        self._table, self._file, self._line, self._row_bytes = table, file, 0, 0
        self.row_begins = 1

    def begin_row(self) -> None:
        """Mark that all lines so far belong to earlier rows."""
        self.row_begins, self._row_bytes = self._line + 1, 0

    def __iter__(self) -> Iterator[str]:
        most_bytes, read_line = self._table.most_bytes, self._file.readline
        while line := read_line(most_bytes + 1):
            self._row_bytes += len(line)
            if self._row_bytes > most_bytes:
                raise DataError(
                    f"{self._table.name(self.row_begins)}: a row larger than {most_bytes >> 20} MiB "
                    "(data.max_document_mib), or a quote that is never closed; fix the file"
                )
            self._line += 1
            text = line.decode("utf-8", "surrogateescape")
            yield text if self._line > 1 else text.removeprefix("\ufeff")


def suffix_of(file: Path) -> str:
    """Return the suffix of a file without that of its compression and the number of a part: .tsv of x.TSV-00000.gz."""
    inner = Path(file.stem) if file.suffix.lower() in COMPRESSED else file
    return inner.suffix.lower().partition("-")[0]


class Csv(RecordFile):
    """Comma- or, in .tsv, tab-separated values with a header; one column is the text."""

    def values(self) -> Iterator[tuple[int, tuple[list[str] | csv.Error, int, int]]]:
        """Yield (first line of the row, (row, expected number of columns, index of the text))."""
        csv.field_size_limit(LONGEST_CELL)
        dialect = "excel-tab" if suffix_of(self.path) == ".tsv" else "excel"
        with open_decompressed(self.path) as file:
            lines = CsvLines(self, file)
            rows = csv.reader(lines, dialect, strict=True)
            header = next(filter(None, rows), [])
            check_column(f"{self.path}:{max(1, rows.line_num)}", self.field, header or [self.field])
            lines.begin_row()
            while (row := self._next(rows)) is not None:
                if row:
                    yield lines.row_begins, (row, len(header), header.index(self.field))
                lines.begin_row()

    def _next(self, rows) -> list[str] | csv.Error | None:
        """Return the next row or its error, None at the end; an unclosed quote consumes the rest of the file."""
        try:
            return next(rows, None)
        except csv.Error as error:
            if "end of data" in str(error):
                raise DataError(f"{self.path}: a quote is never closed; fix the file") from error
            return error

    def text(self, number: int, value: tuple[list[str], int, int]) -> bytes:
        row, width, place = value
        if isinstance(row, csv.Error):
            raise BadDocument(self.name(number), "not a row of CSV", f" ({row})")
        if len(row) != width:
            raise BadDocument(
                self.name(number), "with more or fewer columns than the header", f" ({len(row)}, not {width})"
            )
        return row[place].encode("utf-8", "surrogateescape")


class Column(RecordFile):
    """A column of strings where each cell is a document."""

    unit = ", row "

    def columns(self) -> Iterator[pa.Array]:
        """Yield the column in parts."""
        raise NotImplementedError

    def values(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (row, unchecked cell); DataError if it is not a column of strings."""
        yield from enumerate(itertools.chain.from_iterable(map(self._cells, self.columns())), start=1)

    def text(self, number: int, value: bytes | None) -> bytes:
        if value is None:
            raise BadDocument(self.name(number), f"without text in {self.field!r}", " (null)")
        return value

    def _cells(self, column: pa.Array) -> Iterator[bytes | None]:
        is_dictionary = pa.types.is_dictionary(column.type)
        kind = column.type.value_type if is_dictionary else column.type
        if kind not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
            raise DataError(
                f"{self.path}: column {self.field!r} has the type {column.type}, not text; "
                "choose another with --config.data.field"
            )
        if is_dictionary:  # decoding would copy a large value for each of its rows
            return (cell.value.as_buffer().to_pybytes() if cell.is_valid else None for cell in column)
        return iter(column.cast(pa.large_binary()).to_pylist())


class Parquet(Column):
    """A column of a Parquet file."""

    def columns(self) -> Iterator[pa.Array]:
        with pq.ParquetFile(self.path) as table:
            check_column(self.path, self.field, table.schema_arrow.names)
            rows = self._rows(table.metadata)
            yield from (batch.column(0) for batch in table.iter_batches(rows, columns=[self.field]))

    def _rows(self, metadata: pq.FileMetaData) -> int:
        """Return how many rows to decode at once; one row may be as large as its whole row group.

        It does not read the metadata of single columns: pyarrow ends the process if they are damaged.
        """
        largest = max((metadata.row_group(n).total_byte_size for n in range(metadata.num_row_groups)), default=0)
        return min(ROWS, max(1, BATCH_LIMITS * self.most_bytes // max(1, largest)))


class TFRecord(RecordFile):
    """A file of tf.train.Example records, where one bytes feature is the text.

    A record is its length in 8 bytes, a checksum of these in 4, its content, and a checksum of that.
    """

    unit = ", record "

    def values(self) -> Iterator[tuple[int, bytes | object]]:
        with open_decompressed(self.path) as file:
            for number in itertools.count(1):
                if not (length := _take(file, 8, "the length of a record", may_end=True)):
                    return
                _check_sum(file, length, "the length of a record")
                yield number, self._content(file, int.from_bytes(length, "little"))

    def _content(self, file: BinaryIO, size: int) -> bytes | object:
        if size > self.most_bytes:
            for left in range(size + 4, 0, -SKIPPED_BYTES):
                _take(file, min(left, SKIPPED_BYTES), "a record")
            return TOO_LARGE
        content = _take(file, size, "a record")
        _check_sum(file, content, "a record")
        return bytearray(content) if size > LARGE_BYTES else content

    def text(self, number: int, value: bytes) -> bytes:
        name = self.name(number)
        try:
            features = tensorflow().train.Example.FromString(value).features.feature
        except DecodeError as error:
            raise BadDocument(name, "not a tf.train.Example") from error
        if isinstance(value, bytearray):
            value.clear()
        if self.field not in features:
            raise without_field(name, self.field, features)
        texts = features[self.field].bytes_list.value
        if len(texts) != 1:
            raise BadDocument(name, f"without text in {self.field!r}", f" ({len(texts)} byte strings, not 1)")
        return texts[0]


BY_SUFFIX: dict[str, type[RecordFile]] = {  # the suffix without that of a compression
    ".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonLines,
    ".csv": Csv, ".tsv": Csv, ".parquet": Parquet,
    ".tfrecord": TFRecord, ".tfrecords": TFRecord,
}  # fmt: skip


def _take(file: BinaryIO, size: int, what: str, may_end: bool = False) -> bytes:
    """Return the next `size` bytes of a TFRecord file, b"" at an end that `may_end` allows; OSError if cut off."""
    content = file.read(size)
    if len(content) < size and (content or not may_end):
        raise OSError(f"it ends within {what}")
    return content


def _check_sum(file: BinaryIO, content: bytes, what: str) -> None:
    """Read and verify the checksum of the content before it; OSError if it differs."""
    crc = google_crc32c.value(content)
    masked = ((crc >> 15 | crc << 17) + CHECKSUM_MASK) & 0xFFFFFFFF
    if _take(file, 4, what) != masked.to_bytes(4, "little"):
        raise OSError(f"the checksum of {what} is wrong")


def check_column(where, field: str, names: list[str]) -> None:
    """Raise DataError if none of a table's column names is the field of the text."""
    if field not in names:
        there = ", ".join(repr(name[:40]) for name in names[:8])
        advice = "choose one with --config.data.field"
        if len(names) == 1 and ";" in names[0]:
            advice = "separate columns by commas, not by semicolons"
        raise DataError(f"{where}: no column {field!r}; it has {there}; {advice}")
