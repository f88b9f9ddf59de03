# SPDX-License-Identifier: Apache-2.0
"""A text is continued like a document; a message is a turn of a conversation, and its answer ends with the turn."""

import types

import pytest
import sentencepiece

from configs.base import get_config
from configs.errors import ConfigError
from inference import decoding, revision, sampling
from inference.sampling import answers, check_answers, continue_texts
from input_pipeline.tokenization import open_tokenizer
from tests.input_pipeline.chat.conftest import CHATML, write_tokenizer  # noqa: F401


@pytest.fixture
def ask(monkeypatch):
    """Answer a message by a model that is not there; return its prompt as text, what ends it, and the answer."""

    def ask(name: str, message: str = "hello", said: str = "so it is", **changes):
        config, asked = get_config(), {}
        config.data.tokenizer, config.model.max_length = name, 64
        tokenizer = open_tokenizer(name)

        def generate(graph, params, requests, **how):
            asked.update(prompt=tokenizer.decode(requests[0].prompt), ends=requests[0].ends)
            return [tokenizer.encode(said)]

        monkeypatch.setattr(decoding, "generate", generate)
        run = types.SimpleNamespace(config=config, graph=None)
        [text] = answers(run, {}, tokenizer, [message], **{"max_tokens": 8, "temperature": 0.0} | changes)
        return asked["prompt"], {tokenizer.decode([end]) for end in asked["ends"]}, text

    return ask


def test_a_text_begins_and_ends_as_documents_do(monkeypatch):
    asked = []

    def generate(graph, params, requests, **how):
        asked.extend(requests)
        return [[*b"c"], [*b"!"]]

    monkeypatch.setattr(decoding, "generate", generate)
    run = types.SimpleNamespace(config=get_config(), graph=None)
    assert continue_texts(run, {}, open_tokenizer("byte"), ["ab", ""], max_tokens=8) == ["abc", "!"]
    assert [(one.prompt, one.ends, one.sampling.seed) for one in asked] == [([0, *b"ab"], [0], 0), ([0], [0], 1)]


@pytest.fixture
def normalising(tmp_path):
    """The file of a tokenizer as SentencePiece trains it by itself: without white space at the ends, and composing."""
    sentences = ["define the class classes of the café", "defer the classic café"] * 20
    prefix = f"{tmp_path}/trained"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences), model_prefix=prefix, vocab_size=60, hard_vocab_limit=False, minloglevel=2
    )
    return f"{prefix}.model"


@pytest.mark.parametrize(
    ("prompt", "written"),
    [
        ("class ", "classes of"),
        ("class ", "class of the"),
        ("def ", "define the class"),
        (" the  class", "the class of"),
        ("cafe\u0301 ", "café class"),
        ("cafe\u0301 of", "café of the"),
        ("", "the class"),
    ],
)
def test_a_prompt_that_the_tokenizer_changes_costs_no_letter_of_what_follows(monkeypatch, normalising, prompt, written):
    tokenizer = open_tokenizer(normalising)

    def generate(graph, params, requests, **how):
        return [tokenizer.encode(written)[len(requests[0].prompt) - 1 :]]

    monkeypatch.setattr(decoding, "generate", generate)
    run = types.SimpleNamespace(config=get_config(), graph=None)
    assert continue_texts(run, {}, tokenizer, [prompt], max_tokens=8) == [written]


def test_by_a_template_and_without_one(ask, write_tokenizer, tmp_path):  # noqa: F811
    assert ask("byte") == ("\0user\nhello\0assistant\n", {"\0"}, "so it is")
    (tmp_path / "other").mkdir()
    for folder, eos in ((tmp_path, "<|im_end|>"), (tmp_path / "other", "<|endoftext|>")):
        prompt, ends, text = ask(write_tokenizer(CHATML, folder, eos_token=eos))
        assert prompt == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n" and text == "so it is"
        assert ends == {"<|im_end|>", eos}  # a base model's end of document may be another than a turn's


def test_each_of_several_messages_is_answered(monkeypatch):
    asked = []

    def generate(graph, params, requests, **how):
        asked.extend(request.prompt for request in requests)
        return [[*b"first"], [*b"second"]]

    monkeypatch.setattr(decoding, "generate", generate)
    run = types.SimpleNamespace(config=get_config(), graph=None)
    assert answers(run, {}, open_tokenizer("byte"), ["a", "b"], max_tokens=8) == ["first", "second"]
    assert asked == [[*b"\0user\n%s\0assistant\n" % message] for message in (b"a", b"b")]


def test_a_draft_that_ended_is_revised_with_its_end(monkeypatch):
    """As the module has learned; `revise` returns it without the end."""
    drafts = []

    def generate(graph, params, requests, *, with_ends=False, **how):
        return [[*b"Yes.", *([0] if with_ends else [])]]

    def revise(graph, params, prompts, given, *, ends, **how):
        drafts.extend(given)
        return [[token for token in draft if token not in ends] for draft in given]

    monkeypatch.setattr(decoding, "generate", generate)
    monkeypatch.setattr(revision, "revise", revise)
    run = types.SimpleNamespace(config=get_config(), graph=None)
    run.config.error_correction.use_error_correction = True
    assert answers(run, {}, open_tokenizer("byte"), ["a"], max_tokens=8) == ["Yes."]
    assert drafts == [[*b"Yes.", 0]]


def test_a_model_that_never_saw_a_conversation_is_not_asked(write_tokenizer):  # noqa: F811
    config = get_config()
    with pytest.raises(
        ConfigError, match="runs/x was not trained on conversations, and its tokenizer has no chat temp"
    ):
        check_answers(config, open_tokenizer("byte"), "runs/x")
    check_answers(config, open_tokenizer(write_tokenizer(CHATML)), "runs/x")  # as an imported chat model has
    for source in ("chat", "preferences"):
        config.data.source = source
        check_answers(config, open_tokenizer("byte"), "runs/x")


def test_what_cannot_be_asked_is_one_line(ask, write_tokenizer):  # noqa: F811
    with pytest.raises(ConfigError, match=r"a prompt of 19 tokens and --max_tokens=60 exceed .* use --max_tokens=45"):
        ask("byte", "hi", max_tokens=60)
    name = write_tokenizer("{{ raise_exception('a system prompt first') }}")
    with pytest.raises(ConfigError, match=r"--message is not what the chat template takes \(a system prompt first\)"):
        ask(name)


def test_without_a_number_of_tokens_each_prompt_has_its_own_room(monkeypatch):
    asked = []

    def generate(graph, params, requests, **how):
        asked.extend(request.max_tokens for request in requests)
        return [[] for _ in requests]

    monkeypatch.setattr(decoding, "generate", generate)
    run = types.SimpleNamespace(config=get_config(), graph=None)
    run.config.model.max_length = 64
    continue_texts(run, {}, open_tokenizer("byte"), ["a", "b" * 60], max_tokens=None)
    assert asked == [62, 3]
    with pytest.raises(ConfigError, match=r"a prompt of 61 tokens .* use --max_tokens=3"):
        continue_texts(run, {}, open_tokenizer("byte"), ["a", "b" * 60], max_tokens=63)


def test_a_continuation_takes_the_room_that_there_is():
    run = types.SimpleNamespace(config=types.SimpleNamespace(model=types.SimpleNamespace(max_length=100)))
    assert [sampling._fitting(run, *of) for of in ((10, None), (90, None), (90, 3))] == [64, 10, 3]
    with pytest.raises(ConfigError, match=r"--max_tokens=20 exceed model\.max_length=100; use --max_tokens=10"):
        sampling._fitting(run, 90, 20)
    with pytest.raises(ConfigError, match=r"a prompt of 100 tokens .* shorten it: an answer has no room"):
        sampling._fitting(run, 100, None)
