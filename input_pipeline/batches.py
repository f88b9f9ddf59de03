# SPDX-License-Identifier: Apache-2.0
"""Batches of a run, read ahead by tf.data: which examples a step takes, and which rows a process reads."""

import atexit
import os
from collections.abc import Callable, Iterator
from functools import cache
from weakref import WeakSet

import numpy as np

from input_pipeline.errors import DataError
from input_pipeline.order import example_windows
from input_pipeline.packing import KEYS

READERS = 2  # threads
PREFETCHED = 4  # batches

Batch = dict[str, np.ndarray]
_unfinished: WeakSet[Iterator[Batch]] = WeakSet()


def training_batches(
    windows, *, seed: int, sequence_length: int, global_batch: int, rows: np.ndarray, first_example: int, num_steps: int
) -> Iterator[Batch]:
    """Return the batches of `num_steps` steps, this process's rows of them.

    Step s takes the examples first_example + s * global_batch + rows. Example i is a pure function of
    (seed, i, windows): pass i // n over the n windows has an order of its own. So neither a stop, nor the
    number of processes, nor a changed batch alters which example comes when.

    Args:
        windows: a window source.
        rows: int array, which of range(global_batch) to read.

    Returns:
        iterator of int32 [len(rows), sequence_length] each: tokens, targets, segments, positions.

    Raises:
        DataError: there are fewer tokens than one sequence.
    """
    if windows.num_tokens < sequence_length:
        raise DataError(
            f"train.sequence_length={sequence_length} is longer than the {windows.num_tokens:,} tokens to train on; "
            f"use at most {windows.num_tokens}, or more text"
        )
    rows, num_windows = np.asarray(rows, np.int64), windows.num_examples(sequence_length)

    def read(step: int) -> Batch:
        examples = first_example + step * global_batch + rows
        return windows.read(example_windows(examples, num_windows, seed), sequence_length)

    return _read_ahead(read, num_steps)


def evaluation_batches(
    windows, *, sequence_length: int, global_batch: int, rows: np.ndarray, num_batches: int | None
) -> Iterator[Batch]:
    """Return windows in stored order, each once: all of them, or as many as fill num_batches, evenly spread.

    The last batch is filled up with rows that are zero throughout, segments (the loss weight) too.
    Arguments and results otherwise as in `training_batches`.
    """
    rows, num_windows = np.asarray(rows, np.int64), windows.num_examples(sequence_length)
    taken = num_windows if num_batches is None else min(num_windows, num_batches * global_batch)

    def read(step: int) -> Batch:
        places = step * global_batch + rows
        inside, indices = places < taken, places * num_windows // taken
        batch = {key: np.zeros((len(rows), sequence_length), np.int32) for key in KEYS}
        for key, values in windows.read(indices[inside], sequence_length).items():
            batch[key][inside] = values
        return batch

    return _read_ahead(read, -(-taken // global_batch))


def _read_ahead(read: Callable[[int], Batch], num_steps: int) -> Iterator[Batch]:
    """Yield read(0), read(1), ... in order, some of them read before they are asked for."""
    tf = _tensorflow()

    def arrays(step: np.ndarray) -> list[np.ndarray]:
        batch = read(int(step))
        return [batch[key] for key in KEYS]

    steps = tf.data.Dataset.range(num_steps)
    batches = steps.map(
        lambda step: tf.numpy_function(arrays, [step], [tf.int32] * len(KEYS), stateful=False),
        num_parallel_calls=READERS,
        deterministic=True,
    )
    options = tf.data.Options()
    options.threading.private_threadpool_size = READERS
    options.autotune.enabled = False
    iterator = batches.prefetch(PREFETCHED).with_options(options).as_numpy_iterator()
    generator = (dict(zip(KEYS, batch, strict=True)) for batch in iterator)
    _unfinished.add(generator)
    return generator


@cache
def _tensorflow():
    """Import TensorFlow, silent and without a GPU."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")  # announces itself past the log level; nothing is computed here
    import tensorflow as tf

    if tf.config.list_physical_devices("GPU"):
        tf.config.set_visible_devices([], "GPU")
    atexit.register(_close_unfinished)
    return tf


def _close_unfinished() -> None:
    """End reading ahead while Python still runs: TensorFlow would wait forever for threads that call into it."""
    for generator in list(_unfinished):
        generator.close()
