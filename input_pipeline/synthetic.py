# SPDX-License-Identifier: Apache-2.0
"""Windows of a random process whose entropy is known, so that a learner's attainable loss is too."""

import numpy as np

from input_pipeline.cache import digest_of_json
from input_pipeline.errors import DataError
from input_pipeline.order import MASK, mix, permute
from input_pipeline.tasks.hashes import stream_key
from input_pipeline.windows import Windows


class MarkovWindows(Windows):
    """A Markov chain over all the tokens in which each has four successors; a window source without files.

    A hidden walk on a circle of vocab_size places advances by one of four random strides with probabilities 1/2, 1/4,
    1/8, 1/8, and a random labelling maps places to tokens. All tokens are equally frequent, and the entropy of a token
    given the previous one is exactly 1.75 bits, 1.2130 nats. A window is a pure function of (seed, stream, index);
    chain, labelling and digest depend only on vocab_size and seed. Raises DataError if vocab_size is below 4.
    """

    def __init__(self, vocab_size: int, seed: int, num_tokens: int, stream: str):
        if vocab_size < 4:
            raise DataError(f"model.vocab_size={vocab_size} is too small for data.source=synthetic; use 4 or more")
        self.num_tokens = num_tokens
        self.digest = digest_of_json(["synthetic", vocab_size, seed])
        (chain,) = mix([seed & MASK])
        self._walk_key = stream_key(seed, stream)
        self._labels = permute(np.arange(vocab_size), vocab_size, chain)
        strides = permute(np.arange(4), vocab_size, ~chain)
        self._strides = strides[[0, 0, 0, 0, 1, 1, 2, 3]]

    def num_examples(self, sequence_length: int) -> int:
        return -(-self.num_tokens // sequence_length)

    def read(self, indices: np.ndarray, sequence_length: int) -> dict[str, np.ndarray]:
        """Return the windows `indices`: int32 [len(indices), T] each, one segment."""
        starts = mix(mix(np.asarray(indices, np.uint64)) ^ self._walk_key)
        draws = mix(starts[:, None] + np.arange(sequence_length + 1, dtype=np.uint64))
        walk = self._strides[(draws >> np.uint64(61)).astype(np.int64)]
        walk[:, 0] = (starts % np.uint64(len(self._labels))).astype(np.int64)
        stream = self._labels[np.cumsum(walk, axis=1) % len(self._labels)].astype(np.int32)
        positions = np.broadcast_to(np.arange(sequence_length, dtype=np.int32), stream[:, 1:].shape)
        return {
            "tokens": stream[:, :-1].copy(),
            "targets": stream[:, 1:].copy(),
            "segments": np.ones_like(positions),
            "positions": positions.copy(),
        }
