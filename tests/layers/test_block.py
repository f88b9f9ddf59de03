# SPDX-License-Identifier: Apache-2.0
"""One block against numpy; and the stack: however it is executed, the same numbers from the same stored weights.

Layers of several kinds differ here in how far they see.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers.attention.attention import Attention, attend, through_cache
from layers.attention.rotary import rotary_angles, rotary_frequencies
from layers.block import REMAT, Block, Stack, unstack
from layers.mlp import SwiGLU
from layers.normalization import RMSNorm
from tests.layers import references
from tests.support import assert_close, random_weights, relative_error

L, B, T, D, N, K, H, F = 5, 3, 31, 20, 6, 2, 4, 40
EPSILON, THETA = 1e-3, 100.0
POSITIONS = np.broadcast_to(np.arange(T), (B, T))
MASKS = [np.broadcast_to(np.tril(np.triu(np.ones((T, T), bool), -reach)), (B, T, T)) for reach in (T, 2)]
ROPE = references.rotary_frequencies(H, THETA)


def attends(mask):
    """Return the arguments of a block that describe its attention."""
    return functools.partial(through_cache, attend, mask_BTS=mask, score_cap=4.0)


def make_block(rngs, dropout_rate: float = 0.0):
    both = dict(embed_dim=D, quantization="none", out_scale=0.4, rngs=rngs)
    attention = Attention(
        num_heads=N, num_kv_heads=K, head_dim=H, qk_norm=False, epsilon=EPSILON, biases="none", **both
    )
    norm = functools.partial(RMSNorm, D, epsilon=EPSILON)
    return Block(norm, attention, SwiGLU(mlp_dim=F, biased=False, **both), dropout_rate=dropout_rate)


def make_stack(scan: bool = True, remat: str = "none", dropout_rate: float = 0.0):
    make = functools.partial(make_block, dropout_rate=dropout_rate)
    return Stack(make, num_layers=L, scan=scan, remat=remat, rngs=nnx.Rngs(0))


@functools.cache
def differentiated(scan: bool, remat: str, kinds: int = 1, dropout_rate: float = 0.0):
    """Return ((sum, stream), gradients by the weights and the input) of a stack, and its temporary memory in bytes."""
    graph, state = nnx.split(nnx.eval_shape(lambda: make_stack(scan, remat, dropout_rate)))
    weights = random_weights(nnx.to_pure_dict(state))
    x = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)

    def loss(weights, x, positions, masks):
        angles = rotary_angles(positions, *rotary_frequencies(H, THETA))
        key = jax.random.key(5) if dropout_rate else None
        contexts = [(angles, attends(mask), positions >= 0) for mask in masks]
        y, *_ = nnx.merge(graph, weights)(x, contexts, key=key)
        return jnp.sum(jnp.sin(y)), y

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))
    arguments = weights, x, POSITIONS, MASKS[:kinds]
    compiled = step.lower(*arguments).compile()
    return compiled(*arguments), compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("kinds", [1, 2])
def test_scanned_stack_equals_numpy_blocks_in_a_row(kinds):
    """Of 5 layers, 2 kinds leave one over that does not fill a group."""
    y = np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)
    weights = random_weights(nnx.to_pure_dict(nnx.state(nnx.eval_shape(make_stack))))["blocks"]
    for layer in range(L):
        w = jax.tree.map(lambda w: w[layer], weights)  # noqa: B023
        y = references.block(y, w, POSITIONS, MASKS[layer % kinds], ROPE, EPSILON, 4.0)
    assert_close(differentiated(True, "none", kinds)[0][0][1], y)


@pytest.mark.parametrize(
    ("scan", "remat", "kinds"),
    [*((True, remat, 1) for remat in REMAT), (True, "full", 2), (False, "none", 2)],
)  # fmt: skip
def test_loop_and_remat_change_no_number(scan, remat, kinds):
    assert_close(differentiated(scan, remat, kinds)[0], differentiated(True, "none", kinds)[0])


def test_loop_and_remat_drop_the_same_numbers():
    unrolled, scanned = (differentiated(*how, 1, 0.3)[0] for how in ((False, "full"), (True, "none")))
    assert_close(scanned, unrolled)
    assert relative_error(unrolled[0][1], differentiated(True, "none")[0][0][1]) > 0.1


def test_a_block_drops_a_part_of_what_each_sublayer_adds():
    rate, x = 0.3, np.random.default_rng(1).standard_normal((B, T, D)).astype(np.float32)
    angles = rotary_angles(POSITIONS, *rotary_frequencies(H, THETA))
    graph, state = nnx.split(nnx.eval_shape(lambda: make_block(nnx.Rngs(0), rate)))

    @jax.jit
    def added(weights, key):
        return nnx.merge(graph, weights)(x, angles, attends(MASKS[0]), POSITIONS >= 0, None, key)[0] - x

    for silent, active in (("mlp.down", "attention.out"), ("attention.out", "mlp.down")):
        weights = random_weights(nnx.to_pure_dict(state))
        sublayer, leaf = silent.split(".")
        weights[sublayer][leaf] *= 0
        full, dropped = (np.asarray(added(weights, key)) for key in (None, jax.random.key(0)))
        kept = dropped != 0
        assert abs(kept.mean() - (1 - rate)) < 4 * (rate * (1 - rate) / x.size) ** 0.5, active
        np.testing.assert_allclose(dropped[kept], full[kept] / (1 - rate), rtol=1e-3, atol=1e-5)


def test_weights_are_stored_as_one_stack_however_they_are_executed():
    variants = [(True, "none"), (False, "none"), (True, "full"), (False, "dots")]
    first, *others = [nnx.to_pure_dict(nnx.state(nnx.eval_shape(lambda v=v: make_stack(*v)))) for v in variants]
    assert first["blocks"]["attention"]["query"].shape == (L, D, N, H)
    assert all(other == first for other in others)


def test_each_remat_policy_needs_less_memory_than_the_next():
    """By XLA's own count, and each by a margin, if an MLP is wider than queries and keys: F > (N + K) H."""
    policies = (*REMAT, "none")
    bytes_of = {remat: differentiated(True, remat)[1] for remat in policies}
    full, attention, dots, none = (bytes_of[remat] for remat in ("full", "attention", "dots", "none"))
    assert full < 0.95 * attention < 0.95**2 * dots < 0.95**3 * none, bytes_of
    assert sorted(policies, key=bytes_of.get) == list(policies), bytes_of


def test_remat_saves_memory_with_layers_of_several_kinds_too():
    full, none = (differentiated(True, remat, 2)[1] for remat in ("full", "none"))
    assert full < 0.6 * none, (full, none)


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
