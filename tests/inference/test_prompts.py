# SPDX-License-Identifier: Apache-2.0
"""A prompt begins as the texts did that the model of a run has seen."""

import io
import json

import pytest
import sentencepiece
import tokenizers

from configs import base
from inference.prompts import answer_ends, text_prompt, text_start
from input_pipeline.chat.encoding import format_of_tokenizer
from input_pipeline.tokenization import ByteTokenizer, SentencePieceTokenizer, open_tokenizer
from tests.input_pipeline.chat.conftest import CHATML, made_tokenizer

BOS, EOS, WORD = 0, 1, 2


@pytest.fixture
def published(tmp_path):
    """Return a function that makes a tokenizer.json that puts these tokens before a text."""

    def make(single: str, chat_template: str = ""):
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<s>": 0, "</s>": 1, "a": 2}, unk_token="</s>"))
        words.post_processor = tokenizers.processors.TemplateProcessing(
            single=single, special_tokens=[("<s>", BOS), ("</s>", EOS)]
        )
        words.save(str(tmp_path / "tokenizer.json"))
        settings = {"eos_token": "</s>", "chat_template": chat_template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        return open_tokenizer(str(tmp_path / "tokenizer.json"))

    return make


@pytest.mark.parametrize(
    ("source", "template", "is_trained", "start"),
    [
        ("text", "", False, BOS),  # imported weights have seen what their tokenizer adds
        ("text", "", True, EOS),  # documents are packed after the end of another
        ("chat", "{{ messages }}", True, BOS),  # each conversation begins with what its template writes
        ("chat", "", True, EOS),  # the plain format begins with the end of a document
    ],
)
def test_a_text_begins_as_in_the_training_of_the_weights(published, source, template, is_trained, start):
    config = base.get_config()
    config.data.source = source
    assert text_start(published("<s> $A", template), config, is_trained=is_trained) == [start]
    assert text_start(ByteTokenizer(), config, is_trained=is_trained) == [ByteTokenizer().end_of_document]


@pytest.mark.parametrize("bos", [1, -1])
def test_a_sentencepiece_model_of_llama_has_a_mark_and_one_of_ours_has_none(bos):
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b c d"] * 9), model_writer=trained, vocab_size=10, model_type="bpe", unk_id=0,
        bos_id=bos, eos_id=2, minloglevel=2,
    )  # fmt: skip
    tokenizer, config = SentencePieceTokenizer(trained.getvalue(), "trained"), base.get_config()
    assert text_start(tokenizer, config, is_trained=False) == [bos if bos >= 0 else EOS + 1]
    assert text_start(tokenizer, config, is_trained=True) == [EOS + 1]


def test_a_prompt_has_at_least_one_token(published):
    tokenizer = published("$A")
    start = text_start(tokenizer, base.get_config(), is_trained=False)
    assert start == [] and text_prompt(tokenizer, "", start).tokens == [EOS]
    whole = text_prompt(tokenizer, "a", start)
    assert whole.num_tokens == 1 + (whole.redrawn is not None)


LLAMA_2 = """{% for message in messages %}{% if message.role == 'user' %}{{ '[INST] ' + message.content + ' [/INST]' }}\
{% else %}{{ ' ' + message.content + ' ' + eos_token }}{% endif %}{% endfor %}"""
THINKS = """{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' }}{{ message.content }}\
{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"""


PLAIN = CHATML.replace("'<|im_end|>'", "' answer'")


@pytest.mark.parametrize("template", [CHATML, LLAMA_2, THINKS])
def test_an_answer_ends_with_the_mark_of_its_template_alone(template, tmp_path):
    """Not with white space before the mark, and also where a stored turn lacks the thoughts of a generated one."""
    tokenizer = open_tokenizer(made_tokenizer(template, tmp_path))
    (mark,) = tokenizer.encode("<|im_end|>")
    form = format_of_tokenizer(tokenizer, str(tmp_path / "tokenizer.json"))
    assert set(answer_ends(tokenizer, form)) == {tokenizer.end_of_document, mark}


def test_a_mark_of_plain_text_is_the_token_that_the_model_writes(tmp_path):
    """With the space before it, which is a part of the token."""
    tokenizer = open_tokenizer(made_tokenizer(PLAIN, tmp_path))
    form = format_of_tokenizer(tokenizer, str(tmp_path / "tokenizer.json"))
    assert answer_ends(tokenizer, form)[1:] == tokenizer.encode(" answer")[:1]
