# SPDX-License-Identifier: Apache-2.0
"""Attention against numpy, in every combination that a model can ask for."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.attention.attention import Attention, attend, attention_mask, extend, soft_cap, through_cache
from layers.attention.rotary import rotary_angles, rotary_frequencies
from tests.layers import references
from tests.support import assert_close

B, T, S, D, N, K, H = 3, 11, 13, 20, 6, 2, 8


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H)
    q, k, v = (jnp.asarray(3 * rng.standard_normal(shape), dtype) for shape in shapes)
    mask = rng.random((B, T, S)) < 0.6
    mask[..., 0] = True  # every query sees something
    return q, k, v, mask


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("score_cap", [0.0, 2.0])
def test_attend_equals_the_formula(dtype, score_cap):
    q, k, v, mask = inputs(dtype)
    actual = jax.jit(attend, static_argnames="score_cap")(q, k, v, mask, score_cap=score_cap)
    exact = [np.asarray(x, np.float64) for x in (q, k, v)]
    assert actual.dtype == dtype
    assert_close(actual, references.attention(*exact, mask, score_cap), dtype)


def test_a_query_that_sees_nothing_stays_finite_forward_and_backward():
    q, k, v, mask = inputs()
    mask[0, 0] = False
    value, gradients = jax.jit(jax.value_and_grad(lambda *qkv: attend(*qkv, mask).sum(), argnums=(0, 1, 2)))(q, k, v)
    assert all(np.isfinite(x).all() for x in (value, *gradients))


@pytest.mark.parametrize("window", [0, 1, 3])
def test_mask_is_causal_within_a_document_and_a_window(window):
    segments = np.array([[1] * 5 + [2] * 4 + [0] * 2, [1] * 2 + [2] * 9])
    positions = np.array([[*range(5), *range(4), 0, 0], [*range(2), *range(9)]])
    queries = slice(4, 9)
    args = segments[:, queries], segments, positions[:, queries], positions
    expected = references.mask(*args, window)
    np.testing.assert_array_equal(attention_mask(*args, window), expected)
    assert expected.any(-1).all() and not expected.all()


def test_soft_cap_bounds_and_is_off_at_zero():
    x = jnp.linspace(-50.0, 50.0, 101)
    assert_close(soft_cap(x, 7.0), 7 * np.tanh(np.asarray(x) / 7))
    assert soft_cap(x, 0.0) is x


def make_layer(qk_norm: bool, biases: str) -> Attention:
    return Attention(
        embed_dim=D, num_heads=N, num_kv_heads=K, head_dim=H, qk_norm=qk_norm, epsilon=1e-3, biases=biases,
        quantization="none", out_scale=0.5, rngs=nnx.Rngs(0),
    )  # fmt: skip


@pytest.mark.parametrize(("qk_norm", "biases"), [(False, "none"), (True, "none"), (False, "qkv"), (True, "all")])
def test_layer_equals_the_formula(qk_norm, biases):
    layer = make_layer(qk_norm, biases)
    rng = np.random.default_rng(1)
    weights = jax.tree.map(lambda w: rng.standard_normal(w.shape), nnx.to_pure_dict(nnx.state(layer)))
    nnx.update(layer, jax.tree.map(np.float32, weights))
    x, positions = rng.standard_normal((B, T, D)), rng.integers(0, 50, (B, T))
    mask = np.tril(np.ones((B, T, T), bool))
    angles = rotary_angles(positions, *rotary_frequencies(H, 100.0))
    attends = functools.partial(through_cache, attend, mask_BTS=mask, score_cap=5.0)
    actual, cache = jax.jit(lambda x: layer(x, angles, attends, None))(jnp.float32(x))
    assert cache is None
    rope = references.rotary_frequencies(H, 100.0)
    assert_close(actual, references.attention_layer(x, weights, positions, mask, rope, 1e-3, 5.0))


@pytest.mark.parametrize(
    ("biases", "shapes"),
    [
        ("none", {}),
        ("qkv", {"query_bias": (N, H), "key_bias": (K, H), "value_bias": (K, H)}),
        ("all", {"query_bias": (N, H), "key_bias": (K, H), "value_bias": (K, H), "out_bias": (D,)}),
    ],
)
def test_biases_start_at_zero_and_only_where_asked_for(biases, shapes):
    weights = nnx.to_pure_dict(nnx.state(make_layer(False, biases)))
    assert {name: weight.shape for name, weight in weights.items() if name.endswith("bias")} == shapes
    assert not any(np.asarray(weights[name]).any() for name in shapes)


def test_extend_writes_each_row_at_its_own_start_and_leaves_the_rest():
    rng, starts = np.random.default_rng(2), (5, 0, S - 4)
    old, k, v = (rng.standard_normal((B, length, K, H)).astype(np.float32) for length in (S, 4, 4))
    cached = jnp.swapaxes(old, 1, 2)
    cache = {"key": cached, "value": -cached, "start": jnp.array(starts)}
    keys, values, cache = extend(cache, k, v)
    expected = old.copy(), -old
    for row, start in enumerate(starts):
        expected[0][row, start : start + 4], expected[1][row, start : start + 4] = k[row], v[row]
    np.testing.assert_array_equal(keys, expected[0])
    np.testing.assert_array_equal(values, expected[1])
    np.testing.assert_array_equal(cache["key"], jnp.swapaxes(keys, 1, 2))
    np.testing.assert_array_equal(cache["value"], jnp.swapaxes(values, 1, 2))
