# SPDX-License-Identifier: Apache-2.0
"""A small model of whose batches each takes SECONDS to read; for benchmarks/tuning.py."""

import os
import time

from configs import tiny
from input_pipeline.sources import source
from input_pipeline.synthetic import MarkovWindows

SECONDS = float(os.environ.get("SLOW_SECONDS", "0"))


class SlowWindows(MarkovWindows):
    """Windows of a Markov chain; a batch takes SECONDS longer."""

    def read(self, indices, sequence_length):
        """Return the windows, late."""
        time.sleep(SECONDS)
        return super().read(indices, sequence_length)


@source
def slow(data, path, *, vocab_size, seed, **unused):
    """Return windows to train on and held-out ones."""
    return SlowWindows(vocab_size, seed, 1 << 20, "train"), SlowWindows(vocab_size, seed, 1 << 14, "heldout")


def get_config():
    """Return the recipe."""
    config = tiny.get_config()
    config.data.source = "slow"
    config.model.update(num_layers=4, embed_dim=64, num_heads=2, num_kv_heads=2, mlp_dim=192, vocab_size=256)
    config.train.update(sequence_length=64, global_batch=8, steps=400, eval_every=0, save_every=0)
    config.train.log_every = 20
    config.evaluation.update(batches=1, sample_tokens=0)
    return config
