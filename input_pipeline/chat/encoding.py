# SPDX-License-Identifier: Apache-2.0
"""Encodes conversations as stored tokens: ids, with flags for whether each is learned and for its sequence.

With a tokenizer.json, the text between two ends of documents is tokenized as one text, as in `transformers`, and a
token with any learned character is learned. If pieces were tokenized separately, some tokenizers would add a space
before each. Other tokenizers encode each piece separately, so no token crosses a border, as no token crosses the end of
a prompt.
"""

import itertools
import json

import numpy as np

from input_pipeline.chat.template import MarkedText, PlainFormat, Template
from input_pipeline.errors import DataError
from input_pipeline.tokenization import AnyTokenizer, HuggingFaceTokenizer

LEARNED = 1 << 30  # added to the id of a token that is a target
SECOND = 1 << 29  # added to those of a document's second sequence
IDS = SECOND - 1  # the bits of an id


def format_of_tokenizer(tokenizer: AnyTokenizer, name: str) -> PlainFormat | Template:
    """Return the format of a tokenizer's conversations: its own template, if it has one, or the plain format.

    Raises:
        DataError: the template cannot be read, or is one of several; the message calls the tokenizer `name`.
    """
    if not isinstance(tokenizer, HuggingFaceTokenizer) or tokenizer.chat_template == "":
        return PlainFormat()
    if tokenizer.chat_template is None:
        raise DataError(
            f"data.tokenizer={name}: none of its chat templates is named default; rename one in tokenizer_config.json"
        )
    try:
        return Template(tokenizer.chat_template, tokenizer.special_tokens)
    except ValueError as error:
        raise DataError(f"data.tokenizer={name}: its chat template is invalid: {error}; fix it there") from error


class ChatTokenizer:
    """Encodes the documents of input_pipeline/chat/records.py for input_pipeline/shards.py.

    `vocab_size` is that of the stored numbers, which are ids with marks. The other attributes are as a tokenizer's.
    """

    vocab_size = 1 << 31

    def __init__(self, tokenizer: AnyTokenizer):
        self._tokenizer = tokenizer
        self.end_of_document, self.digest = tokenizer.end_of_document, f"chat-{tokenizer.digest}"

    def encode_batch(self, documents: list[str]) -> list[np.ndarray]:
        """Return an int32 array for each document: the ids of its sequences, one after the other, with marks."""
        found = [[self._runs(sequence) for sequence in json.loads(document)] for document in documents]
        runs = [run for sequences in found for sequence in sequences for run in sequence]
        encoded = iter(self._encode(runs))
        return [
            np.concatenate([next(encoded) + number * SECOND for number, sequence in enumerate(of) for _ in sequence])
            for of in found
        ]

    def encode(self, pieces: list[MarkedText]) -> list[int]:
        """Return the ids of one sequence, without marks."""
        return (np.concatenate(self._encode(self._runs(pieces))) & IDS).tolist()

    def _runs(self, pieces: list[MarkedText]) -> list[list[MarkedText]]:
        """Group the pieces that are tokenized as one text; an end of document is a group of its own."""
        if not isinstance(self._tokenizer, HuggingFaceTokenizer):
            return [[piece] for piece in pieces]
        runs = []
        for is_end, group in itertools.groupby(pieces, key=lambda piece: piece[0] is None):
            run = list(group)
            runs += [[end] for end in run] if is_end else [run]
        return runs

    def _encode(self, runs: list[list[MarkedText]]) -> list[np.ndarray]:
        texts = ["".join(text for text, _ in run) for run in runs if run[0][0] is not None]
        if isinstance(self._tokenizer, HuggingFaceTokenizer):
            encoded = iter(self._tokenizer.encode_spans(texts))
        else:
            encoded = iter([(tokens, None) for tokens in self._tokenizer.encode_batch(texts)])
        end = np.array([self.end_of_document])
        return [_marked(run, *((end, None) if run[0][0] is None else next(encoded))) for run in runs]


def _marked(run: list[MarkedText], tokens: np.ndarray, spans: np.ndarray | None) -> np.ndarray:
    """Return int32 ids, with LEARNED added to those that are learned.

    Args:
        spans: [tokens, 2], the characters of each token in the text of the run; None: the run is one piece.
    """
    ids = np.asarray(tokens, np.int32)
    if spans is None:
        return ids + run[0][1] * LEARNED
    starts, ends = spans.T
    borders = itertools.pairwise([0, *itertools.accumulate(len(text) for text, _ in run)])
    learned = np.zeros(len(ids), bool)
    for (begin, end), (_, counts) in zip(borders, run, strict=True):
        learned |= counts & (starts < end) & (ends > begin)
    return ids + learned * np.int32(LEARNED)
