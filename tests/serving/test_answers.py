# SPDX-License-Identifier: Apache-2.0
"""What an answer counts: its own tokens, without one that the prompt ends with."""

import asyncio
import time

import pytest

pytest.importorskip("starlette", reason="needs the packages of `make setup EXTRAS=serve`")

from inference.prompts import Prompt, text_prompt
from input_pipeline.tokenization import open_tokenizer
from serving.answers import Answer, CompletionFormat, Drawn, Piece, collected, usage
from serving.worker import Update
from tests.input_pipeline.chat.conftest import write_tokenizer  # noqa: F401

WHOLE = "what is the answer"


@pytest.fixture
def bpe(write_tokenizer):  # noqa: F811
    """A byte-level tokenizer.json."""
    return open_tokenizer(write_tokenizer(None))


def test_offsets_count_the_characters_before_a_token_also_inside_one_and_where_a_stop_may_begin():
    """é has two bytes, each a token; "!" may begin the stop string."""
    tokenizer = open_tokenizer("byte")
    prompt = text_prompt(tokenizer, "a")
    drawn = tokenizer.encode("é!b")
    answer = Answer(0, prompt, tokenizer, ["!?"])
    found = [answer.take(Update(0, [token], [0.0], [], "")) for token in drawn]
    found.append(answer.take(Update(0, [], [], [], "length")))
    assert "".join(piece.text for piece in found) == "é!b"
    assert [one.offset for piece in found for one in piece.drawn] == [0, 0, 1, 2]


def test_of_likely_tokens_with_the_same_text_the_likeliest_is_reported():
    """The dictionary of a completion has one value for all tokens without text."""
    asked = CompletionFormat("model", open_tokenizer("byte"), 3)
    drawn = Drawn(98, -1.0, {98: -1.0, 300: -1.1, 301: -1.2}, 0)
    assert asked._by_text(drawn) == {"b": -1.0, "": -1.1}


@pytest.mark.parametrize(("asked", "is_own"), [("what is the", True), ("what is th", False)])
def test_a_first_token_counts_if_it_goes_beyond_the_prompt(bpe, asked, is_own):
    prompt = text_prompt(bpe, asked)
    assert prompt.num_tokens == 1 + len(bpe.encode(asked))  # with the end of the document before
    drawn = bpe.encode(WHOLE)[len(prompt.before) :]
    assert (drawn[0] == prompt.redrawn) == is_own, "the tokenizer cuts as this test supposes"
    answer = Answer(0, prompt, bpe, [])
    piece = answer.take(Update(0, drawn, [0.0] * len(drawn), [], "length"))
    assert piece.text == WHOLE.removeprefix(asked)
    assert [one.token for one in piece.drawn] == drawn[is_own:]
    assert usage([prompt], [answer])["completion_tokens"] == len(drawn) - is_own


@pytest.mark.parametrize("with_drawn", [True, False])
def test_a_long_answer_is_collected_in_a_time_that_grows_as_its_length(with_drawn):
    """It takes half a minute if each part is joined with all before it."""
    count = 100_000

    async def parts():
        for place in range(count):
            yield Piece(1, "ab", [Drawn(place, 0.0, {}, 2 * place)], "")
        yield Piece(0, "c", [], "stop")
        yield Piece(1, "", [], "length")

    began = time.process_time()
    first, second = asyncio.run(collected(parts(), 2, with_drawn=with_drawn))
    assert time.process_time() - began < 5
    assert (second.text, second.reason) == ("ab" * count, "length")
    assert [one.token for one in second.drawn] == (list(range(count)) if with_drawn else [])
    assert first == Piece(0, "c", [], "stop")


def test_the_last_token_of_a_prompt_counts_though_it_is_drawn_again():
    prompts = [Prompt([1, 2], [0], redrawn=5), Prompt([1, 2], [0])]
    assert usage(prompts, []) == {"prompt_tokens": 5, "completion_tokens": 0, "total_tokens": 5}
