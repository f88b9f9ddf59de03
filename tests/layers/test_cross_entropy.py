# SPDX-License-Identifier: Apache-2.0
"""The chunked cross-entropy equals the plain one, value and gradients, and never holds all the logits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from layers.cross_entropy import cross_entropy, log_probabilities
from tests.support import assert_close

B, T, D, V = 3, 12, 20, 37


def inputs(dtype=jnp.float32):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((B, T, D)), dtype)
    head = jnp.float32(rng.standard_normal((D, V)) / 2)
    weights = jnp.float32(rng.random((B, T)) * (rng.random((B, T)) < 0.7))
    return x, head, rng.integers(0, V, (B, T)), weights


def plain(x, head, targets, weights, z_loss, cap):
    """Return sum of weight * (-log softmax(logits)[target] + z_loss * log(Z)^2), and it without the z-loss."""
    logits = x @ head
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    log_z = jnp.log(jnp.exp(logits).sum(-1))
    loss = log_z - jnp.sum(logits * (targets[..., None] == jnp.arange(V)), axis=-1)
    return jnp.sum(weights * (loss + z_loss * log_z**2)), jnp.sum(weights * loss)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("num_chunks", "z_loss", "cap"), [(1, 0.0, 0.0), (3, 0.1, 0.0), (4, 0.1, 3.0), (12, 0.0, 3.0)])
def test_value_and_gradients_equal_the_plain_form(dtype, num_chunks, z_loss, cap):
    x, head, targets, weights = inputs(dtype)

    def chunked(x, head):
        total, loss = cross_entropy(x, head, targets, weights, num_chunks, z_loss, cap)
        return 2.5 * total, (total, loss)

    def reference(x, head):
        total, loss = plain(x, head, targets, weights, z_loss, cap)
        return 2.5 * total, (total, loss)

    differentiate = [jax.jit(jax.value_and_grad(f, argnums=(0, 1), has_aux=True)) for f in (chunked, reference)]
    exact = x.astype(jnp.float32), head.astype(dtype).astype(jnp.float32)
    actual, expected = differentiate[0](x, head), differentiate[1](*exact)
    assert actual[1][0].dtype == dtype and actual[1][1].dtype == jnp.float32
    assert_close(actual, expected, dtype)
    undifferentiated = jax.jit(cross_entropy, static_argnums=(4, 5, 6))(
        x, head, targets, weights, num_chunks, z_loss, cap
    )
    assert_close(undifferentiated, actual[0][1])


def test_a_token_without_weight_has_no_influence():
    x, head, targets, weights = inputs()
    gradient = jax.jit(jax.grad(lambda x: cross_entropy(x, head, targets, weights, 3, 0.1)[0]))(x)
    np.testing.assert_array_equal(np.abs(gradient).sum(-1) > 0, weights > 0)


@pytest.mark.parametrize("ignored", [-1, -100])
def test_a_target_below_0_has_no_influence_whatever_it_is(ignored):
    """-100 is that of PyTorch, and less than -V."""
    x, head, targets, weights = inputs()
    masked = np.where(weights > 0, targets, ignored)
    assert_close(cross_entropy(x, head, masked, weights, 3)[0], cross_entropy(x, head, targets, weights, 3)[0])


def test_large_logits_do_not_overflow():
    x, head, targets, weights = inputs()
    value, gradients = jax.jit(
        jax.value_and_grad(lambda x, head: cross_entropy(x, head, targets, weights, 3)[0], argnums=(0, 1))
    )(1e4 * x, head)
    assert all(np.isfinite(leaf).all() for leaf in (value, *gradients))


def test_temporary_memory_is_that_of_a_chunk():
    """Plainly, the float32 logits of 4 x 64 tokens over 4,096 words are 4 MiB, forward and backward."""
    shape = jax.ShapeDtypeStruct
    batch, length, width, vocabulary = 4, 64, 8, 4096
    logits_bytes = 4 * batch * length * vocabulary
    arguments = (
        shape((batch, length, width), jnp.float32), shape((width, vocabulary), jnp.float32),
        shape((batch, length), jnp.int32), shape((batch, length), jnp.float32),
    )  # fmt: skip

    def temporary_bytes(num_chunks):
        def loss(x, head, targets, weights):
            return cross_entropy(x, head, targets, weights, num_chunks)[0]

        compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*arguments).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    whole, quarter, sixteenth = (temporary_bytes(chunks) for chunks in (1, 4, 16))
    assert whole > logits_bytes
    assert quarter < logits_bytes / 1.5
    assert sixteenth < logits_bytes / 4


@pytest.mark.parametrize(("num_chunks", "cap"), [(1, 0.0), (4, 3.0)])
def test_log_probabilities_of_tokens_equal_the_plain_form_and_so_do_their_gradients(num_chunks, cap):
    x, head, targets, weights = inputs()
    targets = np.where(weights > 0, targets, -1)

    def chunked(x, head):
        return jnp.sum(weights * log_probabilities(x, head, targets, num_chunks, cap))

    def reference(x, head):
        return -plain(x, head, targets, weights, 0.0, cap)[1]

    actual, expected = (jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, head) for f in (chunked, reference))
    assert_close(actual, expected)
    assert not log_probabilities(x, head, targets, num_chunks, cap)[targets < 0].any()


def test_gradients_of_chunks_are_added_in_float32():
    """In bfloat16, a sum over 256 chunks is off by 2 %; a head in bfloat16 is what FSDP all-gathers."""
    rng = np.random.default_rng(0)
    x, head = (jnp.asarray(rng.normal(0.5, 1, shape), jnp.bfloat16) for shape in ((1, 1024, 16), (16, 32)))
    targets = rng.integers(0, 32, (1, 1024))
    of_head = jax.grad(lambda head, chunks: log_probabilities(x, head, targets, chunks).sum())
    whole, chunked = (np.asarray(of_head(head, chunks), np.float64) for chunks in (1, 256))
    assert np.linalg.norm(chunked - whole) < 0.01 * np.linalg.norm(whole)


def test_the_temperature_divides_capped_logits():
    """As decoding does; else the ratio of probabilities in GRPO would not be 1 for fresh answers of a capped model."""
    x, head, targets, _ = inputs()
    logits = 3.0 * jnp.tanh(x @ head / 3.0) / 0.5
    wanted = np.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)[..., 0]
    assert_close(log_probabilities(x, head, targets, 4, 3.0, 0.5), wanted)
