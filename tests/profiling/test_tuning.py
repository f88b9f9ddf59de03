# SPDX-License-Identifier: Apache-2.0
"""Tuning: a change is kept if it helps beyond the noise, and what changes the training is never tried."""

import json
import types

import jax
import pytest

from cluster.interruption import Interrupted
from profiling import tuning
from profiling.advice import Advice
from profiling.recording import FILE
from reporting import preflight
from settings import loading

SECONDS = 0.02  # of a step of the healthy configuration


@pytest.fixture
def clock(monkeypatch) -> types.SimpleNamespace:
    """The time that tuning reads, which only the stand-in for train advances; TensorFlow counts as imported."""
    time = types.SimpleNamespace(now=0.0, perf_counter=lambda: time.now, has_imported=False)
    monkeypatch.setattr(tuning, "time", time)
    imported = types.SimpleNamespace(result=lambda: setattr(time, "has_imported", True))
    monkeypatch.setattr(tuning, "importing_tensorflow", lambda: imported)
    return time


def fake_train(clock, costs: dict, advice: list[Advice], seen: list):
    """Return a function in place of train.train: its steps take longer for keys that have a costly value."""

    def train(config, folder, *, callbacks, **unused):
        assert clock.has_imported, "short steps would wait for the import"
        _, timer = callbacks
        job = types.SimpleNamespace(log=types.SimpleNamespace(flush=lambda: None))
        slow = [key for key, (value, _) in costs.items() if _get(config, key) == value]
        seen.append(slow)
        given = [one for one in advice if any(_get(config, key) != value for key, value in one.keys.items())]
        for step in range(1, config.train.steps + 1):
            jitter = 0.001 * SECONDS * (step % 3)
            clock.now += SECONDS + jitter + sum(costs[key][1] for key in slow)
            if stop := timer.on_step(job, None, step):
                assert stop.reason == "measured"
                break
        assert step < config.train.steps, "the run does not finish, which would evaluate all that is held out"
        folder.mkdir(parents=True)
        (folder / FILE).write_text(json.dumps({"advice": [one._asdict() | {"line": one.line()} for one in given]}))

    return train


def _get(config, key: str):
    section, name = key.split(".")
    return config[section][name]


@pytest.fixture
def config():
    config = loading.load("configs/tiny.py", "", {"model.remat": "full", "train.log_every": "1"}).config
    config.mesh.fsdp = 1
    return config


def test_what_helps_is_kept_and_what_does_not_is_not(clock, config, tmp_path):
    """Recomputing and synchronising cost half a step each; more readers cost as much as they save."""
    costs = {"model.remat": ("full", SECONDS / 2), "train.log_every": (1, SECONDS / 2)}
    advice = [
        Advice("excess remat", "20 %", {"model.remat": "none"}, gain=0.2),
        Advice("slow input", "9 %", {"data.readers": 4}, gain=0.1),
        Advice("host synchronisation", "20 %", {"train.log_every": 20}, gain=0.2),
        Advice("tiny batch", "few tokens", {"train.global_batch": 64}, gain=0.9, changes_training=True),
    ]
    said, seen = [], []
    kept = tuning.tune(fake_train(clock, costs, advice, seen), config, tmp_path / "run", said.append)
    assert kept == {"model.remat": "none", "train.log_every": 20}
    assert seen[0] == ["model.remat", "train.log_every"] and seen[-1] == [], "each change is tried on those kept before"
    text = "\n".join(said)
    assert "--config.model.remat=none --config.train.log_every=20: " in text and "times as fast" in text
    assert "not kept: no gain beyond the noise" in text and "not tried: tiny batch" in text
    assert not (tmp_path / "run" / "tuning").exists(), "nothing of the trials stays"
    assert config.model.remat == "full" and config.train.global_batch == 32, "the configuration is not changed"


def test_a_healthy_configuration_stays_as_it_is(clock, config, tmp_path):
    said = []
    assert tuning.tune(fake_train(clock, {}, [], []), config, tmp_path / "run", said.append) == {}
    assert "nothing to try" in said


def test_what_did_not_help_is_tried_again_when_something_slower_is_gone(clock, config, tmp_path):
    """Recomputation hides behind a slow reader, so that the first try of keeping activations saves nothing."""
    costs = {"data.readers": (1, SECONDS)}
    advice = [
        Advice("excess remat", "20 %", {"model.remat": "none"}, gain=0.2),
        Advice("slow input", "9 %", {"data.readers": 4}, gain=0.1),
    ]
    config.data.readers = 1

    def hidden(config, folder, **arguments):
        slow = costs | ({"model.remat": ("full", SECONDS / 2)} if config.data.readers > 1 else {})
        return fake_train(clock, slow, advice, [])(config, folder, **arguments)

    kept = tuning.tune(hidden, config, tmp_path / "run", lambda line: None)
    assert kept == {"data.readers": 4, "model.remat": "none"}


@pytest.mark.parametrize(
    "error", [preflight.StepTooLarge("the step needs 30 GiB"), jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: memory")]
)
def test_a_change_that_does_not_fit_is_said_and_the_others_are_tried(clock, config, tmp_path, error):
    said, measured = [], fake_train(clock, {"train.log_every": (1, SECONDS / 2)}, TWO_CHANGES, [])
    kept = tuning.tune(failing(measured, error), config, tmp_path / "run", said.append)
    assert kept == {"train.log_every": 20} and "not kept: does not fit" in "\n".join(said)


def test_another_error_ends_the_tuning(clock, config, tmp_path):
    measured = fake_train(clock, {"train.log_every": (1, SECONDS / 2)}, TWO_CHANGES, [])
    with pytest.raises(jax.errors.JaxRuntimeError, match="INTERNAL"):
        tuning.tune(failing(measured, jax.errors.JaxRuntimeError("INTERNAL: a bug")), config, tmp_path / "run", print)


def test_a_trial_that_is_stopped_names_no_checkpoint(clock, config, tmp_path):
    """It is removed with the folder of the trials, and the same command begins again."""
    measured = fake_train(clock, {"train.log_every": (1, SECONDS / 2)}, TWO_CHANGES, [])
    with pytest.raises(KeyboardInterrupt):
        tuning.tune(failing(measured, Interrupted(70)), config, tmp_path / "run", print)
    assert not (tmp_path / "run" / "tuning").exists()


TWO_CHANGES = [
    Advice("excess remat", "20 %", {"model.remat": "none"}, gain=0.2),
    Advice("host synchronisation", "20 %", {"train.log_every": 20}, gain=0.2),
]


def failing(train, error: Exception):
    """Return `train`, which fails for activations that are not recomputed."""

    def or_fail(config, folder, **arguments):
        if config.model.remat == "none":
            raise error
        train(config, folder, **arguments)

    return or_fail
