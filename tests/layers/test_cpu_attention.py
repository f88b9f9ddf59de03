# SPDX-License-Identifier: Apache-2.0
"""Attention in parts of the length against the reference: values and gradients, packed, windowed, capped, grouped."""

import functools

import jax
import jax.numpy as jnp
import pytest

from configs import base
from core import assembly
from layers.attention import cpu_attention
from layers.attention.attention import attend, attention_mask
from parallelism.mesh import mesh_context
from tests.layers.test_kernels import inputs, mesh
from tests.support import assert_close

KINDS = {
    "plain": {}, "window within a part": {"sliding_window": 20}, "window over parts": {"sliding_window": 100},
    "cap": {"score_cap": 5.0}, "window and cap": {"sliding_window": 70, "score_cap": 2.0},
}  # fmt: skip
ROWS = [[100, 156], [130, 50], [256], [1, 200, 30]]


@functools.partial(jax.jit, static_argnames=("in_parts", "sliding_window", "score_cap"))
def differentiated(qkv, dy, batch, in_parts: bool, sliding_window: int = 0, score_cap: float = 0.0):
    """Return what is attended where there is a token, and the gradients by q, k and v."""
    segments, positions = batch["segments"], batch["positions"]
    if in_parts:
        how = dict(segments_BT=segments, sliding_window=sliding_window)
        attends = functools.partial(cpu_attention.attend, **how, score_cap=score_cap)
    else:
        mask_BTS = attention_mask(segments, segments, positions, positions, sliding_window)
        attends = functools.partial(attend, mask_BTS=mask_BTS, score_cap=score_cap)
    y, pull = jax.vjp(attends, *qkv)
    return y * (segments > 0)[:, :, None, None], pull(dy)


@pytest.mark.parametrize("kind", KINDS)
def test_parts_equal_the_reference_on_packed_documents(kind):
    arguments = inputs(ROWS, 256, 16)
    with mesh():
        actual, expected = (differentiated(*arguments, in_parts, **KINDS[kind]) for in_parts in (True, False))
    assert_close(actual, expected)


def test_bfloat16_is_as_near_to_the_exact_values_as_bfloat16_is():
    qkv, dy, batch = inputs([[100, 90]], 256, 64)
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (qkv, dy))
    with mesh():
        actual = differentiated(*rounded, batch, True)
        assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(actual))
        assert_close(actual, differentiated(qkv, dy, batch, False), "bfloat16")


def test_a_part_meets_no_key_after_it():
    """The program's products have 5 of 8 of the scores."""
    qkv, _, batch = inputs(ROWS, 256, 16)
    with mesh():
        program = jax.make_jaxpr(lambda *qkv: cpu_attention.attend(*qkv, segments_BT=batch["segments"]))(*qkv)
    (whole,) = [equation.params["jaxpr"] for equation in program.eqns if "jaxpr" in equation.params]
    scores = [equation.outvars[0].aval.size for equation in whole.eqns if equation.primitive.name == "exp"]
    rows, heads = len(ROWS), qkv[0].shape[2]
    assert sum(scores) == rows * heads * 256 * 256 * 5 // 8


@pytest.mark.parametrize(
    ("devices", "length", "attention", "used"),
    [(1, 256, "auto", True), (1, 256, "reference", False), (1, 64, "auto", False), (8, 256, "auto", False)],
)
def test_a_run_on_one_cpu_device_attends_in_parts(monkeypatch, devices, length, attention, used):
    calls = []
    monkeypatch.setattr(cpu_attention, "_attend", lambda q, *unused: calls.append(q) or q)
    config = base.get_config()
    config.model.update(dict(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=32))
    config.model.attention = attention
    config.train.update(dict(global_batch=8, sequence_length=length, steps=4))
    config.mesh.data = devices
    run = assembly.assemble(config, devices=jax.devices()[:devices])
    with mesh_context(run.mesh):
        jax.make_jaxpr(run.eval_step)(run.abstract_state.params, run.abstract_batch)
    assert bool(calls) == used
