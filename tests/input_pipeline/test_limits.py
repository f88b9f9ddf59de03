# SPDX-License-Identifier: Apache-2.0
"""What is too large for memory is named and left out, never held: lines, rows, records, cells, compressed or not."""

import gzip
import json
import lzma
import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from input_pipeline.errors import BadDocument, DataError
from input_pipeline.reading.documents import scan
from input_pipeline.sources import read_source
from tests import warm
from tests.input_pipeline.reading.test_formats import WRITERS, contents, write

MIB = 1 << 20
LARGE = "x" * (2 * MIB)
PEAK = """
import pathlib, resource, sys, types
from input_pipeline.reading.documents import scan
from input_pipeline.errors import DataError
from input_pipeline.sources import read_source

def peak():
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text[text.index("VmHWM:") + 6:].split()[0]) >> 10

data = types.SimpleNamespace(
    source="auto", path=sys.argv[1], field="text", bad_documents=sys.argv[3], max_document_mib=int(sys.argv[2]),
    cache_dir="", validation_path="")
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, said = peak(), []
try:
    spans = scan(read_source(data, vocab_size=256, seed=0), data.bad_documents, said.append)
    print(len(spans), *said)
except DataError as error:
    print(error)
print(peak() - before)
"""


@pytest.fixture
def read(section):
    """Return the spans of a `data` section whose documents have a MiB at most."""

    def read(path, announce=pytest.fail, **changes):
        data = section(**{"source": "auto", "path": str(path), "max_document_mib": 1, **changes})
        return scan(read_source(data, vocab_size=256, seed=0), data.bad_documents, announce)

    return read


def peak_of(path, most_mib: int, bad_documents: str = "error") -> tuple[str, int]:
    """Return what a process says that reads a file, and the MiB that it takes above those before."""
    process = warm.start(["-c", PEAK, path, most_mib, bad_documents], dict(os.environ))
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    *said, peak = out.splitlines()
    return said[-1], int(peak)


FORMATS = [*WRITERS, "a.jsonl.gz", "a.jsonl.zst", "a.jsonl.xz", "a.jsonl.bz2", "a.tfrecord.zst"]


@pytest.mark.parametrize("name", [name for name in FORMATS if ".csv" not in name and ".tsv" not in name.lower()])
def test_a_document_over_the_limit_is_named_or_left_out_and_counted(read, tmp_path, name):
    path, said = write(tmp_path, name, ["before", LARGE, "after", "y" * (MIB - 100)]), []
    with pytest.raises(
        BadDocument, match=r"a\.\S+(:2|, row 2|, record 2): larger than 1 MiB \(data.max_document_mib\)"
    ):
        read(path)
    assert [span.size for span in read(path, said.append, bad_documents="skip")] == [6, 5, MIB - 100]
    assert said[0].startswith("skipped 1 of 4 documents: 1 larger than 1 MiB; first: ")
    assert [span.size for span in read(path, max_document_mib=3)] == [6, 2 * MIB, 5, MIB - 100]


@pytest.mark.parametrize("name", ["a.csv", "a.tsv.gz"])
@pytest.mark.parametrize("bad_documents", ["error", "skip"])
def test_a_row_of_csv_over_the_limit_ends_the_file_and_so_the_run(read, tmp_path, name, bad_documents):
    """Its end is unknown: it may be a quote that is never closed."""
    for number, text in enumerate((LARGE, "many lines\n" * 150_000)):
        (tmp_path / str(number)).mkdir()
        path = write(tmp_path / str(number), name, ["before", text, "after"])
        with pytest.raises(
            DataError, match=rf"{name}:3: a row larger than 1 MiB \(data.max_document_mib\), or a quote"
        ):
            read(path, bad_documents=bad_documents)
        assert contents(read(path, max_document_mib=4)) == ["before", text, "after"]


def test_a_text_file_over_the_limit_is_read_since_it_is_read_in_pieces(read, tmp_path):
    (tmp_path / "a.txt").write_text(LARGE)
    assert [span.size for span in read(tmp_path / "a.txt")] == [2 * MIB]


def _bomb(path, mebibytes: int) -> None:
    """Write a file of one line of this many MiB, compressed as its suffix says."""
    with gzip.open(path, "wb", 1) if path.suffix == ".gz" else pa.CompressedOutputStream(str(path), "zstd") as file:
        file.write(b'{"text": "')
        for _ in range(mebibytes):
            file.write(b"x" * MIB)
        file.write(b'"}\n{"text": "after"}\n')


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak of memory")
@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_bomb_takes_no_more_memory_than_the_limit_allows(tmp_path, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    _bomb(path, 200)
    assert path.stat().st_size < MIB
    said, mebibytes = peak_of(path, 16)
    assert said.startswith(f"{path}:1: larger than 16 MiB") and mebibytes < 100
    said, mebibytes = peak_of(path, 16, "skip")
    assert said.startswith("1 skipped 1 of 2 documents: 1 larger than 16 MiB") and mebibytes < 100


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak of memory")
@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.tfrecord"])
def test_of_a_large_document_two_copies_are_held_at_most_and_of_a_text_file_none(tmp_path, name):
    """Of 80 MB, which is above what is let go of as soon as it is not needed."""
    text, path = "a line of the document\n" * (80 * MIB // 23), tmp_path / name
    path.write_text(text) if name == "a.txt" else write(tmp_path, name, [text, "after"])
    said, mebibytes = peak_of(path, 512)
    assert said.split()[0] == str(1 + (name != "a.txt")), said
    assert mebibytes < {"a.txt": 20, "a.jsonl": 190, "a.tfrecord": 290}[name]  # the last one imports TensorFlow, too


def test_a_large_line_that_is_no_json_is_named_with_its_column(read, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "before"}\n[' + b" " * (20 * MIB) + b"x]\n")
    with pytest.raises(BadDocument, match=rf"a.jsonl:2: not JSON at column {20 * MIB + 2} \(Expecting value\)"):
        read(tmp_path / "a.jsonl", max_document_mib=64)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak of memory")
def test_a_value_that_a_table_has_many_times_is_not_held_as_often(tmp_path):
    """Such a file has the value once, in a dictionary: here a thousand documents of 20 MiB in some kilobytes."""
    value = pa.DictionaryArray.from_arrays(pa.array([0] * 1000, pa.int32()), pa.array(["x" * (20 * MIB)]))
    for name, column in (("kept", value), ("plain", value)):
        path = tmp_path / f"{name}.parquet"
        pq.write_table(
            pa.table({"text": column}), path, compression="zstd", dictionary_pagesize_limit=1 << 30,
            store_schema=name == "kept",
        )  # fmt: skip
        assert path.stat().st_size < MIB
        said, mebibytes = peak_of(path, 16)
        assert said.startswith(f"{path}, row 1: larger than 16 MiB") and mebibytes < 300


def test_a_record_that_says_it_is_huge_is_not_made_room_for(read, tmp_path):
    """Its length has a checksum that fits."""
    import google_crc32c

    length = (1 << 40).to_bytes(8, "little")
    crc = google_crc32c.value(length)
    masked = ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
    path = tmp_path / "a.tfrecord"
    path.write_bytes(length + masked.to_bytes(4, "little") + b"short")
    with pytest.raises(DataError, match=r"a.tfrecord: cannot be read from the start: it ends within a record"):
        read(path)


def test_memory_that_runs_out_is_a_line(read, tmp_path, monkeypatch):
    write(tmp_path, "a.jsonl", ["before", "after"])

    def no_memory(*unused):
        raise MemoryError

    with monkeypatch.context() as patch, pytest.raises(BadDocument, match=r"a.jsonl:1: larger than the free memory"):
        patch.setattr("input_pipeline.reading.formats.JsonLines.text", no_memory)
        read(tmp_path / "a.jsonl")
    with (
        monkeypatch.context() as patch,
        pytest.raises(DataError, match=r"a.jsonl: cannot be read .*: MemoryError; fix"),
    ):
        patch.setattr("input_pipeline.reading.formats.read_lines", no_memory)
        read(tmp_path / "a.jsonl")


def test_a_dictionary_of_xz_that_takes_too_much_memory_is_refused(read, tmp_path):
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 1 << 30}]
    (tmp_path / "a.jsonl.xz").write_bytes(lzma.compress(b'{"text": "x"}\n', filters=filters))
    with pytest.raises(DataError, match=r"a.jsonl.xz: cannot be read from the start: Memory usage limit exceeded"):
        read(tmp_path / "a.jsonl.xz")


@pytest.mark.parametrize("name", ["a.jsonl.gz.gz", "a.tar.gz", "a.zip.xz", "a.gz"])
def test_archives_in_archives_are_refused(read, tmp_path, name):
    (tmp_path / name).write_bytes(gzip.compress(gzip.compress(b'{"text": "x"}\n')))
    with pytest.raises(DataError, match=rf"{name}: compressed text is not supported; decompress it"):
        read(tmp_path / name)


def test_lines_of_white_space_are_none_however_many_there_are(read, tmp_path):
    (tmp_path / "a.jsonl").write_bytes(b" \t\r\n\n" * 100_000 + b'{"text": "x"}\n' + b"\n" * 1000 + b"   ")
    (span,) = read(tmp_path / "a.jsonl")
    assert span.document.name == f"{tmp_path}/a.jsonl:200001"


def test_a_file_that_grows_while_it_is_read_is_read_to_where_it_ends(read, tmp_path):
    """What is appended after that is neither part of the run nor an error."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": "two"}\n')
    spans = read(path)
    with path.open("a") as file:
        file.write('{"text": "three"}\n{"te')
    assert contents(spans) == ["one", "two"]


def test_a_record_of_many_values_beside_the_text_is_a_document(read, tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"deep": [[[{}] * 10] * 10] * 10, "text": "x", "n": 10**400}))
    assert contents(read(tmp_path / "a.jsonl")) == ["x"]
