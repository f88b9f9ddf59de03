# SPDX-License-Identifier: Apache-2.0
"""The products and the SwiGLU of groups of rows are what a loop over groups computes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.experts import grouped, swiglu_kernels
from tests.support import assert_close

D, F, E = 12, 20, 4
SIZES = np.array([130, 0, 3, 200], np.int32)  # one is empty, one needs two blocks


def by_loop(x_SD, factors_S, weights, sizes):
    """Return (y, gate, up), each group by products of its own."""
    ends = np.cumsum(sizes)
    rows = (jnp.split(rows, ends)[:-1] for rows in (x_SD, factors_S))
    outs = [grouped.composed(jnp.matmul, x, fs, each) for x, fs, *each in zip(*rows, *weights, strict=True)]
    return tuple(jnp.concatenate(parts) for parts in zip(*outs, strict=True))


def in_blocks(product):
    def swiglu(x_SD, factors_S, weights, sizes_E):
        return grouped.composed(lambda x, weight: product(x, weight, sizes_E), x_SD, factors_S, weights)

    return swiglu


def given(D: int, F: int, sizes: np.ndarray, dtype=np.float32) -> tuple:
    """Return (rows, factors, weights) for groups of these sizes."""
    rng, rows = np.random.default_rng(0), grouped.num_rows(sizes.sum(), E)
    assert sizes.sum() <= rows
    x = rng.standard_normal((rows, D)) * (np.arange(rows) < sizes.sum())[:, None]
    shapes = (E, D, F), (E, D, F), (E, F, D)
    weights = tuple(jnp.asarray(0.3 * rng.standard_normal(shape), dtype) for shape in shapes)
    return jnp.asarray(x, dtype), jnp.asarray(rng.random(rows), jnp.float32), weights


def observed(swiglu, arguments: tuple, sizes: np.ndarray) -> dict:
    """Return the results and the gradients of a loss, without the rows after the last group."""
    inside = int(sizes.sum())

    def loss(x, factors, weights):
        y, gate, up = (rows[:inside].astype(jnp.float32) for rows in swiglu(x, factors, weights, sizes))
        return (y**2).sum(), (y, gate, up)

    (_, results), (of_x, of_factors, of_weights) = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(*arguments)
    return {"results": results, "x": of_x[:inside], "factors": of_factors[:inside], "weights": of_weights}


interpreted = functools.partial(swiglu_kernels.swiglu, interpret=True)


@pytest.mark.parametrize(
    ("platform", "swiglu"),
    [("cpu", in_blocks(grouped.by_block)), ("gpu", in_blocks(grouped.in_a_loop)), ("tpu", interpreted)],
)
def test_every_platforms_swiglu_and_its_gradients_are_the_loops(monkeypatch, platform, swiglu):
    monkeypatch.setitem(grouped.BLOCK, "cpu", grouped.BLOCK[platform])
    sizes = np.asarray(grouped.aligned(SIZES))
    arguments = given(D, F, sizes)
    assert_close(*(jax.jit(functools.partial(observed, one, sizes=sizes))(arguments) for one in (swiglu, by_loop)))


@pytest.mark.parametrize(("D", "F"), [(140, 300), (300, 140)])
def test_tiles_of_a_tpu_may_end_outside_the_array(monkeypatch, D, F):
    """The columns that a product sums over, and those of its result, are not whole tiles; one tile has three groups."""
    monkeypatch.setattr(swiglu_kernels, "WIDTH_BYTES", 512)
    monkeypatch.setattr(swiglu_kernels._tile, "__defaults__", (512,))  # 128 columns too
    monkeypatch.setitem(grouped.BLOCK, "cpu", 1)
    sizes = np.array([500, 0, 7, 530], np.int32)
    arguments = given(D, F, sizes)
    assert_close(*(jax.jit(functools.partial(observed, one, sizes=sizes))(arguments) for one in (interpreted, by_loop)))


def test_a_cpu_adds_the_gradients_of_blocks_in_float32():
    """In bfloat16 a sum of 512 equal gradients stops at half of them."""
    rows = 512 * grouped.BLOCK["cpu"]
    x, sizes = jnp.ones((rows, 1), jnp.bfloat16), jnp.asarray([0, rows], jnp.int32)
    loss = lambda weights: grouped.by_block(x, weights, sizes).astype(jnp.float32).sum()  # noqa: E731
    gradient = jax.grad(loss)(jnp.ones((2, 1, 1), jnp.bfloat16))
    assert gradient.ravel().tolist() == [0, rows]


def test_a_gpu_loops_over_blocks_and_adds_up_in_float32():
    """In bfloat16 the gradient of a weight would lose what many blocks add."""
    rows = 40 * grouped.BLOCK["gpu"]
    x, weights = jnp.full((rows, 1), 1, jnp.bfloat16), jnp.ones((1, 1, 1), jnp.bfloat16)
    product = jax.jit(jax.grad(lambda w: grouped.in_a_loop(x, w, jnp.array([rows])).astype(jnp.float32).sum()))
    assert product(weights) == rows
    assert "while" in product.lower(weights).as_text()


def test_tiles_of_a_tpu_are_whole_lanes_whatever_the_width():
    """A width of 704, not a multiple of 128, is what the TPU compiler once refused to go back over."""
    bfloat16, float32 = jnp.zeros((), jnp.bfloat16).dtype, jnp.zeros((), jnp.float32).dtype
    assert [swiglu_kernels._tile(size, bfloat16) for size in (704, 20, 2816)] == [768, 128, 1024]
    assert swiglu_kernels._tile(2816, float32) == 512  # 32 bits: twice the bytes in a core
    assert swiglu_kernels.TILE_ROWS == grouped.TILE_ROWS, "rows are padded to whole tiles"


def test_a_tpu_computes_no_product_again_if_gate_and_up_are_saved():
    """Three products forward and six backward. JAX would round saved floats once more, in a pass over each."""
    x, factors, weights = given(D, F, SIZES, jnp.bfloat16)
    policy = jax.checkpoint_policies.save_only_these_names("gate", "up")

    @functools.partial(jax.checkpoint, policy=policy)
    def loss(x, factors, weights):
        return interpreted(x, factors, weights, jnp.asarray(SIZES))[0].astype(jnp.float32).sum()

    program = jax.make_jaxpr(jax.grad(loss, (0, 1, 2)))(x, factors, weights)
    used = [equation.primitive.name for equation in equations(program)]
    assert (used.count("pallas_call"), used.count("reduce_precision")) == (9, 0)


def equations(jaxpr):
    """Yield all equations, without those of a kernel."""
    for equation in jaxpr.eqns:
        yield equation
        if equation.primitive.name != "pallas_call":
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from equations(inner)


def test_float32_is_multiplied_at_full_precision_on_a_tpu(monkeypatch):
    """JAX's default would round the factors of a product to bfloat16."""
    seen = []
    monkeypatch.setattr(grouped, "platform", lambda: "tpu")
    monkeypatch.setattr(
        swiglu_kernels, "swiglu", lambda x, *_: seen.append(jax.config.jax_default_matmul_precision) or (x, x, x)
    )
    monkeypatch.setattr("layers.products.precision", lambda dtype: jax.lax.Precision.HIGHEST)
    with jax.default_matmul_precision(None):
        grouped.swiglu(*given(D, F, SIZES), jnp.asarray(SIZES))
    assert seen == ["highest"]
