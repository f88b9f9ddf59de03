# SPDX-License-Identifier: Apache-2.0
"""The same documents in any format are the same corpus, and what is wrong in a file is named with its line."""

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from input_pipeline import sources
from input_pipeline.errors import BadDocument, DataError
from input_pipeline.reading import formats
from input_pipeline.reading.documents import check_unchanged, scan
from input_pipeline.reading.records import Reader, RecordFile
from input_pipeline.sources import read_source
from input_pipeline.tensorflow_import import tensorflow
from tests.support import ROOT

TEXTS = [
    "one line\n", "two\nlines", 'quoted, "text"; with\ttabs\n', "", "é ü 😀 \u2028\n", "\r\nline ends\r",
    "\u2581 \0 end", "a longer one\n" * 3000,
]  # fmt: skip


def write_jsonl(path, texts):
    with path.open("w") as file:
        for number, text in enumerate(texts):
            file.write(
                json.dumps({"id": number, "text": text}, ensure_ascii=number % 2 == 0) + "\n\n"[: 1 + number % 2]
            )


def write_csv(path, texts, delimiter=","):
    with path.open("w", newline="") as file:
        rows = csv.writer(file, delimiter=delimiter)
        rows.writerows([["id", "text"], *([number, text] for number, text in enumerate(texts))])


def write_parquet(path, texts):
    table = pa.table({"id": range(len(texts)), "text": texts})
    pq.write_table(table, path, row_group_size=3)


def example(**features) -> bytes:
    tf = tensorflow()
    lists = {name: tf.train.Feature(bytes_list=tf.train.BytesList(value=value)) for name, value in features.items()}
    return tf.train.Example(features=tf.train.Features(feature=lists)).SerializeToString()


def write_tfrecord(path, texts, compression=""):
    with tensorflow().io.TFRecordWriter(str(path), compression) as file:
        for text in texts:
            file.write(example(text=[text.encode()], other=[b"x"]))


def compress(path, suffix):
    """Write the compressed content of a file to the same folder."""
    content, target = path.read_bytes(), path.with_name(path.name + suffix)
    if suffix == ".zst":
        with pa.CompressedOutputStream(str(target), "zstd") as file:
            file.write(content)
    else:
        target.write_bytes({".gz": gzip, ".bz2": bz2, ".xz": lzma}[suffix].compress(content))
    path.unlink()


WRITERS = {
    "a.jsonl": write_jsonl, "a.ndjson": write_jsonl, "a.csv": write_csv, "a.tsv": lambda p, t: write_csv(p, t, "\t"),
    "a.TSV-00000-of-00001": lambda p, t: write_csv(p, t, "\t"), "a.tsv.csv": write_csv,
    "a.parquet": write_parquet, "a.tfrecord": write_tfrecord, "a.tfrecord-00000-of-00001": write_tfrecord,
    "a.tfrecord.gz": lambda path, texts: write_tfrecord(path, texts, "GZIP"),
}  # fmt: skip


@pytest.fixture
def read(section):
    """Return the spans that a `data` section gives."""

    def read(path, announce=pytest.fail, **changes):
        data = section(**{"source": "auto", "path": str(path), **changes})
        return scan(read_source(data, vocab_size=256, seed=0), data.bad_documents, announce)

    return read


def contents(spans):
    return ["".join(span.text()) for span in spans]


def write(folder, name, texts):
    """Write the texts as a file of this name, as its suffixes say."""
    plain = name
    for suffix in (".gz", ".bz2", ".xz", ".zst"):
        plain = plain.removesuffix(suffix) if name not in WRITERS else plain
    writer = WRITERS.get(plain) or WRITERS[plain.replace(".json", ".jsonl")]
    writer(folder / plain, texts)
    if plain != name:
        compress(folder / plain, name.removeprefix(plain))
    return folder / name


NAMES = [*WRITERS, "a.jsonl.gz", "a.jsonl.bz2", "a.jsonl.xz", "a.jsonl.zst", "a.json.gz", "a.csv.gz", "a.csv.zst"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_holds_the_documents_of_text_files(read, tmp_path, name):
    texts = [text for text in TEXTS if text]
    said = []
    spans = read(write(tmp_path, name, TEXTS), said.append)
    assert contents(spans) == texts and [" 1 empty; " in line for line in said] == [True]
    assert contents(reversed(spans)) == texts[::-1] and contents(spans[::2]) == texts[::2]
    assert all(span.document.name.startswith(str(tmp_path / name)) for span in spans)
    check_unchanged(spans)


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst"])
def test_a_file_of_several_compressed_streams_is_read_to_its_end(read, tmp_path, suffix):
    texts = ["one", "a longer one\n" * 100_000, "three"]
    padding = bytes(20_000) if suffix == ".xz" else b""
    parts = [write(tmp_path, f"a.jsonl{suffix}", [text]).read_bytes() for text in texts]
    (tmp_path / f"all.jsonl{suffix}").write_bytes(b"".join(part + padding for part in parts))
    assert contents(read(tmp_path / f"all.jsonl{suffix}")) == texts


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.parquet", "a.tfrecord", "a.jsonl.zst"])
def test_a_corpus_is_the_same_from_any_format(corpus, tmp_path, name):
    (tmp_path / "files").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "files" / f"{number}.txt").write_bytes(text.encode())
    one = corpus(path=str(tmp_path / "files"))
    other = corpus(source="auto", path=str(write(tmp_path, name, TEXTS)), cache_dir=str(tmp_path / "other"))
    assert one.digest == other.digest and one.unigram_bits_per_byte == other.unigram_bits_per_byte


def test_a_folder_is_read_by_the_suffixes_of_its_files(read, tmp_path):
    folder = tmp_path / "mixed"
    folder.mkdir()
    write_jsonl(folder / "1.jsonl", ["one", "two"])
    write_csv(folder / "2.csv", ["three"])
    (folder / "3.md").write_text("four")
    write_jsonl(folder / "4.jsonl", ["five"])
    spans = read(folder)
    assert contents(spans) == ["one", "two", "three", "four", "five"]
    assert contents(spans[::-1]) == ["five", "four", "three", "two", "one"]


def test_a_source_that_is_named_reads_every_path(read, tmp_path):
    write_jsonl(tmp_path / "a.data", ["one", "two"])
    assert contents(read(tmp_path / "a.data", source="jsonl")) == ["one", "two"]
    for source, writer in [("csv", write_csv), ("parquet", write_parquet), ("tfrecord", write_tfrecord)]:
        writer(tmp_path / "b.data", ["one", "two"])
        assert contents(read(tmp_path / "b.data", source=source)) == ["one", "two"]
    assert len(read(tmp_path / "a.data", source="text")) == 1


def test_the_field_is_the_users(read, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"body": "one", "text": 1}')
    (tmp_path / "a.csv").write_text("\ufeffbody,n\none,1\n")
    pq.write_table(pa.table({"body": pa.array(["one"]).dictionary_encode()}), tmp_path / "a.parquet")
    for name in ("a.jsonl", "a.csv", "a.parquet"):
        assert contents(read(tmp_path / name, field="body")) == ["one"]


def test_a_document_of_many_pieces(read, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "LARGE_BYTES", 1 << 20)
    text = "".join(f"line {number} é\n" for number in range(200_000))
    write_jsonl(tmp_path / "a.jsonl", ["before", text, "after"])
    write_csv(tmp_path / "a.csv", ["before", text, "after"])
    for name in ("a.jsonl", "a.csv"):
        spans = read(tmp_path / name)
        assert [span.size for span in spans] == [6, len(text.encode()), 5]
        parts = spans[1].cut(spans[1].size // 2, slack=1000)
        assert "".join(contents(parts)) == text


def test_millions_of_documents_are_affordable(read, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"document {number}" for number in range(2_000)])
    spans = read(tmp_path / "a.jsonl")
    parts = [(span, span.digest, span.stop, span.document, span.document.number) for span in spans]
    assert sum(sum(map(sys.getsizeof, part)) for part in parts) / len(spans) < 300


BAD_LINES = {  # what is wrong with a line of JSON, and what is said of it
    b'{"text": "x"': "not JSON at column 13 (Expecting ',' delimiter)",
    b"[1, 2]": "not an object (a list; each line must be an object with a text)",
    b'{"body": "x", "id": 1}': "without field 'text' (it has 'body', 'id'; choose one with --config.data.field)",
    b'{"text": null}': "without text in 'text' (null)",
    b'{"text": ["x"]}': "without text in 'text' (a list)",
    b'{"text": "\xff"}': "not valid UTF-8 at byte 10 of the line",
    b'{"text": "\\ud800"}': "not valid UTF-8 (surrogates not allowed: an unpaired surrogate)",
    b"[" * 100_000: "not JSON (nested too deeply)",
}


@pytest.mark.parametrize(("line", "message"), BAD_LINES.items(), ids=range(len(BAD_LINES)))
def test_a_bad_line_of_json_is_an_error_with_its_line(read, tmp_path, line, message):
    (tmp_path / "a.jsonl").write_bytes(b'{"text": "good"}\n\n' + line + b'\n{"text": "good too"}\n')
    with pytest.raises(BadDocument) as caught:
        read(tmp_path / "a.jsonl")
    hint = ". Fix the file, or skip such documents with --config.data.bad_documents=skip."
    assert str(caught.value) == f"{tmp_path / 'a.jsonl'}:3: {message}{hint}"
    assert contents(read(tmp_path / "a.jsonl", bad_documents="skip", announce=list)) == ["good", "good too"]


def test_documents_that_are_left_out_are_counted_by_kind(read, tmp_path):
    lines = [b'{"text": "good %d"}' % number for number in range(1_000)]
    lines[16], lines[30], lines[700] = b'{"text": "\xff"}', b'{"text": "\xfe"}', b"{}"
    (tmp_path / "a.jsonl").write_bytes(b"\n".join(lines))
    said = []
    spans = read(tmp_path / "a.jsonl", bad_documents="skip", announce=said.append)
    assert len(spans) == 997 and said == [
        f"skipped 3 of 1,000 documents: 2 not valid UTF-8, 1 without field 'text'; first: {tmp_path}/a.jsonl:17"
    ]


def test_a_corpus_without_its_bad_documents_is_that_of_the_others(corpus, tmp_path):
    good = [f"document {number}\n" for number in range(20)]
    write_jsonl(tmp_path / "good.jsonl", good)
    write_jsonl(tmp_path / "bad.jsonl", good[:10])
    with (tmp_path / "bad.jsonl").open("a") as file:
        file.write("no json\n")
    write_jsonl(tmp_path / "rest.jsonl", good[10:])
    with (tmp_path / "bad.jsonl").open("a") as file:
        file.write((tmp_path / "rest.jsonl").read_text())
    said = []
    bad = corpus(source="auto", path=str(tmp_path / "bad.jsonl"), bad_documents="skip", announce=said.append)
    assert bad.digest == corpus(source="auto", path=str(tmp_path / "good.jsonl")).digest
    assert [line for line in said if line.startswith("skipped 1 of 21 documents: 1 not JSON")]


def test_a_row_that_is_no_csv_is_left_out_alone_and_a_mark_of_byte_order_is_none_of_the_header(read, tmp_path):
    (tmp_path / "a.csv").write_bytes(b'\xef\xbb\xbf"text",n\n"good",1\n"5" x",2\n"fine",3\n')
    with pytest.raises(BadDocument, match=r"a\.csv:3: not a row of CSV"):
        read(tmp_path / "a.csv")
    assert contents(read(tmp_path / "a.csv", bad_documents="skip", announce=list)) == ["good", "fine"]


@pytest.mark.parametrize("name", NAMES)
def test_suffixes_are_read_in_either_case(read, tmp_path, name):
    path = write(tmp_path, name, ["one\ttwo, three\n", "four"])
    spans = read(path.rename(path.with_name(name.upper())))
    assert contents(spans) == ["one\ttwo, three\n", "four"]


def test_other_suffixes_are_text_and_compressed_text_is_refused():
    assert sources.format_of(Path("a.md")) is None
    with pytest.raises(DataError, match=r"a\.txt\.gz: compressed text is not supported; decompress it"):
        sources.format_of(Path("a.txt.gz"))


@pytest.mark.parametrize("name", ["a.json", "A.JSON"])
def test_a_json_document_of_many_lines_is_told_how_to_be_read(read, tmp_path, name):
    (tmp_path / name).write_text('{\n  "text": "x"\n}\n')
    with pytest.raises(
        BadDocument, match=rf"{name}:1: not JSON at column 2 .* --config.data\.source=text reads the whole file as text"
    ):
        read(tmp_path / name)


def test_what_is_no_file_in_a_folder_is_left_out(read, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.txt").write_text("a")
    os.mkfifo(tmp_path / "folder" / "pipe")
    assert contents(read(tmp_path / "folder")) == ["a"]


def test_a_bad_row_of_a_table_is_named(read, tmp_path):
    (tmp_path / "a.csv").write_bytes(b'id,text\n1,"two\nlines"\n2,good\n3,bad,worse\n')
    (tmp_path / "b.csv").write_bytes(b'id,text\n1,"two\nlines"\n2,\xff\n3,good\n')
    pq.write_table(pa.table({"text": ["good", None, "good"]}), tmp_path / "a.parquet")
    pq.write_table(pa.table({"text": pa.array([b"good", b"\xff\xfe"])}), tmp_path / "b.parquet")
    for name, message in {
        "a.csv": ":5: with more or fewer columns than the header (3, not 2)",
        "b.csv": ":4: not valid UTF-8 at byte 0 (line 1)",
        "a.parquet": ", row 2: without text in 'text' (null)",
        "b.parquet": ", row 2: not valid UTF-8 at byte 0 (line 1)",
    }.items():
        with pytest.raises(BadDocument) as caught:
            read(tmp_path / name)
        assert str(caught.value).startswith(f"{tmp_path / name}{message}. Fix the file")
        spans = read(tmp_path / name, bad_documents="skip", announce=list)
        assert contents(spans)[-1] == "good" and len(spans) < 3


@pytest.mark.parametrize("name", ["damaged_index", "damaged_integer"])  # which the fuzzer found
def test_a_damaged_parquet_file_is_one_line(read, name):
    path = ROOT / "tests" / "fixtures" / "parquet" / f"{name}.parquet"
    with pytest.raises(DataError, match=r"\.parquet: cannot be read (after|from) .*; fix or remove it"):
        contents(read(path, announce=str))


def test_a_bad_record_is_named(read, tmp_path):
    with tensorflow().io.TFRecordWriter(str(tmp_path / "a.tfrecord")) as file:
        for record in (example(text=[b"good"]), b"\xff\xff", example(body=[b"x"]), example(text=[b"x", b"y"])):
            file.write(record)
    said = []
    assert contents(read(tmp_path / "a.tfrecord", bad_documents="skip", announce=said.append)) == ["good"]
    assert said == [
        "skipped 3 of 4 documents: 1 not a tf.train.Example, 1 without field 'text', 1 without text in 'text'; "
        f"first: {tmp_path}/a.tfrecord, record 2"
    ]
    with pytest.raises(BadDocument, match=r"a.tfrecord, record 2: not a tf.train.Example. Fix the file"):
        read(tmp_path / "a.tfrecord")


def damaged(path, content):
    path.write_bytes(content)
    return path


def test_blank_lines_before_the_header_of_a_table_are_blank_as_any(read, tmp_path):
    assert contents(read(damaged(tmp_path / "a.csv", b"\n\r\nid,text\n\n1,good\n"))) == ["good"]
    with pytest.raises(DataError, match=r"a.csv:3: no column 'body'; it has 'id', 'text'"):
        read(tmp_path / "a.csv", field="body")


@pytest.mark.parametrize("bad_documents", ["error", "skip"])
def test_what_is_wrong_with_a_whole_file_is_always_an_error(read, tmp_path, bad_documents):
    lines = b"".join(b'{"text": "good %d"}\n' % number for number in range(6_000))
    records = tmp_path / "good.tfrecord"
    write_tfrecord(records, ["good"] * 40)
    table = io.BytesIO()
    pq.write_table(pa.table({"text": [1, 2]}), table)
    for name, content, message in [
        (
            "1.csv",
            b"id,body\n1,x\n",
            "1.csv:1: no column 'text'; it has 'id', 'body'; choose one with --config.data",
        ),
        ("2.csv", b'id,text\n1,good\n2,"open\n', "2.csv: a quote is never closed; fix the file"),
        ("1.jsonl.gz", gzip.compress(lines)[:-900], "1.jsonl.gz: cannot be read after PATH:"),
        ("2.jsonl.gz", b"plain", "2.jsonl.gz: cannot be read from the start: Not a gzipped file (b'pl')"),
        ("3.jsonl.bz2", b"plain", "3.jsonl.bz2: cannot be read from the start: Invalid data stream"),
        ("4.jsonl.xz", b"plain", "4.jsonl.xz: cannot be read from the start: Input format not supported"),
        ("5.jsonl.zst", b"plain", "5.jsonl.zst: cannot be read from the start: "),
        ("6.jsonl.bz2", b"", "6.jsonl.bz2: cannot be read from the start: it ends within a compressed stream"),
        ("1.parquet", b"plain", "1.parquet: cannot be read from the start: "),
        (
            "2.parquet",
            table.getvalue(),
            "2.parquet: column 'text' has the type int64, not text; choose another with --config.",
        ),
        ("1.tfrecord", b"plain text" * 9, "1.tfrecord: cannot be read from the start: "),
        (
            "2.tfrecord",
            records.read_bytes()[:-20],
            "2.tfrecord: cannot be read after PATH, record 39: it ends within a record",
        ),
        (
            "3.tfrecord",
            records.read_bytes() + b"5678",
            "3.tfrecord: cannot be read after PATH, record 40: it ends within ",
        ),
        (
            "4.tfrecord",
            b"5678",
            "4.tfrecord: cannot be read from the start: it ends within the length of a record",
        ),
    ]:
        path = damaged(tmp_path / name, content)
        with pytest.raises(DataError) as caught:
            read(path, bad_documents=bad_documents)
        assert str(caught.value).startswith(f"{path.parent}/{message}".replace("PATH", str(path))), caught.value
        assert "\n" not in str(caught.value) and not isinstance(caught.value, BadDocument)


@pytest.mark.parametrize(("module", "suffix"), [(gzip, ".gz"), (bz2, ".bz2"), (lzma, ".xz")])
def test_what_is_wrong_with_a_later_compressed_stream_is_an_error_too(read, tmp_path, module, suffix):
    path = tmp_path / f"a.jsonl{suffix}"
    good = module.compress(b'{"text": "good"}\n')
    for later in (good[:1] + b"?" + good[2:], good[:12] + b"?" + good[13:], good[:-1], good + b"junk"):
        damaged(path, good + later)
        with pytest.raises(DataError, match=rf"^{path}: cannot be read after {path}:[12]: .*; fix or remove it$"):
            read(path)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
def test_a_file_without_a_document_is_an_error(corpus, tmp_path, name):
    (tmp_path / name).write_text("text\n" if name == "a.csv" else "\n" if name == "a.jsonl" else "")
    with pytest.raises(DataError, match=rf"data path '.*{name}' \(data.source=auto\): there is no text"):
        corpus(source="auto", path=str(tmp_path / name))
    (tmp_path / name).write_text("")
    with pytest.raises(DataError, match="there is no text"):
        corpus(source="auto", path=str(tmp_path / name), bad_documents="skip")


def test_a_file_that_shrinks_meanwhile_is_an_error(read, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    spans = read(tmp_path / "a.jsonl")
    check_unchanged(spans)
    write_jsonl(tmp_path / "a.jsonl", ["one"])
    assert contents(spans[:1]) == ["one"]
    with pytest.raises(
        DataError, match=r"a.jsonl:2: missing since it was first read; run again when nothing writes to it"
    ):
        contents(spans)
    write_jsonl(tmp_path / "a.jsonl", ["one", "two", "three"])
    spans = read(tmp_path / "a.jsonl")
    write_jsonl(tmp_path / "a.jsonl", ["one", "TWO", "three"])
    with pytest.raises(DataError, match=r"a.jsonl:2: changed while it was being read"):
        check_unchanged(spans)


@pytest.mark.parametrize(
    ("numbers", "says"),
    [((0, 1), "0, .* after number 0"), ((1, 3, 3), "3, .* after number 3"), ((2, 1), "1, .* after number 2"),
     (("a",), "'a', .* after number 0")],
)  # fmt: skip
def test_a_format_of_ones_own_whose_numbers_do_not_rise_is_named(numbers, says):
    """Number 0 would be no record, and an equal one a file that changes."""

    class Own(RecordFile):
        def values(self):
            yield from ((number, b"a record") for number in numbers)

        def text(self, number, value):
            return value

    with pytest.raises(TypeError, match=rf"^values of Own yielded \({says}; .* that begin with 1 and rise$"):
        list(Reader().records(Own("mine.own", "text", 100)))


@pytest.mark.parametrize("returned", ["a text", None])
def test_a_format_of_ones_own_whose_text_is_not_bytes_is_named(returned):

    class Own(RecordFile):
        def values(self):
            yield 1, "a record"

        def text(self, number, value):
            return returned

    (record,) = Reader().records(Own("mine.own", "text", 100))
    with pytest.raises(TypeError, match=f"text of Own returned {returned!r}; it must return bytes"):
        record.open()
