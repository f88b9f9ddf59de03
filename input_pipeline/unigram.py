# SPDX-License-Identifier: Apache-2.0
"""The loss of a unigram model, which knows only the frequency of each token."""

from collections.abc import Sequence

import numpy as np

from input_pipeline.shards import TokenWindows

MOST_TOKENS = 1 << 24  # tokens of a split that are counted, spread over its shards


def unigram_bits_per_byte(train: Sequence[TokenWindows], heldout: TokenWindows, vocab_size: int) -> float:
    """Return the cross-entropy of the held-out tokens under their frequencies in training, in bits per byte of text.

    Frequencies are counts plus one, over all parts of a mixture together. The result is never more than under a uniform
    distribution, so an untrained model does not beat it, whatever the tokenizer.
    """
    seen = 1 + sum(part.token_counts(MOST_TOKENS, vocab_size) for part in train)
    counts = heldout.token_counts(MOST_TOKENS, vocab_size)
    bits_per_token = -np.sum(counts * np.log2(seen / seen.sum())) / counts.sum()
    return float(min(bits_per_token, np.log2(vocab_size)) * heldout.num_tokens / heldout.num_bytes)
