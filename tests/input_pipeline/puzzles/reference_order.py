# SPDX-License-Identifier: Apache-2.0
"""The order in which the published implementation takes examples, to compare with it; ours is `PuzzleEpochs.order`.

It is made of numpy's Philox generator, iteration by iteration, and depends on the batch, whose rest an iteration
drops; so no example of it can be found without those before it, and a run that changes its batch changes its order.
"""

import numpy as np


def reference_batches(
    groups: np.ndarray, puzzles: np.ndarray, *, seed: int, iteration: int, epochs: int, global_batch: int
) -> np.ndarray:
    """Return the examples of each full batch of an iteration: int64 [batches, global_batch].

    A puzzle of several examples gives them in stored order, where the published one draws them.

    Args:
        groups: [groups + 1], first puzzles. puzzles: [puzzles + 1], first examples.
        iteration: counted from 1.
        epochs: in an iteration; each visits every group once.
    """
    generator = np.random.Generator(np.random.Philox(seed=seed + iteration))
    order = np.concatenate([generator.permutation(len(groups) - 1) for _ in range(epochs)])
    batches, batch = [], []
    for group in order.tolist():
        puzzle = generator.integers(groups[group], groups[group + 1])
        batch += range(puzzles[puzzle], puzzles[puzzle + 1])[: global_batch - len(batch)]
        if len(batch) == global_batch:
            batches.append(batch)
            batch = []
    return np.array(batches, np.int64).reshape(-1, global_batch)


def rows_of(batch: np.ndarray, process: int, processes: int) -> np.ndarray:
    """Return the part of a global batch that one of several processes takes."""
    size = len(batch) // processes
    return batch[process * size : (process + 1) * size]
