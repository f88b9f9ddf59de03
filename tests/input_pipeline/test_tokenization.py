# SPDX-License-Identifier: Apache-2.0
import io

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from input_pipeline import sentencepiece_training
from input_pipeline.errors import DataError
from input_pipeline.sentencepiece_training import train
from input_pipeline.tokenization import (
    ByteTokenizer,
    SentencePieceTokenizer,
    given_tokenizer,
    open_tokenizer,
    train_tokenizer,
)
from tests.input_pipeline.memory import spans_of

CODE = "".join(
    f"def name_{k % 7}(self, value):\n    if value > {k}:\n\t\treturn value * {k * k}\n\n" for k in range(200)
)
HARD = [
    "",
    "\0",
    "\t\t\n \n",
    "   \r\n\r",
    "\u2581",
    "a \u2581\u2581 b",
    "\u2585\u2047\x05",
    "</s><unk><0x0A>",
    "\ufeff😀e\u0301",
]


@pytest.fixture(scope="module")
def trained():
    return SentencePieceTokenizer(train(spans_of(CODE), 400), "test")


@pytest.fixture
def make(tmp_path):
    def tokenizer(name, vocab_size, *texts, announce=lambda line: None):
        given = given_tokenizer(name, vocab_size)
        return given or train_tokenizer(vocab_size, spans_of(*texts or [CODE]), tmp_path, announce)

    return tokenizer


@given(text=st.text() | st.text(alphabet="ab \n\t\r\0\u2581") | st.sampled_from(HARD))
def test_any_text_comes_back(trained, text):
    for tokenizer in (ByteTokenizer(), trained):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)


@given(texts=st.lists(st.text() | st.sampled_from(HARD), max_size=5))
def test_a_batch_is_each_text_alone(trained, texts):
    for tokenizer in (ByteTokenizer(), trained):
        assert [tokens.tolist() for tokens in tokenizer.encode_batch(texts)] == [tokenizer.encode(t) for t in texts]


def test_the_end_of_a_document_is_no_text(trained):
    assert ByteTokenizer.vocab_size == 256 and ByteTokenizer.end_of_document == 0
    assert trained.decode([trained.end_of_document]) == ""
    assert all(trained.end_of_document not in trained.encode(text) for text in [CODE, *HARD])


def test_what_a_model_may_write_is_decoded(trained):
    for tokenizer in (ByteTokenizer(), trained):
        broken = tokenizer.encode("é")[:1] + tokenizer.encode("ab") + [10_000]
        assert tokenizer.decode(broken) == "\ufffdab"


def test_indentation_and_line_ends_are_in_pieces(trained):
    pieces = {trained.decode(trained.encode(text)) for text in ("\n    ", "    ")}
    assert pieces == {"\n    ", "    "}
    assert len(trained.encode("\n    if ")) <= 3
    assert len(trained.encode(CODE)) < len(CODE) / 3


def test_the_same_documents_train_the_same_model(make, tmp_path, monkeypatch):
    assert train(spans_of(CODE), 400) == train(spans_of(CODE), 400)
    assert train(spans_of(CODE), 400) != train(spans_of(CODE + "more"), 401)


def test_training_reads_an_even_sample_of_a_large_corpus(monkeypatch):
    monkeypatch.setattr(sentencepiece_training, "SAMPLE_BYTES", 20_000)
    texts = [chr(ord("a") + k % 26) * 8_000 for k in range(52)]
    sample = list(sentencepiece_training._sentences(spans_of(*texts)))
    assert sum(map(len, sample)) == pytest.approx(20_000, abs=4_000)
    assert len({text[0] for text in sample}) == len(sample) and max(map(len, sample)) == 4_000


def test_a_trained_tokenizer_is_kept(make, tmp_path):
    lines = []
    first = make("sentencepiece", 300, announce=lines.append)
    assert lines == ["training a SentencePiece tokenizer with 300 pieces"]
    (model,) = (tmp_path / "tokenizers").glob("*.model")
    assert make("sentencepiece", 300, announce=pytest.fail).digest == first.digest
    model.write_bytes(model.read_bytes()[:-100])
    assert make("sentencepiece", 300).digest == first.digest
    assert make(str(model), 300).encode(CODE) == first.encode(CODE)
    assert make("sentencepiece", 300, CODE + "other").digest != first.digest
    assert len(list((tmp_path / "tokenizers").glob("*.model"))) == 2


def test_thousands_of_characters_leave_room_for_pieces(make):
    chinese = "".join(chr(0x4E00 + (k * k) % 5003) + "的是" for k in range(20_000))
    tokenizer = make("sentencepiece", 600, chinese)
    assert tokenizer.vocab_size == 600 and tokenizer.decode(tokenizer.encode(chinese)) == chinese


@pytest.mark.parametrize("vocab_size", [259, 260, 270, 300])
def test_a_vocabulary_may_be_very_small(make, vocab_size):
    assert make("sentencepiece", vocab_size).vocab_size == vocab_size


def test_errors_say_what_would_work(make, tmp_path):
    (tmp_path / "text.model").write_text("no model")
    bare = io.BytesIO()
    options = {"model_writer": bare, "vocab_size": 40, "eos_id": -1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(CODE.split("\n")), **options)
    (tmp_path / "bare.model").write_bytes(bare.getvalue())
    for arguments, message in {
        (
            "byte",
            255,
        ): r"model.vocab_size=255 is less than the 256 ids of data.tokenizer=byte; use --config.model.vocab_size=256",
        ("sentencepiece", 258): r"model.vocab_size=258 is too small for .*; use --config.model.vocab_size=259 or more",
        ("sentencepiece", 300, "\n\n"): r"no text to train data.tokenizer=sentencepiece on; use byte",
        (
            "bpe",
            300,
        ): r"data.tokenizer=bpe: No such file or directory; use byte, numbers, sentencepiece, or the path of a",
        (str(tmp_path), 300): r"data.tokenizer=/.*: Is a directory; use byte",
        (str(tmp_path / "text.model"), 300): r"data.tokenizer=.*text.model: not a SentencePiece model",
        (str(tmp_path / "bare.model"), 300): r"data.tokenizer=.*bare.model: has no end-of-sentence piece",
    }.items():
        with pytest.raises(DataError, match=message) as caught:
            make(*arguments)
        assert "\n" not in str(caught.value)


def test_an_open_text_leaves_its_last_piece_to_be_chosen_among_those_that_begin_with_it(trained):
    text, tokenizer = "if value > ", trained
    tokens, allowed = tokenizer.open_end(tokenizer.encode(text))
    whole = tokenizer.encode(text)
    assert tokens == whole[:-1] and allowed[whole[-1]] and 0 < allowed.sum() < tokenizer.vocab_size
    for choice in np.flatnonzero(allowed):
        assert tokenizer.decode([*tokens, int(choice)]).startswith(text)


def test_what_is_no_text_never_goes_on_an_open_text():
    tokenizer = SentencePieceTokenizer(train(spans_of(CODE.replace(">", "<")), 400), "test")
    _, allowed = tokenizer.open_end(tokenizer.encode("a<"))
    pieces = [tokenizer._model.id_to_piece(int(token)) for token in np.flatnonzero(allowed)]
    assert "<" in pieces and not [piece for piece in pieces if piece in ("<unk>", "</s>") or piece.startswith("<0x")]


def test_an_open_text_of_bytes_may_go_on_with_any_byte():
    tokens, allowed = ByteTokenizer().open_end(ByteTokenizer().encode("a "))
    assert tokens == [97, 32] and allowed.all()


def test_a_number_up_to_99_is_a_token():
    tokenizer = open_tokenizer("numbers")
    for text, count in (("3 4 8 12=27:", 10), ("12+8=20;3 4 20\n?y", 14), ("0 007 123", 8), ("", 0)):
        tokens = tokenizer.encode(text)
        assert tokenizer.decode(tokens) == text and len(tokens) == count, text
        assert all(0 <= token < tokenizer.vocab_size for token in tokens)
        assert tokenizer.encode_batch([text, "a"])[0].tolist() == tokens
    assert tokenizer.encode("7") == [128 + 7] and tokenizer.encode("y") == [ord("y")]
    assert tokenizer.encode("é1") == [129], "characters that are not ASCII have no token"
    assert tokenizer.decode([65, 500]) == "A"
