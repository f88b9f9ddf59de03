# SPDX-License-Identifier: Apache-2.0
"""The embedding looks rows up and gives them unit variance."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.embeddings import Embedding, at_once, in_blocks, look_up
from tests.support import assert_close

V, D = 501, 64


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_embedding_is_the_row_times_the_root_of_the_width(dtype):
    layer = Embedding(vocab_size=V, embed_dim=D, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(0).integers(0, V, (3, 11))
    actual = layer(tokens, jnp.dtype(dtype))
    assert actual.dtype == dtype
    assert_close(actual, np.asarray(layer.embedding[...])[tokens] * D**0.5, dtype)


def test_tokens_enter_with_unit_variance():
    x = Embedding(vocab_size=V, embed_dim=D, rngs=nnx.Rngs(0))(np.arange(V)[None], jnp.float32)
    assert abs(float(jnp.mean(x**2)) - 1) < 0.03  # 32,064 samples: 0.03 is four standard deviations


@pytest.mark.parametrize("added", [at_once, in_blocks])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradient_of_a_frequent_id_is_its_sum(added, dtype):
    """3,000 ids in blocks of 1,024; most are equal. 64 ids fill no block."""
    rng = np.random.default_rng(0)
    for size in (64, 3000):
        ids = np.minimum(rng.zipf(1.2, size), V) - 1
        gradient = jnp.asarray(rng.normal(0.3, 1, (size, D)), dtype)
        expected = np.zeros((V, D))
        np.add.at(expected, ids, np.asarray(gradient, np.float64))
        actual = added(gradient, ids, V)
        assert actual.dtype == jnp.float32
        np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-4)  # sums of up to 3,000 in float32


def test_gradient_of_the_embedding_loses_nothing_in_bfloat16():
    """In bfloat16, a sum of 4,000 ones stops at 256."""
    ids = np.zeros((8, 500), np.int32)
    table_VD = jnp.zeros((V, D), "bfloat16")
    gradient = jax.grad(lambda table_VD: look_up(table_VD, ids).astype(jnp.float32).sum())(table_VD)
    assert gradient.dtype == jnp.bfloat16
    assert_close(gradient[0], np.full(D, 4000.0), "bfloat16")
    assert not np.any(gradient[1:])


def test_a_gradient_of_the_gradient_loses_nothing_in_bfloat16():
    """As in MAML. The sum of |row|^2 / 2 over 4,000 equal ids has the second derivative 4,000."""
    ids, along = np.zeros((8, 500), np.int32), jnp.ones(D)
    table_VD = jnp.ones((V, D), "bfloat16")

    def first_row(table_VD):
        gradient = jax.grad(lambda table_VD: 0.5 * jnp.square(look_up(table_VD, ids)).astype(jnp.float32).sum())
        return (gradient(table_VD)[0].astype(jnp.float32) * along).sum()

    assert_close(jax.jit(jax.grad(first_row))(table_VD)[0], np.full(D, 4000.0), "bfloat16")


@pytest.mark.parametrize("ids", [[], [-1, 3, -1, V - 1], [V, 2, V + 5]])
def test_ids_that_do_not_exist_or_are_negative_count_as_when_indexing(ids):
    ids = jnp.asarray(ids, jnp.int32)
    gradient = jnp.ones((len(ids), D))
    np.testing.assert_array_equal(in_blocks(gradient, ids, V), at_once(gradient, ids, V))


def test_the_derivative_of_a_sum_in_blocks_is_a_look_up():
    """As in MAML: JAX's derivative of writes to equal rows would hold masks of the whole table."""
    ids = jnp.asarray([1, 4, 1], jnp.int32)
    cotangent = jnp.asarray(np.random.default_rng(0).normal(size=(V, D)), jnp.float32)
    _, pull = jax.vjp(lambda gradient: in_blocks(gradient, ids, V), jnp.zeros((3, D), jnp.bfloat16))
    np.testing.assert_array_equal(pull(cotangent)[0], cotangent[ids].astype(jnp.bfloat16))
