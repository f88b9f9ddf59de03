# SPDX-License-Identifier: Apache-2.0
"""Hashes that decide what a stream draws, and what is held out."""

import hashlib

import numpy as np

from input_pipeline.order import MASK, mix


def stream_key(seed: int, stream: str) -> np.uint64:
    """Return the key of the random draws of a stream: 64 bits that depend on the seed and its name."""
    name = int.from_bytes(hashlib.blake2b(stream.encode()).digest()[:8])
    (key,) = mix([(seed & MASK) ^ name])
    return key


def is_held_out(content: bytes, share: float) -> bool:
    """Return whether the hash of a content is in the lowest `share` of all hashes."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest()) < share * 2**64
