# SPDX-License-Identifier: Apache-2.0
"""The density of a mixture is Bishop's formula, and stays finite where the densities themselves do not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.mixture_density import Mixture, MixtureDensity
from parallelism.mesh import mesh_context
from tests.support import assert_close, one_device_mesh

K, P = 4, 3


def mixture(seed: int = 0) -> Mixture:
    """Return mixtures [2, 5] of K Gaussians over P numbers."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(2, 5, K)).astype(np.float32)
    means, scales = (rng.normal(size=(2, 5, K, P)).astype(np.float32) for _ in range(2))
    return Mixture(jax.nn.log_softmax(logits), jnp.asarray(means), jnp.exp(scales))


def log_density(one: Mixture, y: np.ndarray) -> np.ndarray:
    """Return log p(y) in float64 by the formula of each Gaussian, summed as densities."""
    from scipy import stats  # here, since it takes a second to import, in each worker that collects tests

    of_numbers = stats.norm.pdf(y[..., None, :], np.float64(one.means), np.float64(one.scales))
    return np.log((np.exp(np.float64(one.log_weights)) * of_numbers.prod(axis=-1)).sum(axis=-1))


def test_the_density_is_the_weighted_sum_of_gaussians():
    one, y = mixture(), np.random.default_rng(1).normal(size=(2, 5, P))
    assert_close(one.log_density(y), log_density(one, y))


@pytest.mark.parametrize("distance", [1e3, 1e6])
def test_far_from_all_components_density_and_gradient_are_finite(distance):
    """There the densities underflow to 0, and their logarithm would be -inf."""
    one = mixture()
    value, gradient = jax.value_and_grad(lambda one: one.log_density(jnp.full((2, 5, P), distance)).sum())(one)
    assert np.isfinite(value) and all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient))


def test_a_head_begins_with_spread_means_and_its_scales_have_a_floor():
    with jax.set_mesh(one_device_mesh()), mesh_context(one_device_mesh()):
        head = MixtureDensity(embed_dim=6, out_dim=P, num_components=K, least_scale=0.25, rngs=nnx.Rngs(0))
        found = head(jnp.zeros((1, 1, 6)))
        head.bias[...] = head.bias[...].at[-K * P :].set(-1e4)
        narrow = head(jnp.ones((1, 1, 6)))
    assert np.ptp(np.sort(np.asarray(found.means), axis=2), axis=2).min() > 2.9  # none coincides with another
    assert np.diff(np.sort(np.asarray(found.means)[0, 0], axis=0), axis=0).min() > 0.9
    np.testing.assert_allclose(np.exp(found.log_weights), 1 / K, rtol=1e-6)
    np.testing.assert_allclose(narrow.scales, 0.25, rtol=1e-6)
