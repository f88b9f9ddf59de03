# SPDX-License-Identifier: Apache-2.0
"""Requests that enter and leave a batch have the tokens that they have alone, and share what they have in common."""

import dataclasses
import functools
import time
import types

import jax
import numpy as np
import pytest

from inference import batching, rows
from inference.batching import Batch, Request
from inference.choice import Sampling
from inference.engine import Engine
from parallelism.mesh import make_mesh, mesh_context
from tests.support import compilations, forward, make_model, model_config

V, LENGTH = 40, 96
GREEDY = Sampling(temperature=0.0)
EIGHT = {"dcn_data": 1, "data": 2, "fsdp": 2, "context": 1, "expert": 1, "model": 2}
WINDOWS = {"sliding_window": 3, "global_every": 2, "qk_norm": True, "tie_embeddings": True}


@functools.cache
def engine(scan: bool = False, windows: bool = False) -> Engine:
    return Engine(*make_model(model_config(vocab_size=V, **(WINDOWS if windows else {})), scan=scan), LENGTH)


def batch_of(num_rows: int, one: Engine | None = None) -> Batch:
    return Batch(one or engine(), num_rows=num_rows, vocab_size=V)


def prompts(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(1, V, length).tolist() for length in lengths]


def alone(prompt: list[int], num_tokens: int, one: Engine | None = None) -> tuple[list[int], list[float]]:
    """Return the greedy tokens and their log-probabilities by a full forward pass for each token."""
    one, text, log_probs = one or engine(), list(prompt), []
    for _ in range(num_tokens):
        padded = np.array([text + [0] * (LENGTH - len(text))])
        index = np.arange(LENGTH)[None]
        batch = {"tokens": padded, "positions": index, "segments": (index < len(text)).astype(np.int32)}
        logits = np.asarray(forward(one.graph, one.params, batch)[0, len(text) - 1])
        text.append(int(logits.argmax()))
        log_probs.append(float(logits.max() - np.log(np.exp(logits).sum())))
    return text[len(prompt) :], log_probs


@pytest.mark.parametrize(("scan", "windows"), [pytest.param(False, False, marks=pytest.mark.slow), (True, True)])
def test_ten_requests_in_three_rows_have_the_tokens_and_probabilities_of_each_alone(scan, windows):
    """1e-5: what one float32 forward pass differs from another, as a cache changes the length that sums run over."""
    one = engine(scan, windows)
    asked = prompts([1, 5, 17, 40, 3, 33, 2, 16, 20, 9])
    numbers = [6, 1, 9, 4, 12, 3, 5, 8, 2, 7]
    done = batch_of(3, one).run(
        [Request(prompt, number, GREEDY) for prompt, number in zip(asked, numbers, strict=True)]
    )
    for prompt, number, answer in zip(asked, numbers, done, strict=True):
        tokens, log_probs = alone(prompt, number, one)
        assert answer.tokens == tokens and answer.reason == "length"
        np.testing.assert_allclose(answer.log_probs, log_probs, atol=1e-5)


@pytest.mark.parametrize(("spare", "separated"), [(0, True), (1, False), (1 << 40, False)])
def test_a_gpu_gets_a_copy_of_the_weights_if_it_takes_a_tenth_of_the_memory_at_most(monkeypatch, spare, separated):
    on_device = dataclasses.replace(engine(), params=jax.device_put(engine().params))
    capacity = 10 * sum(leaf.nbytes for leaf in jax.tree.leaves(on_device.params)) - spare
    device = types.SimpleNamespace(memory_stats=lambda: {"bytes_limit": capacity} if capacity > 0 else None)
    monkeypatch.setattr(batching, "platform", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    layers = batch_of(1, on_device).engine.params["stack"]["blocks"]["mlp"]["down"]
    assert isinstance(layers, tuple) is separated


@pytest.mark.slow
def test_requests_compile_nothing_once_a_batch_is_compiled():
    """Programs are one that decodes, and for each number of rows two for the draws and one for each size of a chunk."""
    programs = (rows.decode, rows.extend, rows.copy, rows.draw_first)
    for program in programs:
        program.clear_cache()
    batch = batch_of(9)
    with compilations() as compiled:
        batch.compile()
        num_programs = 1 + 2 * (2 + sum(size <= batch.engine.length for size in batching.CHUNKS))
        batch.run([Request(prompt, 3, GREEDY) for prompt in prompts([3, 20, 90])])
        batch.run([Request(prompt, 5, Sampling(top_p=0.5, seed=3)) for prompt in prompts([60, 22, 5, 7, 30, 41])])
        batch.run([Request(prompts([17], seed=4)[0], 2, GREEDY, wants_top=True)])
    assert len(compiled) == num_programs
    [prompt] = prompts([20])
    ones = [batch.add(Request(prompt, 6, GREEDY)), batch.add(Request(prompt[::-1], 6, GREEDY))]
    batch.step()
    batch.compile()  # changes no row
    while not all(one.reason for one in ones):
        batch.step()
    assert [one.tokens for one in ones] == [alone(prompt, 6)[0], alone(prompt[::-1], 6)[0]]


@pytest.mark.slow
def test_a_token_drawn_after_a_part_of_a_prompt_was_not_seen():
    """A prompt is computed in parts, in the sizes that another one needs; nothing is drawn before its end."""
    asked, how = prompts([16, 40]), Sampling(temperature=0.0, repetition_penalty=1e6)
    together = batch_of(2).run([Request(prompt, 12, how) for prompt in asked])
    singly = [batch_of(1).run([Request(prompt, 12, how)])[0].tokens for prompt in asked]
    assert [one.tokens for one in together] == singly


def test_a_row_goes_on_while_others_only_come_and_go():
    """A client that scores, with one token a request, must not stop the answers of the others."""
    batch = batch_of(4)
    long = batch.add(Request(prompts([5])[0], 20, GREEDY))
    for prompt in prompts([3] * 300, seed=5):
        batch.add(Request(prompt, 1, GREEDY))
    steps = 0
    while not long.reason:
        batch.step()
        steps += 1
    assert batch.waiting, "the others still wait"
    assert steps <= batching.DECODE_EVERY * 21 and long.tokens == alone(long.request.prompt, 20)[0]


def test_tokens_that_the_model_does_not_have_are_refused_and_never_drawn():
    """Some tokenizers have more tokens than the published model that they belong to."""
    batch = Batch(engine(), num_rows=2, vocab_size=V + 5)
    assert batch.vocab_size == V
    with pytest.raises(ValueError, match=f"the prompt has the token {V}; the model has {V}"):
        batch.add(Request([1, V], 2, GREEDY))
    with pytest.raises(ValueError, match="max_tokens=0 must be at least 1"):  # it would never end
        batch.add(Request([1], 0, GREEDY))
    only = np.arange(V + 5) >= V - 1  # of what a tokenizer with more tokens allows, the model has one
    [found] = batch.run([Request([1, 2], 1, GREEDY, first_V=only)])
    assert found.tokens == [V - 1]


def test_the_last_token_of_a_prompt_that_is_drawn_again_is_not_a_new_one():
    asked = [1, 2]
    only = np.arange(V) == 23
    own, other = batch_of(2).run([Request(asked, 2, GREEDY, first_V=only, redrawn=token) for token in (23, 5)])
    assert own.tokens[:2] == other.tokens and (len(own.tokens), own.num_new, other.num_new) == (3, 2, 2)
    batch = batch_of(1)
    batch.add(Request(asked, batch.length - 3, GREEDY, redrawn=23))
    with pytest.raises(ValueError, match=f"a prompt of 3 tokens and {batch.length - 2} more exceed"):
        batch.add(Request(asked, batch.length - 2, GREEDY, redrawn=23))


def test_samples_of_one_prompt_compute_it_once_and_the_next_turn_only_what_is_new():
    [prompt] = prompts([50])
    batch = batch_of(4)
    first = batch.run([Request(prompt, 4, Sampling(seed=seed)) for seed in range(4)])
    assert batch.num_prompt_tokens == 50 + 3 and batch.num_shared_tokens == 3 * 49
    turn = [*prompt, *first[2].tokens, 7, 8, 9]
    [after] = batch.run([Request(turn, 5, GREEDY)])
    assert batch.num_prompt_tokens == 53 + 4  # the last token of a continuation is not in the cache
    assert after.tokens == alone(turn, 5)[0]
    assert [one.tokens for one in batch.run([Request(prompt, 4, Sampling(seed=seed)) for seed in range(4)])] == [
        one.tokens for one in first
    ]


def test_a_long_prompt_is_compared_with_many_rows_in_a_small_part_of_a_second():
    """Token by token it takes a second, in which nothing is decoded."""
    batch, shared = batch_of(64), prompts([320_000])[0]
    for tokens in batch._cached:
        tokens.extend(shared)
    batch.waiting.append(batching.Continuation(Request([*shared, 1, 2], 1, GREEDY)))
    started = time.process_time()
    [(one, _)] = batch._next_group({5})
    assert time.process_time() - started < 0.2
    assert (one.row, one.num_computed) == (5, 320_000)


def test_a_request_that_waits_for_a_prefix_is_compared_again_only_when_that_is_computed_or_cancelled(monkeypatch):
    [shared] = prompts([80])
    batch, compared = batch_of(4), []
    compare = batching._common_prefix
    monkeypatch.setattr(batching, "_common_prefix", lambda *pair: compared.append(0) or compare(*pair))
    monkeypatch.setattr(batching, "CHUNKS", (16,))
    for is_cancelled in (False, True):
        shared = [token % (V - 1) + 1 for token in shared]  # others than before
        first, second = (batch.add(Request([*shared, token], 2, GREEDY)) for token in (1, 2))
        batch.step()
        num_before = len(compared)
        batch.step()
        batch.step()
        assert second in batch.waiting and len(compared) == num_before
        if is_cancelled:
            batch.cancel(first)
        while not second.reason:
            batch.step()
        assert second.tokens == alone(second.request.prompt, 2)[0]


def test_a_row_that_another_request_took_is_no_source_of_what_it_had():
    """Prompts that begin alike are copied from a row before the row is overwritten in the same step."""
    [base] = prompts([30])
    batch = batch_of(2)
    for seed in range(6):
        asked = [[*base[: 10 + 3 * seed], *prompts([6], seed)[0]], prompts([25], 50 + seed)[0]]
        for prompt, one in zip(asked, batch.run([Request(prompt, 3, GREEDY) for prompt in asked]), strict=True):
            assert one.tokens == alone(prompt, 3)[0]


def test_draws_depend_on_the_seed_and_not_on_the_other_rows():
    asked = prompts([4, 9, 20])
    how = Sampling(temperature=1.2, top_k=12, seed=5)
    singly = [batch_of(1).run([Request(prompt, 8, how)])[0].tokens for prompt in asked]
    together = batch_of(4).run([Request(prompt, 8, how) for prompt in asked])
    assert [one.tokens for one in together] == singly


def test_bias_penalty_and_first_token_change_what_is_drawn():
    [prompt] = prompts([12])
    plain = alone(prompt, 3)[0]
    batch = batch_of(2)

    def first_of(**how) -> list[int]:
        return batch.run([Request(prompt, 3, Sampling(temperature=0.0, **how))])[0].tokens

    assert first_of() == plain
    assert first_of(logit_bias={17: 1e4}) == [17, 17, 17]
    assert plain[0] not in first_of(logit_bias={plain[0]: -1e4})
    allowed = np.arange(V) == 23
    [one] = batch.run([Request(prompt, 3, GREEDY, first_V=allowed)])
    assert one.tokens == [23, *alone([*prompt, 23], 2)[0]]
    penalized = batch.run([Request(prompt, 20, Sampling(temperature=0.0, repetition_penalty=1e6))])[0].tokens
    assert len(set(penalized)) == 20 and not set(penalized) & set(prompt)  # every positive logit is gone once seen


def test_only_tokens_that_exist_are_listed_as_likely_with_the_models_own_values():
    """A head often has more ids than the tokenizer, rounded up; where the first token is restricted, all are listed."""
    few, [prompt] = 10, [[3, 1, 4]]
    allowed = np.arange(V) == 7
    [one] = Batch(engine(), num_rows=2, vocab_size=few).run(
        [Request(prompt, 2, GREEDY, first_V=allowed, wants_top=True)]
    )
    assert [set(top) for top in one.tops] == [set(range(few))] * 2
    all_of_them = batch_of(2).run([Request(prompt, 1, GREEDY, first_V=allowed, wants_top=True)])[0].tops[0]
    shared = set(all_of_them) & set(range(few))
    assert shared and all(one.tops[0][token] == pytest.approx(all_of_them[token], abs=1e-5) for token in shared)


def test_min_p_keeps_a_share_of_the_likeliest():
    [prompt] = prompts([12])
    batch = batch_of(4)
    [one] = batch.run([Request(prompt, 1, GREEDY, wants_top=True)])
    top = one.tops[0]
    assert max(top, key=top.get) == one.tokens[0] and len(top) == 20
    kept = {token for token, value in top.items() if value >= one.log_probs[0] + np.log(0.5)}
    drawn = batch.run([Request(prompt, 1, Sampling(min_p=0.5, seed=seed)) for seed in range(60)])
    assert {other.tokens[0] for other in drawn} == kept


def test_cancelled_requests_free_their_rows_and_change_no_other():
    asked = prompts([8, 12, 10])
    batch = batch_of(2)
    ones = [batch.add(Request(prompt, 10, GREEDY)) for prompt in asked]
    for _ in range(3):
        batch.step()
    batch.cancel(ones[0])
    late = batch.add(Request(asked[0], 4, GREEDY))
    batch.cancel(late)
    while not all(one.reason for one in ones):
        batch.step()
    assert [one.reason for one in ones] == ["cancelled", "length", "length"] and late.reason == "cancelled"
    assert [one.tokens for one in ones[1:]] == [alone(prompt, 10)[0] for prompt in asked[1:]]
    assert not batch.running and not batch.waiting and not late.tokens


def test_a_request_fits_exactly_or_is_refused():
    [prompt] = prompts([LENGTH - 4])
    [one] = batch_of(1).run([Request(prompt, 4, GREEDY)])
    assert one.tokens == alone(prompt, 4)[0]
    with pytest.raises(ValueError, match="a prompt of 92 tokens and 5 more exceed the 96 tokens of a row"):
        batch_of(1).add(Request(prompt, 5, GREEDY))


def test_a_batch_has_at_least_one_row():
    """Without one, requests would wait for ever."""
    with pytest.raises(ValueError, match="num_rows=0 must be 1 or more"):
        batch_of(0)


def test_eight_devices_decode_as_one_does():
    one = engine()
    asked = prompts([5, 17, 30, 3, 12])
    expected = batch_of(4).run([Request(prompt, 6, GREEDY) for prompt in asked])
    with mesh_context(make_mesh(EIGHT)):
        batch = batch_of(4, one)
        layer = batch._rows.cache.of_model["each_layer"][0]
        assert layer["key"].sharding.shard_shape(layer["key"].shape)[:2] == (1, 1)  # of 4 rows and 2 heads
        batch.compile()
        with compilations() as compiled:
            sharded = batch.run([Request(prompt, 6, GREEDY) for prompt in asked])
    assert not compiled
    assert [a.tokens for a in sharded] == [b.tokens for b in expected]
    for a, b in zip(sharded, expected, strict=True):
        np.testing.assert_allclose(a.log_probs, b.log_probs, atol=1e-5)
    assert jax.device_count() >= 8
