# SPDX-License-Identifier: Apache-2.0
"""Text comes as whole characters, adds up to the text of all tokens, and has no part of a stop string."""

import functools
import io

import pytest
import sentencepiece
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders, models, normalizers

from inference.prompts import text_prompt, token_prompt
from inference.text_stream import REPLACEMENT, TextStream
from input_pipeline.tokenization import ByteTokenizer, SentencePieceTokenizer, open_tokenizer
from tests.input_pipeline.chat.conftest import write_tokenizer  # noqa: F401

TEXTS = st.text("ab \n\u00e9\u20ac\U0001f600\u2581", max_size=60)
FEW = settings(max_examples=60)


def streamed(decode, tokens, **how) -> list[str]:
    """Return the texts of each token and of the end."""
    stream = TextStream(decode, **how)
    return [*map(stream.add, tokens), stream.end()]


@given(st.binary(max_size=80))
@FEW
def test_any_bytes_add_up_to_their_text_and_no_character_is_split(content):
    decode = ByteTokenizer().decode
    parts = streamed(decode, content)
    assert "".join(parts) == decode(list(content))
    for end in range(1, len(content) + 1):  # what is out can no longer change
        assert decode(list(content)).startswith("".join(parts[:end]))


@given(TEXTS)
@FEW
def test_characters_come_as_soon_as_they_are_complete(text):
    parts = streamed(ByteTokenizer().decode, text.encode())
    assert [part for part in parts if part] == list(text) and parts[-1] == ""


@functools.cache
def trained(dummy_prefix: bool) -> SentencePieceTokenizer:
    """Return a small SentencePiece model with bytes, which may begin texts with a space as Llama's does."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["a b ab ba  abba a\u00e9b"] * 20), model_writer=model, vocab_size=290, model_type="bpe",
        byte_fallback=True, hard_vocab_limit=False, minloglevel=2, add_dummy_prefix=dummy_prefix,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
    )  # fmt: skip
    return SentencePieceTokenizer(model.getvalue(), "trained")


@pytest.mark.parametrize("dummy_prefix", [False, True])
@given(text=TEXTS)
@FEW
def test_pieces_that_depend_on_what_is_before_add_up(dummy_prefix, text):
    tokenizer = trained(dummy_prefix)
    tokens = tokenizer.encode(text)
    assert "".join(streamed(tokenizer.decode, tokens)) == tokenizer.decode(tokens)


@functools.cache
def with_byte_fallback() -> tokenizers.Tokenizer:
    """Return a tokenizer.json's like Llama 2's: its decoder knows a character of bytes when all of a run are valid."""
    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "a", "b", "\n", "\u2581"]
    made = tokenizers.Tokenizer(models.BPE({name: i for i, name in enumerate(names)}, [], byte_fallback=True))
    made.normalizer = normalizers.Replace(" ", "\u2581")
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    return made


@given(st.text("ab \n\u00e9\u20ac\U0001f600\U0001f1e9", max_size=40))
@FEW
def test_characters_of_bytes_in_a_row_add_up(text):
    tokenizer = with_byte_fallback()
    tokens = tokenizer.encode(text).ids
    parts = streamed(tokenizer.decode, tokens)
    assert "".join(parts) == tokenizer.decode(tokens) == text
    for end in range(1, len(tokens) + 1):
        assert text.startswith("".join(parts[:end]))


@pytest.fixture
def bpe(write_tokenizer):  # noqa: F811
    """A byte-level tokenizer.json."""
    return open_tokenizer(write_tokenizer(None))


def test_a_tokenizer_json_adds_up_over_many_windows(bpe):
    text = "I think so \U0001f600\u00e9 what is the answer?\n    " * 8
    tokens = bpe.encode(text)
    parts = streamed(bpe.decode, tokens)
    assert "".join(parts) == text and not any(REPLACEMENT in part for part in parts)


@given(TEXTS, st.lists(st.text("ab \u00e9", min_size=1, max_size=4), min_size=1, max_size=3), st.data())
@FEW
def test_the_text_ends_before_the_stop_string_that_ends_first_however_it_is_cut(text, stops, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    chunks = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    stream = TextStream("".join, stops)
    parts = [stream.add(chunk) for chunk in chunks]
    ends = [(text.find(stop) + len(stop), text.find(stop)) for stop in stops if stop in text]
    expected = text[: min(ends)[1]] if ends else text
    assert "".join(parts) + stream.end() == expected and stream.stopped == bool(ends)
    for end in range(len(chunks)):
        assert expected.startswith("".join(parts[: end + 1]))


def test_of_stop_strings_within_one_token_the_one_that_ends_first_counts():
    stream = TextStream("".join, ["bcd", "c"])
    assert stream.add("abcde") == "ab" and stream.stopped


def test_what_may_begin_a_stop_string_is_held_back_and_comes_at_the_end():
    assert streamed("".join, "say stomp", stops=["stop"]) == [
        "", "sa", "y", " ", "", "", "", "stom", "p", "",
    ]  # fmt: skip
    assert streamed("".join, "sto", stops=["stop"]) == ["", "", "", "sto"]
    assert streamed("".join, "a stop, no", stops=["stop"])[2:] == [""] * 9


def test_a_continuation_begins_where_the_prompt_ends(bpe):
    """The last token of a prompt is drawn again, and what it has of the prompt is not part of the continuation."""
    prompt = text_prompt(bpe, "what is th")
    tokens = bpe.encode("what is the answer?")[len(prompt.before) :]
    stream = prompt.text(bpe)
    assert "".join([*map(stream.add, tokens), stream.end()]) == "e answer?"
    emoji = bpe.encode("\U0001f600")
    prompt = token_prompt(bpe, [*bpe.encode("so "), *emoji[:2]])
    stream = prompt.text(bpe)
    assert "".join([*map(stream.add, [*emoji[2:], *bpe.encode("!")]), stream.end()]) == "\U0001f600!"


def test_bytes_of_no_character_at_the_end_of_a_prompt_are_not_the_continuations():
    tokenizer = ByteTokenizer()
    for prompt, tokens, text in ((b"a\xff", b"b", "b"), (b"\xe6", b"\x97\xa5", "\u65e5"), (b"\xe6", b"", ""),
                                 (b"\xff", b"\xe6\x97\xa5", "\u65e5"), (b"\xff", b"\xff", REPLACEMENT)):  # fmt: skip
        stream = token_prompt(tokenizer, list(prompt)).text(tokenizer)
        assert "".join([*map(stream.add, tokens), stream.end()]) == text
    stream = text_prompt(tokenizer, f"a{REPLACEMENT}").text(tokenizer)
    assert stream.add(ord("b")) == "b"
