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
from tests.support import assert_close, random_weights

L, B, T, D, N, K, H, F = 4, 3, 31, 20, 6, 2, 8, 28
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


@functools.cache
def differentiated(scan: bool, remat: str):
    """Return ((sum, stream), gradients by the weights and the input) of a stack, and its temporary memory in bytes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make_stack(scan, remat)))
    weights = random_weights(nnx.to_pure_dict(state))
    x = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)

    def loss(weights, x, positions, mask):
        y, _ = nnx.merge(graph, weights)(x, rotary_angles(positions, H, THETA), mask)
        return jnp.sum(jnp.sin(y)), y

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    compiled = step.lower(weights, x, POSITIONS, MASK).compile()
    return compiled(weights, x, POSITIONS, MASK), compiled.memory_analysis().temp_size_in_bytes


def test_scanned_stack_equals_numpy_blocks_in_a_row():
    y = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)
    weights = random_weights(nnx.to_pure_dict(nnx.state(nnx.eval_shape(make_stack))))["blocks"]
    for layer in range(L):
        y = references.block(y, jax.tree.map(lambda w: w[layer], weights), POSITIONS, MASK, THETA, EPSILON, 4.0)  # noqa: B023
    assert_close(differentiated(True, "none")[0][0][1], y)


@pytest.mark.parametrize(
    ("scan", "remat"),
    [(True, "dots"), (True, "attention"), (True, "full"), (False, "none"), (False, "full")],
)
def test_loop_and_remat_change_no_number(scan, remat):
    assert_close(differentiated(scan, remat)[0], differentiated(True, "none")[0])


def test_weights_are_stored_as_one_stack_however_they_are_executed():
    variants = [(True, "none"), (False, "none"), (True, "full"), (False, "dots")]
    first, *others = [nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda v=v: make_stack(*v)))) for v in variants]
    assert first["blocks"]["attention"]["query"].shape == (L, D, N, H)
    assert all(other == first for other in others)


def test_each_remat_policy_needs_less_memory_than_the_next():
    """By XLA's own count, and each by a margin."""
    full, attention, dots, none = (differentiated(True, remat)[1] for remat in ("full", "attention", "dots", "none"))
    assert full < 0.95 * attention < 0.95**2 * dots < 0.95**3 * none, (full, attention, dots, none)


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
