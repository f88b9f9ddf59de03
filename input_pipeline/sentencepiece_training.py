# SPDX-License-Identifier: Apache-2.0
"""Trains a SentencePiece model on documents: a byte-pair encoding with byte fallback that does not change text.

It does not normalise, adds no leading space, and keeps white space in separate pieces.
"""

import io
import re
from collections import Counter
from collections.abc import Iterator

import sentencepiece

from input_pipeline.errors import DataError
from input_pipeline.reading.documents import Span

NUM_FIXED = 256 + 2  # byte pieces, <unk>, end of document: in every trained vocabulary
SAMPLE_BYTES = 16_000_000  # of training text at most; the trainer needs many times as much memory
SENTENCE_CHARACTERS = 4_000  # the trainer's unit; several lines, so that pieces may cross a line's end
# Characters that cannot be part of a piece: U+2581, NUL, and SentencePiece's own marks.
NOT_IN_PIECES = "\0\5\t\u2581\u2585"
# Chosen by the bits per byte of a small model trained on the standard library's source: pieces that cross white
# space give about the same; pieces that also cross scripts and numbers give slightly more. Unigram trains for minutes,
# BPE for seconds.
OPTIONS = {
    "model_type": "bpe",  # depends only on counts, so it is the same on every machine
    "byte_fallback": True,
    "character_coverage": 0.9999,  # rarer characters are encoded as bytes
    "normalization_rule_name": "identity",
    "add_dummy_prefix": False,
    "remove_extra_whitespaces": False,
    "allow_whitespace_only_pieces": True,
    "split_by_whitespace": False,
    "max_sentence_length": 4 * SENTENCE_CHARACTERS,
    "hard_vocab_limit": False,  # a small corpus may give fewer pieces
    "unk_id": 0,
    "eos_id": 1,
    "bos_id": -1,
    "pad_id": -1,
    "num_threads": 1,  # the value is stored in the model; more threads are not faster
    "minloglevel": 2,
}


def train(spans: list[Span], vocab_size: int) -> bytes:
    """Return a SentencePiece model trained on an even sample of the documents, the same each time.

    It has vocab_size pieces, or fewer if the text gives fewer. Raises DataError if there is no text to learn from.
    """
    sentences = list(_sentences(spans))
    characters = Counter()
    for sentence in sentences:
        characters.update(sentence)
    # A script of thousands of characters (Chinese) gets pieces for the frequent ones; bytes encode the rest.
    rare = [char for char, _ in characters.most_common()[max(1, (vocab_size - NUM_FIXED) // 2) :]]
    outside = re.compile(f"[{re.escape(NOT_IN_PIECES + ''.join(rare))}]+")
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=(part for sentence in sentences for part in outside.split(sentence) if part),
            model_writer=model,
            vocab_size=vocab_size,
            **OPTIONS,
        )
    except RuntimeError as error:
        raise DataError("the documents have no text to train data.tokenizer=sentencepiece on; use byte") from error
    return model.getvalue()


def _sentences(spans: list[Span]) -> Iterator[str]:
    """Yield runs of characters spread evenly over the documents, at most SAMPLE_BYTES in total."""
    kept = min(1.0, SAMPLE_BYTES / sum(span.size for span in spans))
    number = 0
    for text in (text for span in spans for text in span.text()):
        for start in range(0, len(text), SENTENCE_CHARACTERS):
            number += 1
            if int(number * kept) > int((number - 1) * kept):
                yield text[start : start + SENTENCE_CHARACTERS]
