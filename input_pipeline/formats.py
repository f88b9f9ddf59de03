# SPDX-License-Identifier: Apache-2.0
"""The formats that hold many documents in a file: JSONL, CSV, Parquet, TFRecord."""

import bz2
import csv
import gzip
import io
import itertools
import json
import lzma
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq
from google.protobuf.message import DecodeError

from input_pipeline.errors import BadDocument, DataError
from input_pipeline.records import RecordFile
from input_pipeline.tensorflow_import import tensorflow

STREAMS = {".bz2": bz2.BZ2Decompressor, ".xz": lzma.LZMADecompressor}
FRAME_BYTES = 16  # around a record of a TFRecord file: its length and two checksums
COMPRESSED = (".gz", ".zst", *STREAMS)
ROWS = 32  # that are decoded at once: few, as a document may be large
ADVICE = ": data.field names it"  # where there is another column or key
LONGEST_CELL = (1 << 31) - 1  # the csv module's own limit is 128 KiB


def open_decompressed(path: Path) -> BinaryIO:
    """Open a file for reading, through what its suffix says it is compressed with."""
    suffix = path.suffix.lower()
    if suffix in STREAMS:
        return io.BufferedReader(Streams(path, STREAMS[suffix]), 1 << 20)
    if suffix == ".zst":
        return io.BufferedReader(pa.CompressedInputStream(pa.OSFile(str(path)), "zstd"), 1 << 20)
    return (gzip.open if suffix == ".gz" else open)(path, "rb")


class Streams(io.RawIOBase):
    """Compressed streams one after the other; bz2.open and lzma.open leave out a later one with a damaged front."""

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


class JsonLines(RecordFile):
    """A JSON object per line, of which one key is the text; blank lines are none."""

    def values(self) -> Iterator[tuple[int, bytes]]:
        with open_decompressed(self.path) as lines:
            for number, line in enumerate(lines, start=1):
                if not line.isspace():
                    yield number, line

    def text(self, number: int, value: bytes) -> bytes:
        name, record = self.name(number), self.record(number, value)
        if not isinstance(record, dict) or self.field not in record:
            found = record if isinstance(record, dict) else ()
            chat = "messages" in found and self.field == "text"
            raise without_field(name, self.field, found, ": data.source=chat reads conversations" if chat else ADVICE)
        if not isinstance(record[self.field], str):
            raise BadDocument(name, f"without text in {self.field!r}", f" ({json.dumps(record[self.field])[:40]})")
        return encoded(name, record[self.field])

    def record(self, number: int, value: bytes):
        """Return what a line holds. Raises BadDocument where it is not JSON."""
        name = self.name(number)
        try:
            return json.loads(value.decode("utf-8-sig").rstrip())
        except UnicodeDecodeError as error:
            raise BadDocument(name, "not UTF-8", f" at byte {error.start} of the line") from error
        except json.JSONDecodeError as error:
            is_json = Path(self.path).suffix.lower() == ".json"
            whole = ", and data.source=text reads the file as it is" if is_json else ""
            raise BadDocument(name, "not JSON", f" at column {error.colno} ({error.msg}{whole})") from error
        except RecursionError as error:
            raise BadDocument(name, "not JSON", " (nested too deeply)") from error
        except ValueError as error:  # a number of thousands of digits
            raise BadDocument(name, "not JSON", f" ({error})") from error


class Csv(RecordFile):
    """Comma- or, in .tsv, tab-separated values with a header, of which one column is the text."""

    def values(self) -> Iterator[tuple[int, tuple[list[str] | csv.Error, int, int]]]:
        """Yield (line that the row begins in, (row, columns that there should be, place of the text))."""
        csv.field_size_limit(LONGEST_CELL)
        dialect = "excel-tab" if ".tsv" in map(str.lower, self.path.suffixes) else "excel"
        with open_decompressed(self.path) as lines:
            texts = (line.decode("utf-8", "surrogateescape") for line in lines)
            texts = itertools.chain((text.removeprefix("\ufeff") for text in itertools.islice(texts, 1)), texts)
            rows = csv.reader(texts, dialect, strict=True)
            header = next(filter(None, rows), [])
            check_column(f"{self.path}:{max(1, rows.line_num)}", self.field, header or [self.field])
            begins = rows.line_num + 1
            while (row := self._next(rows)) is not None:
                if row:
                    yield begins, (row, len(header), header.index(self.field))
                begins = rows.line_num + 1

    def _next(self, rows) -> list[str] | csv.Error | None:
        """Return the next row or what is wrong with it, None at the end; an open quote swallows the rest of a file."""
        try:
            return next(rows, None)
        except csv.Error as error:
            if "end of data" in str(error):
                raise DataError(f"{self.path}: a quote is never closed; mend the file") from error
            return error

    def text(self, number: int, value: tuple[list[str], int, int]) -> bytes:
        row, width, place = value
        if isinstance(row, csv.Error):
            raise BadDocument(self.name(number), "not a row of CSV", f" ({row})")
        if len(row) != width:
            raise BadDocument(self.name(number), "with other columns than the header", f" ({len(row)}, not {width})")
        return row[place].encode("utf-8", "surrogateescape")


class Column(RecordFile):
    """A column of strings, of which a cell is a document."""

    unit = ", row "

    def columns(self) -> Iterator[pa.Array]:
        """Yield the column in parts."""
        raise NotImplementedError

    def values(self) -> Iterator[tuple[int, bytes | None]]:
        """Yield (row, cell, unchecked). Raises DataError for a column of anything else."""
        yield from enumerate(itertools.chain.from_iterable(map(self._cells, self.columns())), start=1)

    def text(self, number: int, value: bytes | None) -> bytes:
        if value is None:
            raise BadDocument(self.name(number), f"without text in {self.field!r}", " (null)")
        return value

    def _cells(self, column: pa.Array) -> list[bytes | None]:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        if column.type not in (pa.string(), pa.large_string(), pa.binary(), pa.large_binary()):
            raise DataError(
                f"{self.path}: column {self.field!r} holds {column.type}, not text; name another with data.field"
            )
        return column.cast(pa.large_binary()).to_pylist()


class Parquet(Column):
    """A column of a Parquet file."""

    def columns(self) -> Iterator[pa.Array]:
        with pq.ParquetFile(self.path) as table:
            check_column(self.path, self.field, table.schema_arrow.names)
            yield from (batch.column(0) for batch in table.iter_batches(ROWS, columns=[self.field]))


class TFRecord(RecordFile):
    """tf.train.Example records, of which one bytes feature is the text."""

    unit = ", record "

    def values(self) -> Iterator[tuple[int, bytes]]:
        tf = tensorflow()
        compression = "GZIP" if self.path.suffix.lower() == ".gz" else ""
        records = tf.data.TFRecordDataset(str(self.path), compression_type=compression, buffer_size=1 << 20)
        try:
            batches = records.batch(ROWS).as_numpy_iterator()  # record by record takes ten times as long
            size = 0
            for number, record in enumerate((record for batch in batches for record in batch), start=1):
                size += len(record) + FRAME_BYTES
                yield number, record
        except tf.errors.OpError as error:
            raise OSError(error.message) from error
        if not compression and size != self.path.stat().st_size:  # which TensorFlow takes for its end
            raise OSError("it ends within the length of a record")

    def text(self, number: int, value: bytes) -> bytes:
        name = self.name(number)
        try:
            features = tensorflow().train.Example.FromString(value).features.feature
        except DecodeError as error:
            raise BadDocument(name, "not a tf.train.Example") from error
        if self.field not in features:
            raise without_field(name, self.field, features)
        texts = features[self.field].bytes_list.value
        if len(texts) != 1:
            raise BadDocument(name, f"without text in {self.field!r}", f" ({len(texts)} byte strings, not 1)")
        return texts[0]


BY_SUFFIX: dict[str, type[RecordFile]] = {  # compressed or not
    ".jsonl": JsonLines, ".ndjson": JsonLines, ".json": JsonLines,
    ".csv": Csv, ".tsv": Csv, ".parquet": Parquet,
    ".tfrecord": TFRecord, ".tfrecords": TFRecord,
}  # fmt: skip


def encoded(name: str, text: str) -> bytes:
    """Return text as UTF-8. Raises BadDocument where it cannot be that."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadDocument(name, "not UTF-8", f" ({error.reason}: half of a \\u pair)") from error


def without_field(name: str, field: str, names, advice: str = ADVICE) -> BadDocument:
    """Return what to say of a record that lacks a field and has others."""
    there = ", ".join(repr(name[:40]) for name in sorted(names)[:8])
    return BadDocument(name, f"without field {field!r}", f" (there is {there}{advice})" if there else " (it has none)")


def check_column(where, field: str, names: list[str]) -> None:
    """Raise DataError where a table with columns of these names has none for the text."""
    if field not in names:
        there = ", ".join(repr(name[:40]) for name in names[:8])
        raise DataError(f"{where}: no column {field!r}, but {there}; name one of them with data.field")
