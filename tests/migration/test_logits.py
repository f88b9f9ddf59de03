# SPDX-License-Identifier: Apache-2.0
"""Logits of a model that need not fit into memory."""

import weakref

import numpy as np
from flax.traverse_util import flatten_dict

from configs import base
from migration import logits

LAYERS, LENGTH = 12, 512


def test_weights_of_few_layers_are_in_memory():
    """Without waiting, the queue of computations keeps the weights of all 12; JAX frees one or two layers late."""
    config = base.get_config()
    config.model.update(num_layers=LAYERS, embed_dim=128, mlp_dim=512, num_heads=2, num_kv_heads=2, max_length=LENGTH)
    run = logits.float32_run(config)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(run.abstract_state.params, sep=".").items()}
    living, most = {}, 0

    def read(path, index, rows):
        nonlocal most
        shape = shapes[path] if rows is None else (len(rows), *shapes[path][1:])
        values = np.full(shape[len(index) :], 0.1, np.float32)
        living[path, index] = weakref.ref(values, lambda _: living.pop((path, index)))
        most = max(most, len({index for _, index in living if index}))
        return values

    assert len(list(logits.of_run(run, read, np.zeros((2, LENGTH), np.int32)))) == 2
    assert most <= 3
