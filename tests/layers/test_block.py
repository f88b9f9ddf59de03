# SPDX-License-Identifier: Apache-2.0
"""One block against numpy; and the stack: however it is executed, the same numbers from the same stored weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.block import Block, Stack, unstack
from layers.rotary import rotary_angles
from tests.layers import references
from tests.support import assert_close

L, B, T, D, N, K, H, F = 3, 2, 11, 20, 6, 2, 8, 28
EPSILON, THETA = 1e-3, 100.0
POSITIONS = np.broadcast_to(np.arange(T), (B, T))
MASK = np.tril(np.ones((B, T, T), bool))


def make_block(rngs):
    return Block(
        embed_dim=D, num_heads=N, num_kv_heads=K, head_dim=H, mlp_dim=F, qk_norm=True, epsilon=EPSILON,
        score_cap=4.0, out_scale=0.4, rngs=rngs,
    )  # fmt: skip


def make_stack(scan: bool = True, remat: str = "none"):
    return Stack(make_block, num_layers=L, scan=scan, remat=remat, rngs=nnx.Rngs(0))


def random_weights(module, seed: int) -> dict:
    rng = np.random.default_rng(seed)
    state = nnx.to_pure_dict(nnx.state(module))
    return jax.tree.map(lambda w: rng.standard_normal(w.shape).astype(np.float32) / 3, state)


@functools.cache
def stream_and_gradients(scan: bool, remat: str):
    """Return (what the stack makes of an input, the gradients by its weights and by the input)."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make_stack(scan, remat)))
    weights = random_weights(nnx.merge(graph, state), seed=0)
    x = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)

    def loss(weights, x):
        y, _ = nnx.merge(graph, weights)(x, rotary_angles(POSITIONS, H, THETA), MASK)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(weights, x)


def test_scanned_stack_equals_numpy_blocks_in_a_row():
    y = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)
    weights = random_weights(nnx.eval_shape(make_stack), seed=0)["blocks"]
    for layer in range(L):
        y = references.block(y, jax.tree.map(lambda w: w[layer], weights), POSITIONS, MASK, THETA, EPSILON, 4.0)  # noqa: B023
    assert_close(stream_and_gradients(True, "none")[0][1], y)


@pytest.mark.parametrize(
    ("scan", "remat"),
    [(True, "dots"), (True, "attention"), (True, "full"), (False, "none"), (False, "full")],
)
def test_loop_and_remat_change_no_number(scan, remat):
    assert_close(stream_and_gradients(scan, remat), stream_and_gradients(True, "none"))


def test_weights_are_stored_as_one_stack_however_they_are_executed():
    variants = [make_stack(scan, remat) for scan, remat in [(True, "none"), (False, "none"), (True, "full")]]
    first, *others = [nnx.to_pure_dict(nnx.state(stack)) for stack in variants]
    assert first["blocks"]["attention"]["query"].shape == (L, D, N, H)
    for other in others:
        jax.tree.map(np.testing.assert_array_equal, first, other)
    query = first["blocks"]["attention"]["query"]
    assert not np.array_equal(query[0], query[1]), "layers begin alike"


def test_each_remat_policy_needs_less_memory_than_the_next():
    """By XLA's own count; ten layers, so that what is kept outweighs the work of one."""

    def temporary_bytes(remat):
        graph, state = nnx.split(
            nnx.eval_shape(lambda: Stack(make_block, num_layers=10, scan=True, remat=remat, rngs=nnx.Rngs(0)))
        )
        positions, mask = np.broadcast_to(np.arange(32), (4, 32)), np.ones((4, 32, 32), bool)

        def loss(weights, x):
            return jnp.sum(nnx.merge(graph, weights)(x, rotary_angles(positions, H, THETA), mask)[0])

        x = jax.ShapeDtypeStruct((4, 32, D), jnp.float32)
        compiled = jax.jit(jax.grad(loss)).lower(nnx.to_pure_dict(state), x).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    full, attention, dots, none = (temporary_bytes(remat) for remat in ("full", "attention", "dots", "none"))
    assert full < 0.9 * attention < 0.9**2 * dots < 0.9**3 * none


def test_unstack_splits_and_its_gradient_stacks():
    tree = {"a": jnp.arange(6.0).reshape(3, 2), "b": jnp.arange(3.0)}
    for index, part in enumerate(unstack(tree, 3)):
        jax.tree.map(np.testing.assert_array_equal, part, jax.tree.map(lambda x: x[index], tree))  # noqa: B023

    def weighted(tree):
        parts = unstack(tree, 3)
        return sum(
            factor * (part["a"].sum() + part["b"] ** 2) for factor, part in zip((2.0, 3.0, 5.0), parts, strict=True)
        )

    gradient = jax.jit(jax.grad(weighted))(tree)
    np.testing.assert_array_equal(gradient["a"], [[2, 2], [3, 3], [5, 5]])
    np.testing.assert_array_equal(gradient["b"], [0, 6, 20])
