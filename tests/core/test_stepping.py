# SPDX-License-Identifier: Apache-2.0
"""A caller's own loop begins with random weights: what needs another run is refused."""

import types

import jax
import numpy as np
import pytest

from configs import base
from configs.errors import ConfigError
from core.stepping import Steps
from tests.support import one_device_mesh
from training.state import TrainState


def run(frozen=(), **keys):
    config = base.get_config()
    config.update_from_flattened_dict({key.replace("__", "."): value for key, value in keys.items()})
    return types.SimpleNamespace(config=config, abstract_frozen={role: {} for role in frozen})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (run(train__init_from="runs/base"), "has no train.init_from, which train.train reads"),
        (run(["teacher"]), "has no teacher model, which train.train reads"),
        (run(batch__ramp="steps"), "takes every step in one way, and batch.ramp is read by train.train"),
        (run(layout__changes="4: data=2"), "layout.changes is read by train.train"),
        (run(supervision__first_high_cycles=1), "supervision.first_high_cycles is read by train.train"),
    ],
)
def test_what_steps_cannot_do_is_refused(given, message):
    with pytest.raises(ConfigError, match=message):
        Steps(given)


def test_a_batch_is_checked_as_train_does():
    plain = run()
    plain.config.model.vocab_size = 9
    names = ("tokens", "targets", "segments", "positions")
    plain.abstract_batch = {name: jax.ShapeDtypeStruct((2, 4), np.int32) for name in names}
    right = {name: np.ones((2, 4), np.int32) for name in names}
    for wrong, message in (
        ({"input_ids": right["tokens"]}, r"the batch given to Steps: input_ids is int32\[2, 4\] and should be missing"),
        (right | {"tokens": [[1] * 4] * 2}, r"tokens is a list and should be int32\[2, 4\]"),
        ({name: array[:1] for name, array in right.items()}, r"positions is int32\[1, 4\] and should be int32\[2, 4\]"),
        (right | {"tokens": right["tokens"] * 9}, "tokens has 9, which is not an id with model.vocab_size=9"),
        (tuple(right), "the batch given to Steps is a tuple and should be a dictionary of arrays"),
    ):
        with pytest.raises(ValueError, match=message):
            Steps(plain)(None, wrong)


def test_a_state_that_an_earlier_step_deleted_is_refused():
    """jax would end the process with a signal, as when the cell of a notebook runs twice."""
    plain = run()
    plain.abstract_batch, plain.mesh = {}, one_device_mesh()
    plain.train_step = lambda state, batch: (state, batch)
    state = TrainState(jax.numpy.int32(0), np.uint32(0), {"weight": jax.numpy.ones(2)}, (), {})
    assert Steps(plain)(state, {}) == (state, {})
    state.params["weight"].delete()
    with pytest.raises(ValueError, match=r"the state given to Steps is deleted, since a step deletes .*; go on with"):
        Steps(plain)(state, {})
    with pytest.raises(TypeError, match="the state given to Steps is a tuple; give the one that"):
        Steps(plain)((state, {}), {})


def test_a_plain_run_has_steps():
    assert Steps(plain := run()).run is plain
