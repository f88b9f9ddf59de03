# SPDX-License-Identifier: Apache-2.0
"""Texts become rows as lm-evaluation-harness makes them: where a pair is split, and windows of long texts."""

import io
import types

import pytest
import sentencepiece
import tokenizers

from input_pipeline.tokenization import ByteTokenizer, SentencePieceTokenizer, open_tokenizer
from scoring import texts
from scoring.likelihood import Row
from scoring.texts import cut, published_prefix, row_of_pair, rows_of_text

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
    for single, prefix in (("<s> $A </s>", (0,)), ("$A", ())):
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", 0), ("</s>", 1)]
        )
        words.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
        assert published_prefix(open_tokenizer(str(tmp_path / "tokenizer.json"))) == prefix
    model = stand_in(open_tokenizer(str(tmp_path / "tokenizer.json")))
    model.prefix = ()
    assert row_of_pair(model, "", "a") == Row([1], [2])  # something has to precede it


def test_a_text_ends_at_the_first_of_its_stop_strings():
    assert cut("one; two\nthree", ["\n", ";"]) == "one"
    assert cut("one", ["\n"]) == "one" and cut("one", []) == "one"


def test_prompts_that_are_too_long_keep_their_end_and_answers_come_back_in_order(monkeypatch):
    asked = []

    def generate(graph, params, prompts, **how):
        asked.append((prompts, how))
        return [[*bytes(prompt[-1:]), *b"; and more"] for prompt in prompts]

    monkeypatch.setattr(texts.decoding, "generate", generate)
    model = stand_in(ByteTokenizer(), max_length=24)
    model.graph = model.params = None
    model.bucket, model.on_batch = lambda length: 32, lambda *batch: None
    found = texts.continue_greedily(
        model, ["a", "b" * 40, "c"], max_tokens=[4, 8, 1], stops=[[";"], [], []]
    )  # fmt: skip
    assert found == ["a", "b; and m", "c"]
    [(prompts, how)] = asked
    assert prompts[0] == [*b"b" * 16] and [len(prompt) for prompt in prompts[3:]] == [32] * (texts.ROWS + 1 - 3)
    assert how["temperature"] == 0.0 and how["max_tokens"] == 8
