# SPDX-License-Identifier: Apache-2.0
"""A toy for tests/test_additions.py: train on continuations that the live model samples between updates."""

import jax.numpy as jnp
import numpy as np

from objectives import language_modeling
from objectives.language_modeling import LanguageModeling
from objectives.objective import Sampled

PROMPT = 4  # tokens
SAMPLED: list = []  # the tokens of each step


def make(config) -> "SelfTraining":
    """Return the objective of a configuration."""
    return SelfTraining(**vars(language_modeling.make(config)))


class SelfTraining(LanguageModeling):
    """Next-token prediction of the likeliest continuation of each row's first tokens."""

    def sample_batch(self, engine, batch, key):
        """Return the rows with their continuations; nothing follows the last token."""
        tokens = np.asarray(batch["tokens"])[:, :PROMPT]
        logits_BV, cache = engine.prefill(tokens)
        while tokens.shape[1] < self.length:
            likeliest = np.asarray(jnp.argmax(logits_BV, axis=-1), np.int32)[:, None]
            after_each, cache = engine.extend(cache, likeliest)
            logits_BV, tokens = after_each[:, -1], np.concatenate([tokens, likeliest], axis=1)
        SAMPLED.append(tokens)
        ones = np.ones_like(tokens)
        batch = {
            "tokens": tokens, "targets": np.concatenate([tokens[:, 1:], -ones[:, :1]], axis=1), "segments": ones,
            "positions": np.cumsum(ones, axis=1, dtype=np.int32) - 1,
        }  # fmt: skip
        return Sampled(batch)
