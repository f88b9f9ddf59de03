# SPDX-License-Identifier: Apache-2.0
"""A run that waits for its data says so in a line; one that does not says nothing."""

import json
import time
import types

import pytest

import train
from configs import base
from core.between_steps import slow_data
from tests.test_train import in_process, own_batches


@pytest.mark.parametrize("waits, imports, reported", [
    ([30.0] + [0.05] * 20, (), []),  # the first batch waits for the pipeline to start; later 5 % is nothing to report
    ([0.0] * 3 + [0.5] * 17, (), [5]),  # of each second and a half; said once, not at each window
    ([0.0, 0.0, 0.0, 3.0, 9.0] + [0.05] * 7, (3, 4), []),  # the import of TensorFlow ends in step 5, which waits for it
    ([0.0] * 2 + [0.5] * 6 + [0.0] * 10 + [0.5] * 6, (), [5, 23]),  # fast between, so that it is said again
])  # fmt: skip
def test_each_spell_of_waiting_is_reported_once_with_the_keys_that_help(waits, imports, reported, monkeypatch):
    """Steps of a second each, and what each waits for its batch before; windows of 5 seconds."""
    seconds, events = dict.fromkeys(("data", "rollout", "step", "wait"), 0.0), []
    job = types.SimpleNamespace(
        config=base.get_config(), corpus=object(), clock=types.SimpleNamespace(read=lambda: dict(seconds), since=0.0),
        log=types.SimpleNamespace(event=lambda text, name, step, **figures: events.append((step, text))),
    )  # fmt: skip
    monkeypatch.setattr(slow_data.pipeline, "is_importing_tensorflow", lambda: step in imports)
    watch = slow_data.SlowData()
    watch.on_start(job, None)
    for step, wait in enumerate(waits, start=1):
        seconds["data"] += wait
        seconds["wait"] += 1.0
        job.clock.since = sum(seconds.values())
        assert watch.on_step(job, None, step) is None
    assert [step for step, _ in events] == reported
    said = "spent waiting for data; try --config.data.readers=8 --config.data.prefetch=16"  # twice the automatic ones
    assert all(text.endswith(said) for _, text in events)


@pytest.mark.slow
def test_a_run_whose_batches_come_late_says_so(single_device, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(slow_data, "WINDOW_SECONDS", 0.5)
    config = in_process(train__steps=6, train__eval_every=0, train__save_every=0)

    def batches():
        for batch in own_batches(config, 6):
            time.sleep(0.3)
            yield batch

    train.train(config, tmp_path, batches())
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    (line,) = [line for line in lines if line.get("event") == "slow_data"]
    assert 1 < line["step"] <= 6 and 0.1 * line["seconds"] < line["waited_seconds"] <= line["seconds"]
    assert capsys.readouterr().out.count("were spent waiting for data; they come from the caller of train()") == 1
