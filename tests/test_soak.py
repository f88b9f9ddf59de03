# SPDX-License-Identifier: Apache-2.0
"""A long run neither grows nor compiles again; by the code of benchmarks/soak.py, with fewer steps."""

import contextlib
import os
import re
import signal
import statistics

import jax
import numpy as np
import pytest

import train
from cluster.interruption import Interrupted
from core.callbacks import Callback, Stop
from core.evaluators import Evaluator
from tests import support, test_train_trm
from tests.test_train import in_process, own_batches

STEPS, SETTLED = 210, 70


@pytest.fixture(scope="module")
def soak():
    """The benchmark, as a module."""
    with support.benchmark("soak") as module:
        yield module


@pytest.mark.slow
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
    if kind == "soak":
        check_reading(tmp_path / "run")


def check_reading(run) -> None:
    """By the code of benchmarks/long_run.py: what reads a run also reads it with a line for each step."""
    with support.benchmark("long_run") as long_run:
        figures = long_run.steadiness(run, STEPS)
        assert figures["step_ms_last_tenth"] > 0 and figures["memory_mib_last_tenth"] > 100, figures
        long_run.fill(run / "metrics.jsonl")
        assert [line["step"] for line in long_run.support.lines_of(run, "train")] == [*range(1, STEPS + 1)]
        seconds = long_run.readers(run)
    assert seconds.keys() == {"report", "list", "study", "pod"} and min(seconds.values()) > 0, seconds


FINE = {"grown_mib": 1.0, "step_ms_first_tenth": 2.0, "drift": 0.01, "processor_drift": 0.0, "report_seconds": 2.0}


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, []),
        ({"grown_mib": 21.0}, ["memory has grown by more than 20.0 MiB"]),
        ({"step_ms_first_tenth": 6.0}, ["a step takes over 5.0 ms, so the run says little"]),
        ({"drift": 0.2}, []),  # other work on the machine
        ({"drift": 0.2, "processor_drift": 0.04}, ["steps got slower by more than 3%"]),
        ({"drift": -0.1, "processor_drift": 0.04}, ["steps got slower by more than 3%"]),  # other work has ended
        ({"report_seconds": 31.0}, ["reading takes over 30 s: report_seconds"]),
    ],
)
def test_a_long_run_is_judged_by_its_memory_its_speed_and_what_reads_it(changed, wrong):
    with support.benchmark("long_run") as long_run:
        assert long_run.failures(FINE | changed) == wrong


def test_the_drift_of_a_run_is_that_of_its_work_not_of_its_waiting():
    """Samples come at any time: late in the run there are more of them for a step, as on a busy machine."""
    with support.benchmark("long_run") as long_run:
        for more in (0.0, 0.05):
            seconds = [0.002 * step * (1 + more * (step >= 900)) for step in range(1000)]
            samples = [(step, 9, 9, seconds[step]) for step in range(1000) for _ in range(1 + step // 300)]
            assert long_run.processor_drift(samples, 1000) == pytest.approx(more)


@pytest.mark.slow
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


@pytest.mark.parametrize("mistake", [KeyError("a mistake of the reader"), None, 10**6])
def test_the_steps_before_a_mistake_in_own_batches_are_saved(single_device, tmp_path, mistake):
    config = in_process(train__steps=6)

    def batches():
        for number, batch in enumerate(own_batches(config, 6), start=1):
            if number == 4 and mistake is None:
                return
            if number == 4 and isinstance(mistake, Exception):
                raise mistake
            yield batch if number < 4 else batch | {"targets": np.full_like(batch["targets"], mistake)}

    kind, message = (KeyError, "a mistake") if isinstance(mistake, Exception) else (ValueError, "given to train()")
    with pytest.raises(kind, match=re.escape(message)):
        train.train(config, tmp_path, batches())
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["3"]


class Mistaken(Callback, Evaluator):
    """Fails at step 4, as a callback or as an evaluator."""

    name, every = "mistaken", 4

    def on_step(self, job, state, step):
        if step == 4:
            raise KeyError("of a callback")

    def evaluate(self, context):
        raise KeyError("of an evaluator")


@pytest.mark.parametrize(
    ("acts", "save_every"), [({"callbacks": [Mistaken()]}, 0), ({"evaluators": [Mistaken()]}, 0),
                             ({"evaluators": [Mistaken()]}, 4)]
)  # fmt: skip
def test_the_step_after_which_a_callback_or_an_evaluator_fails_is_saved(single_device, tmp_path, acts, save_every):
    config = in_process(train__steps=6, train__save_every=save_every)
    with pytest.raises(KeyError, match="of a"):
        train.train(config, tmp_path, own_batches(config, 6), **acts)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]


@pytest.mark.parametrize("signalled", [False, True])
def test_a_signal_after_a_callbacks_stop_is_not_lost(single_device, tmp_path, signalled):
    """The program that called train() would go on, although it was asked to end."""

    class Stops(Callback):
        def on_step(self, job, state, step):
            return Stop("enough") if step == 2 else None

        def on_end(self, job, *, has_failed):
            if signalled:
                signal.raise_signal(signal.SIGTERM)

    config = in_process(train__steps=6)
    ends = pytest.raises(Interrupted, match="saved at step 2") if signalled else contextlib.nullcontext()
    with ends:
        result = train.train(config, tmp_path, own_batches(config, 6), callbacks=[Stops()])
        assert (result.step, result.reason) == (2, "enough")
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["2"]


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
