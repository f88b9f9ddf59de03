# SPDX-License-Identifier: Apache-2.0
"""The TPU kernel that decodes, interpreted on CPU, against the reference, and a whole batch of requests with it.

It sums in another order, so float32's tolerance holds. What it writes into a cache is equal bit by bit.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from configs import base
from inference.batching import Batch, Request
from inference.choice import Sampling
from inference.engine import Engine
from layers.attention import decode_kernels
from layers.attention.attention import attend, attention_mask, through_cache, write_rows
from models import decoder_lm
from parallelism.mesh import make_mesh, mesh_context
from tests.support import TOLERANCE, make_model, model_config, relative_error

B, K, H = 4, 2, 128
EIGHT = {"data": 2, "fsdp": 2, "model": 2}
ENDS = (0, 5, 299, 303)  # numbers of entries in the rows: none, some, almost all


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Run the kernel's program as plain XLA, in blocks of 128 keys."""
    monkeypatch.setattr(
        decode_kernels.pl, "pallas_call", functools.partial(decode_kernels.pl.pallas_call, interpret=True)
    )
    monkeypatch.setattr(decode_kernels.pltpu, "with_memory_space_constraint", lambda x, _: x)
    monkeypatch.setattr(decode_kernels, "BLOCK_BYTES", 1)


def mesh(**axes):
    devices = jax.devices()[: math.prod(axes.values())]
    return mesh_context(make_mesh(dict.fromkeys(base.MESH_AXES, 1) | axes, devices))


def inputs(groups: int, length: int, dtype=jnp.float32):
    """Return (queries, new keys and values, a layer's cache whose rows have `ENDS` entries)."""
    rng = np.random.default_rng(0)

    def draw(*shape):
        return rng.standard_normal(shape).astype(dtype)

    cache = {"key": draw(B, K, length, H), "value": draw(B, K, length, H), "start": np.array(ENDS)}
    return 2 * draw(B, 1, K * groups, H), draw(B, 1, K, H), draw(B, 1, K, H), cache


def mask_of(length: int, window: int, *, is_token=(1, 1, 1, 1)):
    """Return what each row sees: its own document, which has begun at its third entry, and the new token."""
    index = np.arange(length)[None]
    start, token = np.array(ENDS)[:, None], np.array(is_token)[:, None]
    segments = np.where(index < start, 1 + (index > 2) * (start > 3), 0)
    segment = np.where(start > 3, 2, 1) * token
    return attention_mask(
        segment, np.where(index == start, segment, segments), start, np.broadcast_to(index, (B, length)), window
    )  # fmt: skip


@pytest.mark.parametrize(
    ("groups", "length", "window", "cap", "dtype", "axes"),
    [
        (1, 304, 0, 0.0, "float32", {}),
        (3, 384, 0, 5.0, "float32", {}),
        (2, 304, 40, 0.0, "float32", EIGHT),
        (4, 304, 150, 0.0, "bfloat16", {}),
    ],
)
def test_the_kernel_equals_the_reference(groups, length, window, cap, dtype, axes):
    """Groups, windows, caps, blocks that end outside the cache, packed documents, rows without entries, a mesh."""
    q, k, v, cache = inputs(groups, length, dtype)
    mask = mask_of(length, window)
    with mesh(**axes):
        kernel = functools.partial(decode_kernels.extend_and_attend, mask_B1S=mask, score_cap=cap)
        actual, extended = jax.jit(kernel)(q, k, v, cache)
        actual, extended = jax.device_get((actual, extended))
    with mesh():
        reference = functools.partial(through_cache, attend, mask_BTS=mask, score_cap=cap)
        expected, wanted = jax.jit(reference)(q, k, v, cache)
    assert actual.dtype == expected.dtype
    for row in range(B):
        assert relative_error(actual[row], expected[row]) <= TOLERANCE[dtype], row
    for name, leaf in wanted.items():
        np.testing.assert_array_equal(np.float32(extended[name]), np.float32(leaf), err_msg=name)


def test_a_row_without_a_token_is_finite_and_a_full_row_keeps_its_earlier_entries():
    """A router's statistics include rows without a token, multiplied by 0."""
    q, k, v, cache = inputs(1, 304)
    mask = mask_of(304, 0, is_token=(0, 0, 0, 0))
    with mesh():
        actual, _ = decode_kernels.extend_and_attend(q, k, v, cache, mask_B1S=mask)
        _, extended = decode_kernels.extend_and_attend(q, k, v, cache | {"start": jnp.full(B, 400)}, mask_B1S=mask)
    assert np.isfinite(actual).all()
    np.testing.assert_array_equal(extended["key"][:, :, :303], cache["key"][:, :, :303])
    np.testing.assert_array_equal(extended["key"][:, :, 303], k[:, 0])


@pytest.mark.parametrize("start", [(0, 3, 6, 7), (8, 9, 1, 2)])
def test_entries_are_written_as_by_the_reference(start):
    rows, new = np.arange(28).reshape(4, 7), -np.arange(1, 5)[:, None]
    actual = decode_kernels.write_rows(rows, new, np.array(start))
    np.testing.assert_array_equal(actual, write_rows(jnp.asarray(rows), jnp.asarray(new), jnp.asarray(start)))


def test_it_serves_full_tiles_of_floats():
    with mesh(data=2):
        assert decode_kernels.serves(4, 304, head_dim=128, dtype=jnp.bfloat16)
        assert not decode_kernels.serves(3, 304, head_dim=128, dtype=jnp.bfloat16)  # rows that two devices share
        assert not decode_kernels.serves(4, 300, head_dim=128, dtype=jnp.bfloat16)
        assert not decode_kernels.serves(4, 304, head_dim=64, dtype=jnp.bfloat16)
        assert not decode_kernels.serves(4, 304, head_dim=128, dtype=jnp.int8)


@pytest.mark.slow
def test_a_batch_has_the_same_greedy_tokens_with_the_kernel(monkeypatch):
    """Layers with and without a window."""
    calls = []
    kernel = decode_kernels.extend_and_attend
    monkeypatch.setattr(decode_kernels, "extend_and_attend", lambda *a, **how: calls.append(1) or kernel(*a, **how))
    config = model_config(num_layers=2, head_dim=128, sliding_window=5, global_every=2, attention_soft_cap=9.0)
    graph, params = make_model(config, scan=False)
    make = functools.partial(decoder_lm.make, config, dtype=jnp.float32, scan=False, kernel="tpu")
    with_kernel = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))[0]
    rng = np.random.default_rng(0)
    asked = [Request(rng.integers(1, 37, size).tolist(), 6, Sampling(temperature=0.0)) for size in (1, 9, 14, 4)]

    def tokens(graph) -> list[list[int]]:
        batch = Batch(Engine(graph, params, 32), num_rows=3, vocab_size=37)
        return [one.tokens for one in batch.run(asked)]

    with mesh():
        expected = tokens(graph)
        assert not calls
        assert tokens(with_kernel) == expected
        assert len(calls) == 2
