# SPDX-License-Identifier: Apache-2.0
"""A long run neither grows nor compiles again; by the code of benchmarks/soak.py, with fewer steps."""

import os
import re

import numpy as np
import pytest

import train
from tests import support
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
