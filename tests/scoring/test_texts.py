# SPDX-License-Identifier: Apache-2.0
"""Texts become rows as lm-evaluation-harness makes them: where a pair is split, and windows of long texts."""

import dataclasses
import io
import string
import types

import pytest
import sentencepiece
import tokenizers

from input_pipeline.tokenization import ByteTokenizer, SentencePieceTokenizer, open_tokenizer
from scoring import texts
from scoring.likelihood import LanguageModel, Row
from scoring.texts import continue_greedily, row_of_pair, rows_of_text
from tests.support import counting_model, one_device_mesh

END = 0


def stand_in(tokenizer, max_length: int = 4):
    """Return what rows are made by, without a model."""
    end = tokenizer.end_of_document
    return types.SimpleNamespace(tokenizer=tokenizer, max_length=max_length, prefix=[end], start=end)


def test_white_space_between_context_and_continuation_belongs_to_the_continuation():
    model = stand_in(ByteTokenizer())
    assert row_of_pair(model, "ab \n", "cd") == Row([END, *b"ab"], list(b" \ncd"))
    assert row_of_pair(model, "", "cd") == Row([END], list(b"cd"))


def test_a_pair_is_encoded_whole_and_split_at_the_length_of_its_context():
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["the cat sat on the mat", "cats and mats"] * 20), model_writer=trained, vocab_size=60,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    tokenizer = SentencePieceTokenizer(trained.getvalue(), "trained")
    for context, continuation in (("the c", "at sat"), ("the cat ", "sat"), ("th", "e")):
        row = row_of_pair(stand_in(tokenizer), context, continuation)
        whole, before = tokenizer.encode(context + continuation), tokenizer.encode(context.rstrip())
        assert row.context == [tokenizer.end_of_document, *before[: len(whole) - 1]]
        assert row.continuation == whole[min(len(before), len(whole) - 1) :]


@pytest.mark.parametrize("length", [1, 3, 4, 5, 8, 9, 10])
def test_windows_score_each_token_once_with_as_much_context_as_fits(length):
    tokens = list(range(1, length + 1))
    rows = rows_of_text(stand_in(ByteTokenizer()), bytes(tokens).decode())
    assert [token for row in rows for token in row.continuation] == tokens
    assert rows[0].context == [END]
    for row in rows[1:]:
        first = tokens.index(row.continuation[0])
        assert row.context == tokens[first - len(row.context) : first]
        assert len(row.context) + len(row.continuation) - 1 == 4  # the input fills the model


def test_a_published_tokenizer_says_what_it_puts_before_a_text(tmp_path):
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="</s>"))
    for single, prefix in (("<s> $A </s>", [0]), ("$A", [])):
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        words.enable_padding(direction="left", length=9)  # which a file may have, and no text of ours gets
        words.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        assert open_tokenizer(str(tmp_path / "tokenizer.json")).published_start() == prefix
    model = stand_in(open_tokenizer(str(tmp_path / "tokenizer.json")))
    model.prefix = ()
    assert row_of_pair(model, "", "a") == Row([1], [2])  # something has to precede it


def alphabet_model() -> LanguageModel:
    """Return a model that continues a with b, b with c, and so on."""
    graph, params = counting_model(256, embed_dim=256)
    return LanguageModel(graph, params, one_device_mesh(), ByteTokenizer(), (END,), 24, tokens_per_batch=256)


def test_answers_end_at_their_own_limit_or_stop_string_and_come_back_in_order():
    reported = []
    model = dataclasses.replace(alphabet_model(), on_batch=lambda *batch: reported.append(batch))
    prompts, limits = ["a", "x" * 40 + "b", "m", "a", "\xff"], [4, 8, 1, 12, 3]
    found = continue_greedily(model, prompts, max_tokens=limits, stops=[["d", ""], [], [], ["ef", "def"], []])
    assert found == ["bc", "cdefghij", "n", "bc", "\ufffd" * 3]  # bytes that are not characters
    assert reported[0] == ("answers", 0, 5) and reported == sorted(reported) and reported[-1][1] < 5
    assert continue_greedily(model, [], max_tokens=[], stops=[]) == []


def test_more_prompts_than_rows_are_continued_and_those_that_are_too_long_keep_their_end():
    model = alphabet_model()
    letters = string.ascii_lowercase[:-3]
    found = continue_greedily(model, list(letters), max_tokens=[3] * len(letters), stops=[[]] * len(letters))
    assert found == [string.ascii_lowercase[place + 1 : place + 4] for place in range(len(letters))]
    assert len(letters) > texts.ROWS
    assert texts._request(model, "b" * 40, 8).prompt == [*b"b" * 16]  # max_length is 24
    assert texts._request(model, "b", 40).max_tokens == 12
