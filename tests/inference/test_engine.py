# SPDX-License-Identifier: Apache-2.0
"""Rows that are prefilled, forked and extended have the logits of a full forward pass of each row's tokens."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from flax import nnx

from configs.errors import ConfigError
from inference.engine import NO_TOKEN, Engine, decodes, pad_rows
from layers.projection import Projection
from parallelism import axis_rules
from parallelism.mesh import make_mesh, mesh_context
from tests.support import assert_close, forward, make_model, model_config

V, LENGTH = 40, 24
PROMPTS = [[5, 9, 30, 2, 8], [11], [7, 7, 2, 19, 36, 4, 1]]
FORKS = np.array([0, 0, 2, 1, 0])
ENDINGS = [[3, 4, 5], [31], [], [12, 14, 16, 18], [2, 2]]  # one for each row of the fork
WINDOWS = {"sliding_window": 3, "global_every": 2, "qk_norm": True, "tie_embeddings": True}
EIGHT = {"dcn_data": 1, "data": 2, "fsdp": 2, "context": 1, "expert": 1, "model": 2}


@functools.cache
def engine(scan: bool = True, windows: bool = False) -> Engine:
    return Engine(*make_model(model_config(vocab_size=V, **(WINDOWS if windows else {})), scan=scan), LENGTH)


def full_forward(engine: Engine, row: list[int]) -> np.ndarray:
    """Return the logits [tokens, V] of a row without a cache."""
    tokens = np.array([row + [0] * (LENGTH - len(row))])
    index = np.arange(LENGTH)[None]
    batch = {"tokens": tokens, "positions": index, "segments": (index < len(row)).astype(np.int32)}
    return np.asarray(forward(engine.graph, engine.params, batch))[0, : len(row)]


def check_extended(engine: Engine, prefixes: list[list[int]], endings: list[list[int]], logits) -> None:
    """Assert logits of the endings; by TOLERANCE, as a cache changes only the length that sums are padded to."""
    for row, (prefix, ending) in enumerate(zip(prefixes, endings, strict=True)):
        if ending:
            assert_close(logits[row, : len(ending)], full_forward(engine, prefix + ending)[len(prefix) :])


@pytest.mark.parametrize(("scan", "windows"), [(True, False), (True, True), (False, False)])
def test_prefilled_forked_and_extended_rows_equal_full_forward_passes(scan, windows):
    one = engine(scan, windows)
    logits, cache = one.prefill(pad_rows(PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        assert_close(logits[row], full_forward(one, prompt)[-1])
    cache = one.fork(cache, FORKS)
    rows = [PROMPTS[fork] for fork in FORKS]
    logits, cache = one.extend(cache, pad_rows(ENDINGS))
    check_extended(one, rows, ENDINGS, logits)
    rows, last = [row + ending for row, ending in zip(rows, ENDINGS, strict=True)], [[1], [2], [3, 33, 6, 1], [], [5]]
    logits, cache = one.extend(cache, pad_rows(last))
    check_extended(one, rows, last, logits)
    assert cache.num_tokens_B.tolist() == [len(row) + len(more) for row, more in zip(rows, last, strict=True)]


@pytest.mark.parametrize(("scan", "windows"), [(True, False), (False, True)])
def test_layers_with_weights_of_their_own_give_the_same_logits(scan, windows):
    one = engine(scan, windows)
    separate = one.separate_layers()
    assert len(separate.params["stack"]["blocks"]["mlp"]["down"]) == len(separate.empty(1).of_model["each_layer"])
    logits, cache = separate.prefill(pad_rows(PROMPTS))
    assert_close(logits, one.prefill(pad_rows(PROMPTS))[0])
    logits, _ = separate.extend(separate.fork(cache, FORKS), pad_rows(ENDINGS))
    check_extended(one, [PROMPTS[fork] for fork in FORKS], ENDINGS, logits)


def test_a_cache_can_be_extended_twice_and_its_rows_are_independent():
    """As in a search: both calls continue the same prefixes."""
    one = engine()
    cache = one.fork(one.prefill(pad_rows(PROMPTS))[1], FORKS)
    first, _ = one.extend(cache, pad_rows(ENDINGS))
    other, _ = one.extend(cache, pad_rows([*ENDINGS[:-1], [9, 9]]))
    again, _ = one.extend(cache, pad_rows(ENDINGS))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first[:-1], other[:-1])
    assert (first[-1, 0] != other[-1, 0]).any()


def test_other_tokens_lengths_and_parameters_compile_nothing():
    """Neither in the engine's own programs, nor in a program that has an engine as an argument."""
    traced = []

    @jax.jit
    def scores(bound: Engine, prompts, endings, rows):
        traced.append(bound)
        cache = bound.fork(bound.prefill(prompts)[1], rows)
        return bound.extend(cache, endings)[0]

    def check(bound: Engine, prompts, endings, rows) -> list[int]:
        arrays = pad_rows(prompts), pad_rows(endings), rows
        logits = scores(bound, *arrays)
        check_extended(bound, [prompts[row] for row in rows], endings, logits)
        assert_close(bound.extend(bound.fork(bound.prefill(arrays[0])[1], rows), arrays[1])[0], logits)
        return [method._cache_size() for method in (Engine.prefill, Engine.extend, Engine.fork)]

    one = engine()
    compiled = check(one, PROMPTS, ENDINGS, FORKS)
    later = dataclasses.replace(one, params=jax.tree.map(lambda leaf: 1.5 * leaf, one.params))
    others = [[1, 2], [3] * 7, [4]], [[8], [9] * 4, [1], [], [2]], FORKS[::-1].copy()
    assert check(later, *others) == compiled and len(traced) == 1


def test_a_row_that_outgrows_the_cache_has_no_logits_from_then_on():
    one = engine()
    cache = one.fork(one.prefill(pad_rows(PROMPTS))[1], FORKS)
    for num_calls in range(1, 7):  # row 2 gets 4 tokens a call after its 7, the others get one after at most 5
        logits, cache = one.extend(cache, pad_rows([[3], [4], [5] * 4, [6], [7]]))
        assert np.isnan(logits[2]).any() == np.isnan(logits[2]).all() == (7 + 4 * num_calls > LENGTH)
        assert np.isfinite(logits[:2]).all() and np.isfinite(logits[3:]).all()
    check_extended(one, [[*PROMPTS[1], *[6] * 5]], [[6]], logits[3:])
    for too_long in (one.prefill, lambda tokens: one.extend(cache, tokens)):
        with pytest.raises(ValueError, match=f"rows of {LENGTH + 1} tokens do not fit .* length={LENGTH}"):
            too_long(np.ones((5, LENGTH + 1), np.int32))


def test_a_row_may_fill_the_cache_to_its_last_place():
    logits, cache = engine().prefill(np.ones((1, LENGTH), np.int32))
    assert np.isfinite(logits).all() and cache.num_tokens_B == LENGTH


def test_no_row_is_shortened_to_more_tokens_than_it_has():
    """What lies after its last token is padding, or of an earlier request."""
    _, cache = engine().prefill(pad_rows(PROMPTS))
    np.testing.assert_array_equal(engine().shorten(cache, np.array([9, 0, 3])).num_tokens_B, [5, 0, 3])


def test_eight_devices_decode_as_one_does():
    one = engine()
    prompts, endings = pad_rows(PROMPTS * 4)[:8], np.arange(16, dtype=np.int32).reshape(8, 2)
    _, cache = one.prefill(prompts)
    expected, _ = one.extend(cache, endings)
    with mesh_context(make_mesh(EIGHT)) as mesh:
        prompts, endings = jax.device_put((prompts, endings), axis_rules.batch_sharding(mesh, 2))
        _, cache = one.prefill(prompts)
        assert_close(one.extend(cache, endings)[0], expected)


def test_weights_may_be_an_array_for_each_layer():
    one = engine(scan=False)
    params = dict(one.params)
    params["stack"] = jax.tree.map(tuple, params["stack"])
    actual, expected = (each.prefill(pad_rows(PROMPTS))[0] for each in (dataclasses.replace(one, params=params), one))
    np.testing.assert_array_equal(actual, expected)


def test_an_int8_cache_changes_logits_by_its_rounding():
    """A scale for each token and head: an entry is rounded by at most 1/254 of the largest of its head."""
    exact = engine(scan=False)
    rounded = dataclasses.replace(exact, cache_dtype="int8")
    found = []
    for one in (exact, rounded):
        _, cache = one.prefill(pad_rows(PROMPTS))
        found.append(np.asarray(one.extend(cache, pad_rows([[3, 4], [9, 8], [2, 2]]))[0]))
        kept = {str(leaf.dtype): leaf.nbytes for leaf in jax.tree.leaves(cache.of_model["each_layer"])}
    assert set(kept) == {"int8", "float32"}
    difference = np.abs(found[0] - found[1]).max()
    assert 0 < difference < 0.05 * found[0].std()  # 0.025; large random weights amplify it from layer to layer


def test_rows_are_padded_after_their_tokens():
    np.testing.assert_array_equal(pad_rows([[5], [], [7, 8]]), [[5, NO_TOKEN], [NO_TOKEN] * 2, [7, 8]])
    assert pad_rows([[5]]).dtype == np.int32


def test_a_model_without_a_cache_decodes_nothing():
    """As one that was added: its run trains and is scored, and its summary has no sample."""
    graph, params = nnx.split(Projection(in_dim=2, out_dim=3, rngs=nnx.Rngs(0)))
    assert decodes(engine().graph) and not decodes(graph)
    with pytest.raises(ConfigError, match=r"^Projection has no empty_cache, so it generates nothing"):
        Engine(graph, nnx.to_pure_dict(params), LENGTH).separate_layers().empty(1)
