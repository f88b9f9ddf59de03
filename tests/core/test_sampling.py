# SPDX-License-Identifier: Apache-2.0
"""The batch that an objective samples in place of that of the data."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import base
from core import sampling
from objectives.objective import Objective, Sampled

BATCH = {"tokens": jnp.ones((8, 4), jnp.int32), "targets": jnp.ones((8, 4), jnp.int32)}


class Samples(Objective):
    def __init__(self, batch):
        self.sampled = batch and Sampled(batch)

    def sample_batch(self, engine, batch, key):
        return self.sampled


def sampled(batch):
    config = base.get_config()
    config.model.max_length = 4
    run = types.SimpleNamespace(
        config=config, graph=None, models=types.SimpleNamespace(merge_base=lambda params, frozen: params),
        objective=Samples(batch), abstract_batch=BATCH,
    )  # fmt: skip
    return sampling.sample(run, {}, {}, BATCH, 1).batch


def test_a_sampled_batch_takes_the_place_of_that_of_the_data():
    assert sampled(None) is BATCH
    host = {name: np.full((8, 4), 2, np.int32) for name in BATCH}
    jax.tree.map(np.testing.assert_array_equal, sampled(host), host)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({name: array[:4] for name, array in BATCH.items()}, r"targets is int32\[4, 4\] and should be int32\[8, 4\]"),
        ({"tokens": BATCH["tokens"]}, "targets is missing"),
        (BATCH | {"reward": jnp.ones(8)}, r"reward is float32\[8\] and should be missing"),
        (BATCH | {"tokens": jnp.ones((8, 4))}, "tokens is float32.* should be int32"),
    ],
)
def test_a_sampled_batch_of_another_shape_is_refused(batch, message):
    """With other rows, a step would be compiled for them, and the run would lose count of its examples."""
    with pytest.raises(ValueError, match=f"^the batch that train.objective=language_modeling sampled: {message}"):
        sampled(batch)
