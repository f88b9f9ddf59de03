# SPDX-License-Identifier: Apache-2.0
"""Readers of files of documents to fuzz: each format, compressed or not, and conversations."""

import bz2
import gzip
import io
import json
import lzma

import google_crc32c
import pyarrow as pa
import pyarrow.parquet as pq

from input_pipeline.tensorflow_import import tensorflow
from tests.fuzz.data_section import RECORD, read_either_way
from tests.fuzz.harness import reader

TEXTS = [RECORD["text"], "two\n", "", "three " * 50, "four\r\n", "\0"]
LINES = b"".join(json.dumps(RECORD | {"text": text}).encode() + b"\n\n" for text in TEXTS)


def zstd(content: bytes) -> bytes:
    return pa.compress(content, codec="zstd", asbytes=True)


COMPRESSIONS = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".zst": zstd}


def file_reader(name: str, file_name: str, good, **changes) -> None:
    """Register a reader of a file of this name; it reads with and without bad documents."""

    @reader(name, good)
    def read(content: bytes, folder) -> None:
        (folder / file_name).write_bytes(content)
        read_either_way(folder / file_name, **changes)


file_reader("json lines", "a.jsonl", lambda: [LINES])
for suffix, compress in COMPRESSIONS.items():
    file_reader(f"json lines {suffix}", f"a.jsonl{suffix}", lambda compress=compress: [compress(LINES)])

    @reader(f"json lines changed before {suffix}", lambda: [LINES])
    def read_changed(content: bytes, folder, suffix=suffix, compress=compress) -> None:
        (folder / f"a.jsonl{suffix}").write_bytes(compress(content))
        read_either_way(folder / f"a.jsonl{suffix}")


def _tables() -> list[bytes]:
    rows = ["id,text,more", '1,"one, ""quoted""\nline",x', "2,two,y", "3,\u00e9,", '4,"",z']
    return ["\n".join(rows).encode(), ("\ufeff" + "\r\n".join(rows) + "\r\n").encode()]


file_reader("csv", "a.csv", _tables)
file_reader("tsv", "a.tsv", lambda: [content.replace(b",", b"\t") for content in _tables()])


def _parquets() -> list[bytes]:
    found = []
    for text in (pa.array(TEXTS), pa.array(TEXTS).dictionary_encode(), pa.array(TEXTS, pa.large_binary())):
        for how in ({}, {"compression": "zstd", "use_dictionary": False, "row_group_size": 2}):
            target = io.BytesIO()
            pq.write_table(pa.table({"id": range(len(TEXTS)), "text": text}), target, **how)
            found.append(target.getvalue())
    return found


file_reader("parquet", "a.parquet", _parquets)


def _example(text: str) -> bytes:
    train = tensorflow().train
    feature = {"text": train.Feature(bytes_list=train.BytesList(value=[text.encode()]))}
    return train.Example(features=train.Features(feature=feature)).SerializeToString()


def _framed(content: bytes) -> bytes:
    """Return a record of a TFRecord file."""
    length = len(content).to_bytes(8, "little")
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    crc = google_crc32c.value(content)
    return (((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")


file_reader("tfrecord", "a.tfrecord", lambda: [b"".join(_framed(_example(text)) for text in TEXTS)])


@reader("tfrecord of an example", lambda: [_example(text) for text in TEXTS])
def read_example(content: bytes, folder) -> None:
    (folder / "a.tfrecord").write_bytes(_framed(_example("before")) + _framed(content))
    read_either_way(folder / "a.tfrecord")


def _talks() -> list[bytes]:
    roles = ("system", "user", "assistant", "user", "assistant")
    talks = [[{"role": role, "content": f"{role} {n}"} for role in roles[:size]] for n, size in enumerate((3, 5, 5))]
    return [b"".join(json.dumps({"messages": talk, "id": 1}).encode() + b"\n" for talk in talks)]


def _pairs() -> list[bytes]:
    plain = [{"prompt": f"{n} + 1 = ", "chosen": f"{n + 1}", "rejected": f"perhaps {n}"} for n in range(3)]
    roles = {"prompt": "user", "chosen": "assistant", "rejected": "assistant"}
    said = [{key: [{"role": roles[key], "content": text}] for key, text in pair.items()} for pair in plain]
    return [b"".join(json.dumps(pair).encode() + b"\n" for pair in (*plain, *said))]


file_reader("conversations", "a.jsonl", _talks, source="chat")
file_reader("preferences", "a.jsonl", _pairs, source="preferences")
