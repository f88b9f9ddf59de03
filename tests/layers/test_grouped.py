# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows, each with a weight of its own, are what a loop over groups computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas.ops.tpu import megablox

from layers.experts import grouped
from tests.support import assert_close

D, F, E = 12, 20, 4
SIZES = np.array([130, 0, 3, 200], np.int32)  # one is empty, one needs two blocks


def by_loop(x_SD, weights_EDF, sizes):
    parts = jnp.split(x_SD, np.cumsum(sizes))
    return jnp.concatenate([rows @ w for rows, w in zip(parts, [*weights_EDF, 0 * weights_EDF[0]], strict=True)])


def interpreted(x_SD, weights_EDF, sizes_E):
    return grouped.kernel(x_SD, weights_EDF, sizes_E, interpret=True)


@pytest.mark.parametrize(
    ("platform", "product"), [("cpu", grouped.grouped), ("gpu", grouped.in_a_loop), ("tpu", interpreted)]
)
def test_every_platforms_product_and_its_gradients_are_the_loops(monkeypatch, platform, product):
    monkeypatch.setitem(grouped.BLOCK, "cpu", grouped.BLOCK[platform])
    rng, sizes = np.random.default_rng(0), np.asarray(grouped.aligned(SIZES))
    rows = grouped.num_rows(SIZES.sum(), E)
    inside = int(sizes.sum())
    assert inside <= rows
    x = rng.standard_normal((rows, D)).astype(np.float32) * (np.arange(rows) < inside)[:, None]
    weights = jnp.asarray(rng.standard_normal((E, D, F)), jnp.float32)

    def observed(function, sizes):
        def loss(x, w):
            return (function(x, w, sizes)[:inside] ** 2).sum()

        value, (of_x, of_weights) = jax.value_and_grad(loss, argnums=(0, 1))(x, weights)
        return value, of_x[:inside], of_weights

    assert_close(jax.jit(lambda sizes: observed(product, sizes))(sizes), observed(by_loop, sizes))


def test_a_gpu_loops_over_blocks_and_adds_up_in_float32(monkeypatch):
    """In bfloat16 the gradient of a weight would lose what many blocks add."""
    monkeypatch.setattr(grouped, "platform", lambda: "gpu")
    rows = 40 * grouped.BLOCK["gpu"]
    x, weights = jnp.full((rows, 1), 1, jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    product = jax.jit(jax.grad(lambda w: grouped.grouped(x, w, jnp.array([rows])).astype(jnp.float32).sum()))
    assert product(weights) == rows
    assert "while" in product.lower(weights).as_text()


def test_tiles_of_a_tpu_are_whole_lanes_whatever_the_width(monkeypatch):
    """A width of 704, not a multiple of 128, is what the TPU compiler once refused to go back over."""
    given = []
    monkeypatch.setattr(megablox, "gmm", lambda x, w, sizes, dtype, tiling, *rest: given.append(tiling))
    for size in (704, 20, 2816):
        grouped.kernel(jnp.zeros((512, 512), jnp.bfloat16), jnp.zeros((E, 512, size)), None)
    grouped.kernel(jnp.zeros((512, 1024)), jnp.zeros((E, 1024, 2816)), None)  # 32 bits: twice the bytes in a core
    assert given == [(512, 512, 768), (512, 512, 128), (512, 512, 1024), (512, 512, 512)]
