# SPDX-License-Identifier: Apache-2.0
"""The loss of cells against recorded values, and where a careless form of it has no gradient."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.stablemax import log_s, softmax_loss, stablemax_loss
from objectives.recursive import IGNORED
from tests.support import assert_close
from tests.trm_cases import recorded


def test_values_and_gradients_are_those_recorded():
    """In float64 by the public code, whose logits have 0, 1 and -1 among them, and large ones; -100 is not a label."""
    aux = {key.removeprefix("stablemax/"): array for key, array in recorded("aux").items() if "stablemax/" in key}
    logits = aux["logits"].astype(np.float32)
    assert {0.0, 1.0, -1.0} <= set(logits.flat)
    learned = aux["labels"] != IGNORED

    def losses(logits):
        return jnp.where(learned, stablemax_loss(logits, np.where(learned, aux["labels"], 0)), 0)

    gradient = jax.jit(jax.grad(lambda logits: losses(logits).sum()))(logits)
    np.testing.assert_allclose(jax.jit(losses)(logits), aux["nll"], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(gradient, aux["grad_of_sum"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_slope_of_its_logarithm_is_right_where_branches_meet(dtype):
    """1 / (1 + |u|) everywhere; written with 1 / (1 - u), u = 1 gives NaN, and by sign or maximum u = 0 gives less."""
    u = jnp.array([0.0, -0.0, 1.0, -1.0, 0.5, -3.0, 1e4, -1e4, 1e30, -1e30], dtype)
    slopes = jax.jit(jax.vmap(jax.grad(log_s)))(u)
    exact = np.asarray(u, np.float64)
    np.testing.assert_allclose(slopes, 1 / (1 + np.abs(exact)), rtol=1e-2 if dtype == "bfloat16" else 1e-6)
    np.testing.assert_allclose(log_s(u), np.sign(exact) * np.log1p(np.abs(exact)), rtol=1e-6)


@pytest.mark.parametrize("loss", [stablemax_loss, softmax_loss])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_losses_and_gradients_are_finite_float32_and_sum_to_what_they_should(loss, dtype):
    """A gradient of softmax sums to 0 over tokens; that of stablemax does so over tokens of the same |logit|."""
    logits = jnp.array([[1.0, 0.0, -1.0], [1e4, -1e4, 1.0], [1.0, 1.0, 1.0]], dtype)
    value, gradient = jax.jit(jax.value_and_grad(lambda x: loss(x, jnp.array([0, 1, 2])).sum()))(logits)
    assert value.dtype == jnp.float32 and gradient.dtype == logits.dtype
    assert np.isfinite(value) and np.isfinite(np.asarray(gradient, np.float32)).all()
    np.testing.assert_allclose(np.asarray(gradient[2], np.float32).sum(), 0, atol=1e-2)


def test_probabilities_are_those_of_the_paper():
    """s(u) / sum of s, with s = u + 1 from 0 on and 1 / (1 - u) below; and of softmax, exp."""
    logits = np.array([[2.0, -3.0, 0.0, 0.5]], np.float32)
    s = np.array([3.0, 0.25, 1.0, 1.5])
    for label in range(4):
        assert_close(stablemax_loss(logits, jnp.array([label]))[0], -np.log(s / s.sum())[label])
        p = np.exp(logits[0]) / np.exp(logits[0]).sum()
        assert_close(softmax_loss(logits, jnp.array([label]))[0], -np.log(p)[label])
