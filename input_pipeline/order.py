# SPDX-License-Identifier: Apache-2.0
"""The order of examples: a keyed permutation that gives any index in O(1).

A Feistel network permutes the smallest power of two that is at least the size. An image outside the size is permuted
again until it falls inside (cycle walking; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002, section 4:
fewer than two permutations on average). So resuming at example k costs nothing, and no table of the order is needed.
"""

import numpy as np

MASK = (1 << 64) - 1
ROUNDS = 8


def permute(index, size: int, key):
    """Return the image of `index` under the permutation of range(size) that `key` selects.

    The index is an int or an integer array, 0 <= index < size. The result is an int or an int64 array of its shape. The
    key is an int of 64 bits, or a uint64 array of the shape of the index.
    """
    values = np.array(index, dtype=np.uint64, ndmin=1)
    assert values.size == 0 or int(values.max()) < size, f"index outside range({size})"
    keys = np.broadcast_to(np.asarray(key, np.uint64), values.shape)
    values = _feistel(values, size, keys)
    while (outside := values >= size).any():
        values[outside] = _feistel(values[outside], size, keys[outside])
    return int(values[0]) if np.ndim(index) == 0 else values.astype(np.int64)


def mix(values) -> np.ndarray:
    """Hash 64 bits to 64 bits, elementwise and one to one; uint64 array of at least one dimension.

    Source: the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast Splittable Pseudorandom Number
    Generators", 2014, figure 16; constants of variant 13).
    """
    z = np.array(values, dtype=np.uint64, ndmin=1) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def example_windows(examples: np.ndarray, num_windows: int, seed: int) -> np.ndarray:
    """Return the window of each example of the run, int64 of the same shape. Every epoch has its own order.

    Examples are int64, counted from the start of the run. `num_windows` is the number of windows in an epoch.
    """
    examples = np.asarray(examples, np.int64)
    epochs = (examples // num_windows).astype(np.uint64)
    return permute(examples % num_windows, num_windows, mix(mix(seed & MASK) + epochs))


def _feistel(values: np.ndarray, size: int, keys: np.ndarray) -> np.ndarray:
    """Permute uint64 values below the power of two that covers `size`; the rounds change both halves in turn."""
    bits = (size - 1).bit_length()
    low_bits = np.uint64(bits // 2)
    low_mask, high_mask = (np.uint64((1 << width) - 1) for width in (bits // 2, bits - bits // 2))
    high, low = values >> low_bits, values & low_mask
    for number in range(ROUNDS):
        round_keys = mix(keys + np.uint64(number))
        if number % 2:
            low = low ^ (mix(high ^ round_keys) & low_mask)
        else:
            high = high ^ (mix(low ^ round_keys) & high_mask)
    return (high << low_bits) | low
