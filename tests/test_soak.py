# SPDX-License-Identifier: Apache-2.0
"""A long run neither grows nor compiles again; by the code of benchmarks/soak.py, with fewer steps."""

import os
import re
import statistics

import jax
import numpy as np
import pytest

import train
from core.callbacks import Callback
from tests import support, test_train_trm
from tests.test_train import in_process, own_batches

STEPS, SETTLED = 210, 70


@pytest.fixture(scope="module")
def soak():
    """The benchmark, as a module."""
    with support.benchmark("soak") as module:
        yield module


@pytest.mark.parametrize("kind", ["soak", "soak_recursive"])
def test_nothing_grows_and_nothing_is_compiled_again(soak, kind, tmp_path, monkeypatch):
    """On one device, as the benchmark."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    monkeypatch.setenv("XLA_FLAGS", " ".join(flags))
    found = getattr(soak, kind)(tmp_path, STEPS, SETTLED)
    assert found["grown_mb"] < soak.LIMIT_MB, found
    assert found["recompilations"] == 0, found
    # Four saves lie between, and what each of them left would be 4.
    assert found["open_files_grown"] <= 2 and found["threads_grown"] <= 2, found


def test_no_array_of_a_step_outlives_it(single_device, tmp_path):
    """One array more a step is too little to be seen in so few steps' memory; a carry of 4 KB would be 20 MB in 5,000.

    Batches read ahead and steps that are not yet logged come and go, so medians are compared.
    """
    alive = {}

    class Counts(Callback):
        def on_step(self, job, state, step):
            alive[step] = len(jax.live_arrays())

    config = test_train_trm.tiny(tmp_path / "cache", train__steps=60, train__save_every=0)
    train.train(config, tmp_path / "run", callbacks=[Counts()])
    early, late = (statistics.median(alive[step] for step in steps) for steps in (range(10, 20), range(50, 60)))
    assert late - early < 20, alive  # one array a step would be 40


@pytest.mark.parametrize("change", ["shape", "type"])
def test_a_batch_of_another_shape_is_refused_by_name(single_device, tmp_path, change):
    config = in_process(train__steps=6)
    rows, length = config.train.global_batch, config.train.sequence_length

    def batches():
        for number, batch in enumerate(own_batches(config, 6), start=1):
            yield batch if number < 4 else batch | changed(batch)

    def changed(batch: dict) -> dict:
        array = batch["targets"]
        return {"targets": array[:, : length // 2] if change == "shape" else array.astype(np.int64)}

    found = f"int32[{rows}, {length // 2}]" if change == "shape" else f"int64[{rows}, {length}]"
    message = f"batch 4 given to train(): targets is {found} and should be int32[{rows}, {length}]"
    with pytest.raises(ValueError, match=re.escape(message)):
        train.train(config, tmp_path, batches())
