# SPDX-License-Identifier: Apache-2.0
"""The short convolution is the sum that it says, and keeps positions apart beyond its width."""

import jax.numpy as jnp
import numpy as np
import pytest

from layers.convolution import short_convolution


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
