# SPDX-License-Identifier: Apache-2.0
"""The short convolution is the sum that it says, and keeps positions apart beyond its width."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.convolution import ConvolvedSwiGLU, short_convolution
from tests.support import relative_error


@pytest.mark.parametrize("width", [1, 2, 3, 5])
def test_a_channel_is_convolved_with_its_own_kernel(width):
    rng = np.random.default_rng(width)
    x_BTF, kernel = rng.normal(size=(2, 4, 3)), rng.normal(size=(width, 3))
    wanted = np.zeros_like(x_BTF)
    for t in range(4):
        for w in range(width):
            if 0 <= t + w - width // 2 < 4:
                wanted[:, t] += kernel[w] * x_BTF[:, t + w - width // 2]
    found = short_convolution(jnp.asarray(x_BTF, jnp.float32), jnp.asarray(kernel, jnp.float32))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_gradient_of_the_kernel_loses_nothing_in_bfloat16():
    """In bfloat16, a sum over tokens of numbers near 1 stops at 256."""
    sizes = {"embed_dim": 4, "mlp_dim": 64, "biased": False, "quantization": "none", "out_scale": 1.0}
    graph, params = nnx.split(ConvolvedSwiGLU(width=2, rngs=nnx.Rngs(0), **sizes))
    rng = np.random.default_rng(0)
    x, along = (jnp.asarray(1 + 0.1 * rng.standard_normal((32, 512, 64)), jnp.bfloat16) for _ in range(2))

    @jax.jit
    def gradients(params, x, along):
        return jax.grad(lambda params: (nnx.merge(graph, params).hidden(x) * along).astype(jnp.float32).sum())(params)

    exact = gradients(params, x.astype(jnp.float32), along.astype(jnp.float32))
    found = gradients(params, x, along)
    for name in ("kernel", "kernel_bias"):
        assert relative_error(found[name][...], exact[name][...]) < 0.02
