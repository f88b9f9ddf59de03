# SPDX-License-Identifier: Apache-2.0
"""Batches of a run, read ahead by tf.data: which examples a step takes, and which rows a process reads."""

import atexit
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from weakref import WeakSet

import numpy as np

from input_pipeline.errors import DataError
from input_pipeline.mixture import Mixture
from input_pipeline.tensorflow_import import tensorflow
from input_pipeline.windows import Windows, read_arrays

MOST_AHEAD = 8  # batches, the default's limit
MOST_READERS = 4  # the default's limit of threads, which compete for Python's lock
PREFETCHED_BYTES = 256 << 20  # the default; 2 to 8 batches
BEFORE_IMPORT = 4  # batches; the import would compete with the first step for the processors
MOST_BEFORE_IMPORT = 32  # batches; then the import is done, and the memory of the process stops growing

Batch = dict[str, np.ndarray]
OnLost = Callable[[DataError], object]
_unfinished: WeakSet[Iterator[Batch]] = WeakSet()


def training_batches(
    mixture: Mixture,
    *,
    seed: int,
    sequence_length: int,
    global_batch: int,
    rows: np.ndarray,
    first_example: int,
    num_steps: int,
    readers: int = 0,
    prefetch: int = 0,
    ahead: int = 0,
    on_lost: OnLost = str,
) -> Iterator[Batch]:
    """Return the batches of `num_steps` steps, this process's rows of them.

    Step s takes the examples first_example + s * global_batch + rows, counted as the run takes them. Example number t
    is a pure function of (seed, t, mixture). So neither a stop, nor the number of processes, nor a changed batch size
    alters the order of examples.

    Args:
        rows: int array, which of range(global_batch) to read.
        first_example: how many the run has taken; those that the mixture skips are not counted.
        readers: number of threads; 0: the number of cores, up to MOST_READERS.
        prefetch: number of batches read ahead; 0: 2 to MOST_AHEAD, within PREFETCHED_BYTES.
        ahead: how many later batches have been read when a batch is yielded.
        on_lost: called if one of these cannot be read, with the error that is raised when that batch is requested.

    Returns:
        iterator of {name: int32 [len(rows), ...]}, with the arrays that the window sources name. Those of stored tokens
            are tokens, targets, segments and positions, [len(rows), sequence_length] each.

    Raises DataError if there are fewer tokens than one batch, or in some part than one sequence. The iterator raises it
    if a shard changed or vanished, and cannot be built again.
    """
    check_enough(mixture, sequence_length, global_batch)
    rows = np.asarray(rows, np.int64)

    def read(step: int) -> Batch:
        return mixture.read(first_example + step * global_batch + rows, sequence_length, seed)

    batches = _read_ahead(read, mixture.arrays, num_steps, len(rows) * sequence_length, readers, prefetch)
    return _known(batches, ahead, on_lost)


def evaluation_batches(
    windows: Windows,
    *,
    sequence_length: int,
    global_batch: int,
    rows: np.ndarray,
    num_batches: int | None,
    readers: int = 0,
    prefetch: int = 0,
    on_lost: OnLost | None = None,
) -> Iterator[Batch]:
    """Return windows in stored order, each once: all of them, or enough for num_batches, evenly spread.

    The last batch is padded with the window source's fill values; those of tokens are zero, also for segments (the loss
    weight). With `on_lost`, a batch that cannot be read is padding too, and `on_lost` is called with the error. All
    processes of a run can then continue until they agree to stop. Other arguments and results are as in
    `training_batches`.
    """
    rows, num_windows = np.asarray(rows, np.int64), windows.num_examples(sequence_length)
    taken = num_windows if num_batches is None else min(num_windows, num_batches * global_batch)

    def read(step: int) -> Batch:
        places = step * global_batch + rows
        inside = places < taken
        # Multiply only if needed: from 3.04e9 windows on, the product overflows int64.
        indices = places if taken == num_windows else places * num_windows // taken
        batch = {}
        for key, values in of_windows(indices[inside]).items():
            batch[key] = np.full((len(rows), *values.shape[1:]), windows.fills[key], values.dtype)
            batch[key][inside] = values
        return batch

    def of_windows(indices: np.ndarray) -> Batch:
        try:
            return read_arrays(windows, indices, sequence_length)
        except DataError as error:
            if on_lost is None:
                raise
            on_lost(error)
        some = read_arrays(windows, np.zeros(0, np.int64), sequence_length)
        return {key: np.full((len(indices), *of.shape[1:]), windows.fills[key], of.dtype) for key, of in some.items()}

    return _read_ahead(
        read, tuple(windows.fills), -(-taken // global_batch), len(rows) * sequence_length, readers, prefetch
    )


def check_enough(mixture: Mixture, sequence_length: int, global_batch: int) -> None:
    """Raise DataError if there are fewer tokens than a batch, or if a part has fewer than a sequence."""
    for number in mixture.used:
        if (part := mixture.parts[number]).num_tokens < sequence_length:
            which = f" in part {number + 1} of data.mixture or data.stream" if len(mixture.parts) > 1 else ""
            raise DataError(
                f"train.sequence_length={sequence_length} is longer than the {part.num_tokens:,} tokens to train "
                f"on{which}; use at most {part.num_tokens}, or more text"
            )
    most = mixture.num_examples(sequence_length)
    if most < global_batch and not any(part.batch_exceeds_pass for part in mixture.parts):
        raise DataError(
            f"train.global_batch={global_batch} is more than the {most:,} rows of train.sequence_length="
            f"{sequence_length} to train on; use --config.train.global_batch={most} or less, or more text"
        )


def faster_reading(data) -> dict[str, int]:
    """Return keys that may make reading faster: twice the readers, and twice the batches ahead, of `config.data`."""
    readers, prefetch = data.readers or MOST_READERS, data.prefetch or MOST_AHEAD
    return {"data.readers": 2 * readers, "data.prefetch": max(4, 2 * prefetch)}


def _read_ahead(
    read: Callable[[int], Batch], keys: tuple[str, ...], num_steps: int, batch_tokens: int, readers: int, prefetch: int
) -> Iterator[Batch]:
    """Yield read(0), read(1), ... in order, some of them read before they are asked for once TensorFlow is imported.

    The import takes seconds. It begins after the first step, and only steps of a few milliseconds wait for it.
    """
    readers = readers or min(os.cpu_count(), MOST_READERS)
    prefetch = prefetch or min(max(2, PREFETCHED_BYTES // max(1, batch_tokens * 4 * len(keys))), MOST_AHEAD)
    for step in range(num_steps):
        if step >= BEFORE_IMPORT and (importing_tensorflow().done() or step == MOST_BEFORE_IMPORT):
            left = range(step, num_steps)
            yield from _by_tf_data(importing_tensorflow().result(), read, keys, left, readers, prefetch)
            return
        batch = read(step)
        yield {key: batch[key] for key in keys}


def _by_tf_data(
    tf, read: Callable[[int], Batch], keys: tuple[str, ...], steps: range, readers: int, prefetch: int
) -> Iterator[Batch]:
    """Return read(step) for each step, read ahead by threads."""
    failed: list[DataError] = []

    def arrays(step: np.ndarray) -> list[np.ndarray]:
        try:
            batch = read(int(step))
        except DataError as error:
            failed.append(error)
            raise
        return [batch[key] for key in keys]

    batches = tf.data.Dataset.range(steps.start, steps.stop).map(
        lambda step: tf.numpy_function(arrays, [step], [tf.int32] * len(keys), stateful=False),
        num_parallel_calls=readers,
        deterministic=True,
    )
    options = tf.data.Options()
    options.threading.private_threadpool_size = readers
    options.autotune.enabled = False
    generator = _batches(batches.prefetch(prefetch).with_options(options).as_numpy_iterator(), keys, failed)
    _unfinished.add(generator)
    return generator


def _batches(
    arrays: Iterator[tuple[np.ndarray, ...]], keys: tuple[str, ...], failed: list[DataError]
) -> Iterator[Batch]:
    """Yield the arrays by name; if a reader failed, raise its error, from `failed`, in place of TensorFlow's."""
    try:
        for batch in arrays:
            yield dict(zip(keys, batch, strict=True))
    except tensorflow().errors.OpError:
        if failed:
            raise failed[0] from None
        raise


def _known(batches: Iterator[Batch], ahead: int, on_lost: OnLost) -> Iterator[Batch]:
    """Yield each batch once the next `ahead` batches are known to be readable or lost."""
    known: deque[Batch | DataError | None] = deque()  # None: the batches have ended
    while True:
        while len(known) <= ahead and (not known or isinstance(known[-1], dict)):
            known.append(_next(batches, on_lost))
        first = known.popleft()
        if isinstance(first, DataError):
            raise first
        if first is None:
            return
        yield first


def _next(batches: Iterator[Batch], on_lost: OnLost) -> Batch | DataError | None:
    try:
        return next(batches, None)
    except DataError as error:
        on_lost(error)
        return error


@cache
def importing_tensorflow() -> Future:
    """Start to import TensorFlow in a thread; return the future of the module."""
    with_one_thread = ThreadPoolExecutor(1, thread_name_prefix="import")
    future = with_one_thread.submit(_tensorflow)
    with_one_thread.shutdown(wait=False)
    return future


def is_importing_tensorflow() -> bool:
    """Return whether the import is under way, for which the batches of short steps wait."""
    return importing_tensorflow.cache_info().currsize > 0 and not importing_tensorflow().done()


def _tensorflow():
    tf = tensorflow()
    tf.data.Dataset.range(0)  # initialises it
    atexit.register(_close_unfinished)  # registered after TensorFlow's own exit functions, so that it runs before them
    return tf


def _close_unfinished() -> None:
    """End reading ahead while Python still runs: TensorFlow would wait forever for threads that call into it."""
    for generator in list(_unfinished):
        generator.close()
