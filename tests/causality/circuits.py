# SPDX-License-Identifier: Apache-2.0
"""Decoders with a circuit whose place is known: one head copies a name to where it is asked for."""

import functools

import jax
import numpy as np

from tests.support import make_model, model_config

NAMES, ASK, FILLERS = range(8), 8, range(9, 20)  # tokens
FLAG, ASKED, COPIED, UNREAD = 8, 9, 10, 18  # dimensions of the stream: token is a name; it asks; two copies begin here
LAYERS, HEADS, HEAD_DIM, EMBED_DIM, LENGTH = 3, 4, 8, 32, 6
SLOW = HEAD_DIM // 2 - 1  # dimension of a head that rotary positions hardly turn


@functools.cache
def _plain():
    """Return (graph, params) of the decoder; the same graph each time, so that programs are compiled once."""
    config = model_config(
        vocab_size=20, embed_dim=EMBED_DIM, num_layers=LAYERS, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM,
        embed_scale=1.0,
    )  # fmt: skip
    return make_model(config)


def planted(layer: int, head: int, seed: int = 0, spread: float = 0.08):
    """Return (graph, params) of a decoder in which this head copies the name to where the output head reads it.

    The next head is a decoy: it copies the name too, twice as large, to where nothing reads it. All other weights are
    random, of this spread.
    """
    graph, params = _plain()
    rng = np.random.default_rng(seed)
    params = jax.tree.map(lambda leaf: (spread * rng.standard_normal(leaf.shape)).astype(np.float32), params)
    for norm in (params["norm"], *(params["stack"]["blocks"][name] for name in ("attention_norm", "mlp_norm"))):
        norm["scale"][:] = 1
    embedding, kernel = params["embed"]["embedding"], params["head"]["kernel"]
    embedding[:], kernel[:] = 0, 0
    embedding[NAMES, NAMES] = embedding[NAMES, FLAG] = embedding[ASK, ASKED] = 1
    embedding[FILLERS, UNREAD:] = rng.standard_normal((len(FILLERS), EMBED_DIM - UNREAD)) / 4
    kernel[[COPIED + name for name in NAMES], NAMES] = 4
    attention = {name: weight[layer] for name, weight in params["stack"]["blocks"]["attention"].items()}
    for copier, size, to in ((head, 1, COPIED), ((head + 1) % HEADS, 2, UNREAD)):
        for name in ("query", "key", "value"):
            attention[name][:, copier] = 0
        attention["query"][ASKED, copier, SLOW] = attention["key"][FLAG, copier, SLOW] = 3
        attention["out"][copier] = 0
        for name in NAMES:
            attention["value"][name, copier, name] = size
            attention["out"][copier, name, to + name] = 1
    return graph, params


def prompts(seed: int = 0) -> tuple[np.ndarray, np.ndarray, int]:
    """Return two prompts that differ in their name, and its position; the last token asks."""
    rng = np.random.default_rng(seed)
    clean = np.array([*rng.choice(FILLERS, LENGTH - 1), ASK], np.int32)
    position = int(rng.integers(0, LENGTH - 1))
    clean[position], other = rng.choice(NAMES, 2, replace=False)
    corrupt = clean.copy()
    corrupt[position] = other
    return clean, corrupt, position
