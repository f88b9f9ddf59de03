# SPDX-License-Identifier: Apache-2.0
"""What a run imports before its first step, since each second of it is lost at every restart."""

import os
import subprocess
import sys

import pytest

from tests.support import ROOT, write_sums

# Each takes a tenth of a second to seconds to import, and a first step on a CPU needs none of them.
NOT_NEEDED = {
    "tensorflow",
    "tensorboard",
    "qwix",
    "jax.experimental.pallas",
    "torch",
    "transformers",
    "datasets",
    "matplotlib",
}
SCRIPT = """
import os, pathlib, sys
os.environ["JAX_PLATFORMS"] = "cpu"
import train
from core.callbacks import Callback, Stop
from settings import loading, validation

class Imported(Callback):
    def on_step(self, job, state, step):
        print("IMPORTED", *sys.modules)
        return Stop("seen")

folder, *keys = sys.argv[1:]
loaded = loading.load("configs/tiny.py", "", dict(key.split("=") for key in keys))
validation.resolve_mesh(loaded.config, 1)
validation.validate(loaded.config, 1, loaded)
train.train(loaded.config, pathlib.Path(folder), callbacks=[Imported()])
"""


@pytest.mark.slow
def test_the_first_step_waits_for_no_library_that_it_does_not_need(tmp_path):
    write_sums(tmp_path / "texts", 20)
    keys = {
        "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2,
        "model.mlp_dim": 48, "model.vocab_size": 300, "model.max_length": 32, "train.sequence_length": 32,
        "train.global_batch": 8, "data.path": f"{tmp_path}/texts/*.txt", "data.tokenizer": "byte",
        "data.holdout_fraction": 0.3, "data.cache_dir": tmp_path / "cache",
    }  # fmt: skip
    typed = [f"{key}={value}" for key, value in keys.items()]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, tmp_path / "run", *typed], cwd=ROOT, env=environment, capture_output=True,
        text=True, timeout=240,
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("IMPORTED")] or [done.stderr]
    imported = set(line.split())
    assert {"jax", "train"} < imported, done.stderr
    assert NOT_NEEDED & imported == set()
