# SPDX-License-Identifier: Apache-2.0
"""How fast is text tokenized, and how fast are batches delivered, on two cores?

Writes 1 GB of generated text as JSON lines. Tokenizes it in a process that is killed half-way, then in one that
finishes; the tokenizer is trained on the text, and both start from the documents. Then delivers batches of 16 sequences
of 2,048 tokens from these shards through tf.data onto the CPU device, as training does: from the first example, and
from step 1,000,000 as a resumed run. Medians over rounds are reported.
"""

import json
import os
import pathlib
import resource
import statistics
import subprocess
import sys
import tempfile
import time

import support

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
from ml_collections import ConfigDict

from configs.base import MESH_AXES, get_config
from input_pipeline.batches import training_batches
from input_pipeline.corpus import prepare
from parallelism.axis_rules import batch_sharding
from parallelism.mesh import make_mesh
from parallelism.placement import local_rows, place

MEGABYTES = 20 if support.QUICK else 1000
ROUNDS, STEPS = (2, 100) if support.QUICK else (5, 500)
LENGTH, ROWS, VOCABULARY = 2048, 16, 8192
SYLLABLES = (
    "a", "be", "con", "der", "e", "for", "ga", "in", "is", "ka", "la", "men", "ni", "o", "pro", "qua", "re", "ro",
    "sta", "te", "ti", "tion", "u", "ver", "zo",
)  # fmt: skip
BUILD = """
import json, sys
from ml_collections import ConfigDict
from input_pipeline.corpus import prepare
data = ConfigDict(json.loads(sys.argv[1]))
prepare(data, vocab_size=int(sys.argv[2]), vocab_size_typed=False, announce=lambda line: print(line, flush=True))
"""


def write_text(path: pathlib.Path) -> None:
    """Write documents of some thousand characters, the same each time; frequent words are short."""
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(SYLLABLES, 1 + rank.bit_length() // 4)) for rank in range(30_000)]
    frequency = 1 / np.arange(10, 30_010)
    drawn = iter(rng.choice(words, 3_000_000, p=frequency / frequency.sum()))
    paragraphs = [" ".join(next(drawn) for _ in range(150)).capitalize() + ".\n" for _ in range(20_000)]
    with path.open("w") as file:
        while file.tell() < MEGABYTES * 1_000_000:
            chosen = rng.integers(len(paragraphs), size=(1000, 5))
            file.writelines(json.dumps({"text": "".join(paragraphs[n] for n in row)}) + "\n" for row in chosen)


def build(data: ConfigDict) -> subprocess.Popen:
    """Start the preparation of the corpus in its own process."""
    command = [sys.executable, "-c", BUILD, json.dumps(data.to_dict()), str(VOCABULARY)]
    return subprocess.Popen(command, cwd=support.ROOT)


def finished_shards(cache: pathlib.Path) -> list[tuple[float, int]]:
    """Return when each shard was finished, in order, and its bytes of text."""
    paths = sorted((path.stat().st_mtime, path) for path in cache.glob("shards/*/*-*.json"))
    return [(when, json.loads(path.read_text())["bytes"]) for when, path in paths]


def building(data: ConfigDict) -> dict:
    """Return the figures of tokenizing: killed half-way, then resumed."""
    cache = pathlib.Path(data.cache_dir)
    started = time.perf_counter()
    first = build(data)
    while sum(size for _, size in finished_shards(cache)) < MEGABYTES * 500_000:
        assert first.poll() is None, "the build ended before it was half done"
        time.sleep(0.05)
    first.kill()
    first.wait()
    before = finished_shards(cache)
    assert build(data).wait() == 0
    seconds = time.perf_counter() - started
    after = finished_shards(cache)
    assert after[: len(before)] == before, "a finished shard was written again"
    bytes_per_token = sum(size for _, size in after) / sum(
        path.stat().st_size / 2 for path in cache.glob("shards/*/*.bin")
    )
    tokenizing = sum(size for _, size in before[1:]) / (before[-1][0] - before[0][0])
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss  # of the larger of the two
    return {
        "tokenizing_megabytes_per_second": round(tokenizing / 1e6, 1),
        "tokenizing_tokens_per_second": round(tokenizing / bytes_per_token),
        "build_peak_gib": round(peak / (2**30 if sys.platform == "darwin" else 2**20), 2),
        "build_seconds_with_the_interruption": round(seconds),
        "megabytes_tokenized_again_at_most": round(max(size for _, size in after) / 1e6, 1),
    }


def delivery(mixture) -> dict:
    """Return the figures of reading."""
    sharding = batch_sharding(make_mesh(dict.fromkeys(MESH_AXES, 1), jax.devices()[:1]))

    def batches(first_step: int, num_steps: int):
        read = training_batches(
            mixture, seed=0, sequence_length=LENGTH, global_batch=ROWS, rows=local_rows(sharding, ROWS),
            first_example=first_step * ROWS, num_steps=num_steps,
        )  # fmt: skip
        return place(read, sharding, ROWS)

    jax.block_until_ready(list(batches(0, 5)))
    speeds, resumes = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for batch in batches(0, STEPS):
            jax.block_until_ready(batch)
        speeds.append(STEPS * ROWS * LENGTH / (time.perf_counter() - started))
        started = time.perf_counter()
        jax.block_until_ready(next(batches(1_000_000, 10**9)))
        resumes.append(time.perf_counter() - started)
    return {
        "tokens_per_second": round(statistics.median(speeds)),
        "resume_seconds": round(statistics.median(resumes), 3),
    }


def main() -> None:
    """Tokenize, then read."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])
    with tempfile.TemporaryDirectory() as folder:
        text = pathlib.Path(folder) / "text.jsonl"
        write_text(text)
        data = get_config().data
        data.path, data.cache_dir = str(text), f"{folder}/cache"
        figures = building(data)
        started = time.perf_counter()
        corpus = prepare(data, vocab_size=VOCABULARY, vocab_size_typed=False)
        figures |= {"prepare_again_seconds": round(time.perf_counter() - started, 1)}
        figures = delivery(corpus.train) | figures
    support.finish("input_pipeline", figures)


if __name__ == "__main__":
    main()
