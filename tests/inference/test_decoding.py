# SPDX-License-Identifier: Apache-2.0
"""Which token is drawn, on logits made by hand; and that a batch of cached decodes is each prompt's full forward."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import choice
from inference.batching import Request
from inference.choice import Sampling, choice_of, choose
from inference.decoding import generate
from tests import support
from tests.support import forward, make_model, model_config

V, END = 37, 0
PROBABILITIES = np.array([0.05, 0.4, 0.2, 0.05, 0.3])


def drawn(probabilities, count=4000, **sampling):
    """Return how often each token comes, of many draws with a seed each."""
    logits = jnp.broadcast_to(jnp.log(probabilities), (count, len(probabilities)))
    tokens = jax.jit(choose)(logits, choice_of([(Sampling(**sampling, seed=seed), 0) for seed in range(count)]))
    return np.bincount(tokens, minlength=len(probabilities)) / count


@pytest.mark.parametrize("temperature", [0, 1e-300, 1e-40, 1e-30])  # two are 0 in float32
def test_no_temperature_takes_the_likeliest(temperature):
    np.testing.assert_array_equal(drawn(PROBABILITIES, temperature=temperature), [0, 1, 0, 0, 0])


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_temperature_raises_probabilities_to_its_inverse(temperature):
    wanted = PROBABILITIES ** (1 / temperature)
    np.testing.assert_allclose(drawn(PROBABILITIES, temperature=temperature), wanted / wanted.sum(), atol=0.03)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        ({"top_k": 1}, [1]),
        ({"top_k": 3}, [1, 2, 4]),
        ({"top_k": 5}, [0, 1, 2, 3, 4]),
        ({"top_k": 99}, [0, 1, 2, 3, 4]),
        ({"top_p": 0.01}, [1]),  # the first always
        ({"top_p": 0.39}, [1]),
        ({"top_p": 0.41}, [1, 4]),  # 0.4 is not yet enough
        ({"top_p": 0.85}, [1, 2, 4]),
        ({"top_p": 1.0}, [0, 1, 2, 3, 4]),
        ({"top_k": 2, "top_p": 0.85}, [1, 4]),
        ({"top_k": 2, "top_p": 0.5}, [1]),  # of what the two likeliest have together
        ({"top_p": 0.6, "temperature": 3.0}, [1, 2, 4]),  # of the probabilities at that temperature
    ],
)
def test_top_k_and_top_p_keep_the_likeliest_in_their_proportions(sampling, kept):
    wanted = np.zeros(5)
    wanted[kept] = PROBABILITIES[kept] ** (1 / sampling.get("temperature", 1.0))
    actual = drawn(PROBABILITIES, **sampling)
    np.testing.assert_array_equal(np.flatnonzero(actual), kept)
    np.testing.assert_allclose(actual, wanted / wanted.sum(), atol=0.03)


def test_no_token_is_added_to_those_whose_probabilities_sum_to_exactly_top_p():
    np.testing.assert_array_equal(drawn(np.array([0.5, 0.5]), count=100, top_p=0.5), [1, 0])


def test_a_token_with_exactly_the_share_of_min_p_is_kept():
    """So that min_p=1 takes the likeliest, and not none."""
    np.testing.assert_array_equal(drawn(PROBABILITIES, count=100, min_p=1.0), [0, 1, 0, 0, 0])


@pytest.mark.parametrize(("sampling", "kept"), [({"top_k": 3}, [0, 1, 2]), ({"top_p": 0.5}, [0, 1, 2])])
def test_of_equally_likely_tokens_only_as_many_are_kept_as_asked_and_those_with_lower_ids(sampling, kept):
    np.testing.assert_array_equal(np.flatnonzero(drawn(np.array([0.2, 0.15, 0.2, 0.15, 0.15, 0.15]), **sampling)), kept)


def test_a_penalty_makes_tokens_that_were_seen_less_likely_whatever_the_sign_of_their_logits():
    seen = np.array([[True, True, False, False]])
    how = choice_of([(Sampling(repetition_penalty=2.0), 0)])
    adjusted = choice.adjust(jnp.array([[3.0, -3.0, 3.0, -3.0]]), how, seen, jnp.float32([[0, 0, 0, 1]]))
    np.testing.assert_array_equal(adjusted, [[1.5, -6.0, 3.0, -2.0]])


def test_rows_are_drawn_for_themselves():
    logits = jnp.log(jnp.array([[0.98, 0.01, 0.01], [0.01, 0.01, 0.98], [1 / 3, 1 / 3, 1 / 3]]))
    choices = (choice_of([(Sampling(top_p=0.9, seed=seed), 0)] * 3) for seed in range(20))
    tokens = np.stack([jax.jit(choose)(logits, one) for one in choices])
    assert (tokens[:, 0] == 0).all() and (tokens[:, 1] == 2).all() and len(set(tokens[:, 2])) == 3


def test_a_row_that_is_not_truncated_keeps_its_least_likely_tokens_beside_one_that_is():
    """Too unlikely to be drawn in a test: the probabilities before them round to 1."""
    logits = jnp.broadcast_to(jnp.array([0.0, -20.0, -21.0, -22.0]), (2, 4))
    truncated = jax.jit(choice._truncated)(logits, choice_of([(Sampling(), 0), (Sampling(top_k=1), 0)]))
    np.testing.assert_array_equal(np.isfinite(truncated), [[True] * 4, [True, False, False, False]])


@functools.cache
def random_model():
    """Return a model whose programs are those of the counting model."""
    return make_model(model_config(embed_dim=48))


@functools.cache
def counting_model():
    return support.counting_model(V, embed_dim=48)


def continued(model, prompts, **options):
    graph, params = model
    vocab_size, seed = options.pop("vocab_size", V), options.pop("seed", 0)
    how = {"temperature": 0} | options
    requests = [
        Request([END, *prompt], 6, Sampling(**how, seed=seed + index), [END]) for index, prompt in enumerate(prompts)
    ]
    return generate(graph, params, requests, vocab_size=vocab_size)


PROMPTS = [[5, 9, 30], [11], [], [7, 7, 2, 19, 36, 4]]


def greedy_by_full_forwards(prompt: list[int], num_tokens: int) -> list[int]:
    """Return the continuation without any cache: the whole text goes through the model for each token."""
    graph, params = random_model()
    text, length = [END, *prompt], 16
    for _ in range(num_tokens):
        padded = np.array([text + [0] * (length - len(text))])
        segments = (np.arange(length) < len(text)).astype(np.int32)[None]
        batch = {"tokens": padded, "positions": np.arange(length)[None], "segments": segments}
        text.append(int(np.argmax(forward(graph, params, batch)[0, len(text) - 1])))
    written = text[1 + len(prompt) :]
    return written[: written.index(END)] if END in written else written


def test_greedy_decoding_of_a_batch_equals_the_full_forward_of_each_prompt_alone_token_by_token():
    assert continued(random_model(), PROMPTS) == [greedy_by_full_forwards(prompt, 6) for prompt in PROMPTS]


def test_each_row_stops_at_the_end_of_document_and_does_not_return_it():
    assert continued(counting_model(), [[34], [3], [36], [20]])[:3] == [[35, 36], [4, 5, 6, 7, 8, 9], []]


@pytest.mark.slow
def test_no_token_beyond_the_tokenizer_is_ever_drawn():
    """The counting model would go on to 21; its rows from there on are the embedding's padding."""
    greedy = continued(counting_model(), [[18]], vocab_size=21)[0]
    assert greedy[:2] == [19, 20] and max(greedy) < 21
    hot = continued(counting_model(), [[18]] * 50, vocab_size=21, temperature=50.0)
    assert max(max(row, default=0) for row in hot) < 21 and len({token for row in hot for token in row}) > 10


def test_a_seed_gives_the_same_text_again_and_another_seed_another():
    texts = [continued(random_model(), PROMPTS, temperature=1.0, seed=seed) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]
    assert len({tuple(row) for row in continued(random_model(), [[5]] * 4, temperature=1.0)}) > 1  # rows differ too


def test_a_reported_probability_is_that_of_the_model_without_penalty_and_bias():
    logits, seen = jnp.log(jnp.array([PROBABILITIES])), np.array([[False, True, False, False, False]])
    how = choice_of([(Sampling(temperature=0.0, repetition_penalty=1e3), 0)])
    drawn_then, _ = jax.jit(choice.draw)(logits, how, seen, jnp.float32([[0, 0, 5, 0, 0]]), False)
    assert drawn_then.token_B == 2 and float(jnp.exp(drawn_then.log_prob_B[0])) == pytest.approx(0.2)
