# SPDX-License-Identifier: Apache-2.0
"""What does foreign data cost: a large document, a million small ones, a decompression bomb, an endless template?

Each is read in its own process, whose peak memory above its idle memory is asserted. A text file of 500 MB is read in
pieces. A document in one line of JSON is held twice. A compressed line of gigabytes takes at most the
memory that data.max_document_mib allows. A million documents take some hundred bytes each. An endless template is
refused within seconds. The rates of rendering conversations and of reading lines of JSON are reported.
"""

import csv
import gzip
import json
import pathlib
import subprocess
import sys
import tempfile
import time

import support

import pyarrow as pa
import pyarrow.parquet as pq

from input_pipeline.chat.template import Template

MB = 1_000_000
LARGE_MB = 20 if support.QUICK else 500
BOMB_MB = 200 if support.QUICK else 6400
DOCUMENTS = 20_000 if support.QUICK else 1_000_000
LINE = "one line of the document, with some words in it, é and more\n"
PEAK = """
import json, pathlib, sys, time
from configs.base import get_config
from input_pipeline.corpus import prepare
from input_pipeline.reading.documents import scan
from input_pipeline.errors import DataError
from input_pipeline.sources import read_source

def peak():
    text = pathlib.Path("/proc/self/status").read_text()
    return int(text[text.index("VmHWM:") + 6:].split()[0]) / 2**10

data, what = get_config().data, json.loads(sys.argv[1])
scans = what.pop("scan")
data.update(what)
pathlib.Path("/proc/self/clear_refs").write_text("5")
before, began, said = peak(), time.perf_counter(), ""
try:
    if scans:
        number = len(scan(read_source(data, vocab_size=512, seed=0), data.bad_documents, str))
    else:
        number = prepare(data, vocab_size=256, vocab_size_typed=False, announce=str).train.parts[0].num_documents
except DataError as error:
    number, said = 0, str(error)
print(json.dumps({"documents": number, "said": said, "mib": peak() - before, "seconds": time.perf_counter() - began}))
"""
CHATML = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{{ 'x' * 5000000000 }}"


def read(path: pathlib.Path, *, scan: bool = True, **changes) -> dict:
    """Return the number of documents that a process found, its output, its peak in MiB and its seconds."""
    keys = {"path": str(path), "cache_dir": str(path.parent / "cache"), "tokenizer": "byte", "scan": scan} | changes
    command = [sys.executable, "-c", PEAK, json.dumps(keys)]
    done = subprocess.run(command, cwd=support.ROOT, text=True, capture_output=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def large_documents(folder: pathlib.Path) -> dict:
    """Return the figures of one large document in each format."""
    text, figures = LINE * (LARGE_MB * MB // len(LINE.encode())), {}
    (folder / "a.txt").write_text(text)
    (folder / "a.jsonl").write_text(json.dumps({"text": text}) + "\n")
    pq.write_table(pa.table({"text": [text]}), folder / "a.parquet")
    with (folder / "a.csv").open("w", newline="") as file:
        csv.writer(file).writerows([["text"], [text]])
    # Of JSON the text and its escaped form, which is 8 % longer, are in memory; the rest is room for the allocator.
    for name, copies in (("txt", 0.1), ("jsonl", 2.2), ("parquet", 5), ("csv", 7)):
        found = read(folder / f"a.{name}", max_document_mib=2048)
        assert found["documents"] == 1 and found["mib"] < 20 + copies * LARGE_MB, found
        figures[f"document_of_{LARGE_MB}_mb_in_{name}_peak_mib"] = round(found["mib"])
    return figures


def bomb(folder: pathlib.Path) -> dict:
    """Return the figures of a compressed line of gigabytes, which is an error or is skipped."""
    path = folder / "bomb.jsonl.gz"
    with gzip.open(path, "wb", 1) as file:
        file.write(b'{"text": "')
        for _ in range(BOMB_MB):
            file.write(b"x" * MB)
        file.write(b'"}\n{"text": "after"}\n')
    limit = 64 if support.QUICK else 256
    found = read(path, max_document_mib=limit)
    assert f"bomb.jsonl.gz:1: larger than {limit} MiB" in found["said"] and found["mib"] < 3 * limit, found
    left_out = read(path, max_document_mib=limit, bad_documents="skip")
    assert left_out["documents"] == 1 and left_out["mib"] < 3 * limit, left_out
    return {
        "bomb_megabytes": round(path.stat().st_size / MB, 1), "bomb_line_megabytes": BOMB_MB,
        "bomb_peak_mib": round(max(found["mib"], left_out["mib"])), "bomb_left_out_seconds": round(left_out["seconds"]),
    }  # fmt: skip


def many_documents(folder: pathlib.Path) -> dict:
    """Return the figures of many documents, found and then tokenized."""
    path = folder / "many.jsonl"
    with path.open("w") as file:
        file.writelines(json.dumps({"id": n, "text": f"document {n}\n" * 5}) + "\n" for n in range(DOCUMENTS))
    found = read(path, scan=False)
    assert found["documents"] > 0.9 * DOCUMENTS and found["mib"] < 200 + DOCUMENTS / 1000, found
    scanned = read(path)
    return {
        "documents": DOCUMENTS, "documents_found_per_second": round(DOCUMENTS / scanned["seconds"]),
        "documents_peak_mib": round(found["mib"]), "documents_seconds_to_a_corpus": round(found["seconds"]),
    }  # fmt: skip


def templates() -> dict:
    """Return conversations per second, and the time of hostile templates."""
    talk = [{"role": role, "content": LINE * 10} for role in ("user", "assistant", "user", "assistant")]
    lines = [(number, json.dumps({"messages": talk, "id": number}).encode()) for number in range(DOCUMENTS // 50)]
    form, began = Template(CHATML, {}), time.perf_counter()
    assert all(isinstance(made, bytes) for _, made in form.documents("chat", lines))
    figures = {"conversations_per_second": round(len(lines) / (time.perf_counter() - began))}
    for name, source in (("endless", ENDLESS), ("huge", HUGE)):
        began, said = time.perf_counter(), ""
        try:
            Template(source, {}).prompt(talk)
        except ValueError as error:
            said = str(error)
        seconds = time.perf_counter() - began
        assert said.startswith("it takes ") and seconds < 60, (name, said, seconds)
        figures[f"{name}_template_seconds"] = round(seconds, 1)
    return figures


def main() -> None:
    """Print all figures."""
    with tempfile.TemporaryDirectory() as name:
        folder, figures = pathlib.Path(name), {}
        for part in (large_documents, bomb, many_documents):
            (folder / part.__name__).mkdir()
            figures |= part(folder / part.__name__)
            print(figures, flush=True)
    support.finish("foreign_data", figures | templates())


if __name__ == "__main__":
    main()
