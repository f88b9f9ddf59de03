# SPDX-License-Identifier: Apache-2.0
"""A mixture-density head: the density of a vector as a mixture of Gaussians (Bishop 1994, equations 23 to 29).

p(y | x) = sum over k of pi_k(x) N(y; mu_k(x), diag(sigma_k(x)^2)). A single Gaussian predicts the mean of all answers
that are right, which may be none of them. In einsum specs E is the outputs of the head, P the dimensions of y.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from layers.axes import weight
from layers.fsdp import all_gather_params
from layers.products import einsum_f32

SPREAD = 1.5  # the means of the components are first evenly spaced from -SPREAD to SPREAD, else some would coincide
LOG_2PI = math.log(2 * math.pi)


class Mixture(NamedTuple):
    """Mixtures of K Gaussians over vectors of P numbers, for each index of the leading dimensions.

    Attributes:
      log_weights: float32 [..., K], normalised.
      means, scales: float32 [..., K, P]; a scale is a standard deviation.
    """

    log_weights: jax.Array
    means: jax.Array
    scales: jax.Array

    def log_density(self, y: jax.Array) -> jax.Array:
        """Return log p(y) in nats, float32 [...], of vectors [..., P].

        It is logsumexp(log pi_k + log N(y; mu_k, sigma_k)): no density is computed, so that none underflows.
        """
        distances = (y[..., None, :] - self.means) / self.scales
        of_components = -0.5 * jnp.square(distances) - jnp.log(self.scales) - 0.5 * LOG_2PI
        return jax.nn.logsumexp(self.log_weights + of_components.sum(axis=-1), axis=-1)


class MixtureDensity(nnx.Module):
    """A linear map from [B, T, D] to mixtures.

    Args:
      out_dim: P.
      least_scale: a scale is this plus softplus(a), so that the density of one example cannot grow without bound.
    """

    def __init__(self, *, embed_dim: int, out_dim: int, num_components: int, least_scale: float, rngs: nnx.Rngs):
        self.sizes, self.least_scale = (num_components, out_dim), least_scale
        outputs = num_components * (1 + 2 * out_dim)
        self.kernel = weight(rngs, (embed_dim, outputs), ("embed", None), 0.1 * embed_dim**-0.5)
        means = jnp.linspace(-SPREAD, SPREAD, num_components) if num_components > 1 else jnp.zeros(1)
        # Another order for each number of the vector: the components lie on no line.
        means = jax.vmap(lambda key: jax.random.permutation(key, means), out_axes=1)(
            jax.random.split(rngs.params(), out_dim)
        )
        zeros = jnp.zeros(num_components), jnp.zeros(num_components * out_dim)
        self.bias = nnx.Param(jnp.concatenate([zeros[0], means.reshape(-1), zeros[1]]), out_sharding=(None,))

    def __call__(self, x_BTD: jax.Array) -> Mixture:
        """Return the mixture of each position."""
        num_components, out_dim = self.sizes
        kernel = all_gather_params(self.kernel[...], ("embed", None), x_BTD.dtype)
        outputs = einsum_f32("BTD,DE->BTE", x_BTD, kernel) + self.bias[...]
        logits, means, scales = jnp.split(outputs, [num_components, num_components * (1 + out_dim)], axis=-1)
        means, scales = (part.reshape(*part.shape[:-1], num_components, out_dim) for part in (means, scales))
        return Mixture(jax.nn.log_softmax(logits), means, self.least_scale + jax.nn.softplus(scales))
