# SPDX-License-Identifier: Apache-2.0
"""Place batches on the devices of a mesh; each process handles the rows of its own devices."""

from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

MAY_BE_IGNORED = ("targets", "labels")  # arrays of ids in which a number below 0 has no loss


def local_rows(sharding: NamedSharding, num_rows: int) -> np.ndarray:
    """Return the sorted row indices of a global batch [num_rows, length] that this process's devices hold."""
    shape = (num_rows, sharding.mesh.shape["context"])
    slices = sharding.addressable_devices_indices_map(shape).values()
    return np.unique(np.concatenate([np.arange(num_rows)[rows] for rows, _ in slices]))


def place(batches: Iterable[dict], sharding: NamedSharding, num_rows: int) -> Iterator[dict]:
    """Return batches of local rows, [rows, length] or [rows], as global arrays of `num_rows` rows on the devices.

    A thread reads and places one batch ahead. The first batch is on its way to the devices before this returns, so no
    step waits for the pipeline to start.
    """
    rows = local_rows(sharding, num_rows)

    def global_array(local):
        def shard(index):
            wanted = np.arange(num_rows)[index[0]]
            return local[np.searchsorted(rows, wanted), *index[1:]]

        layout = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[: local.ndim]))
        return jax.make_array_from_callback((num_rows, *local.shape[1:]), layout, shard)

    placed = (jax.tree.map(global_array, batch) for batch in batches)
    return _one_ahead(next(placed, None), placed)


def local_values(array: jax.Array) -> np.ndarray:
    """Return this process's rows of a global array, in order; no other dimension may be sharded.

    Replicated rows are returned once, so that over all processes each row is there once.
    """
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards if shard.replica_id == 0}
    parts = [np.asarray(shards[start]) for start in sorted(shards)]
    return np.concatenate(parts) if parts else np.zeros((0, *array.shape[1:]), array.dtype)


def _one_ahead(batch: dict | None, placed: Iterator[dict]) -> Iterator[dict]:
    with ThreadPoolExecutor(1, thread_name_prefix="place") as worker:
        while batch is not None:
            coming = worker.submit(next, placed, None)
            yield batch
            batch = coming.result()


def check_batches(
    batches: Iterator[dict], count: int, abstract_batch: dict, rows: int, vocab_size: int
) -> Iterator[dict]:
    """Yield `count` batches of `rows`, after a check that they have the shapes of the compiled step.

    Raises ValueError for a wrong array, with its shape and the expected one, for numbers that are not ids of a
    vocabulary of `vocab_size` (0: none is checked), or if there are too few batches.
    """
    wanted = with_rows(abstract_batch, rows)
    for number in range(1, count + 1):
        batch = next(batches, None)
        if batch is None:
            raise ValueError("the batches given to train() ended before train.steps was reached")
        what = f"batch {number} given to train()"
        check_batch(batch, wanted, what)
        if vocab_size:
            check_ids(batch, vocab_size, what)
        yield batch


def check_ids(
    batch: dict, size: int, what: str, names: Iterable[str] = ("tokens", "targets"), key: str = "model.vocab_size"
) -> None:
    """Raise ValueError if one of these arrays of a batch has a number that is no id below `size`, the value of `key`.

    A target or a label below 0 has no loss. Tokens where `segments` is 0 are padding.
    """
    for name in names:
        numbers, least = np.asarray(batch[name]), -np.inf if name in MAY_BE_IGNORED else 0
        if not numbers.size or (least <= numbers.min() and numbers.max() < size):  # fast, for it is of every batch
            continue
        wrong = (numbers < least) | (numbers >= size)
        if name == "tokens":
            wrong &= np.asarray(batch["segments"]) > 0
        if wrong.any():
            raise ValueError(f"{what}: {name} has {numbers[wrong][0]}, which is not an id with {key}={size}")


def with_rows(abstract_batch: dict, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes and types of a batch with this many rows."""
    return {name: jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype) for name, leaf in abstract_batch.items()}


def check_batch(batch: dict, wanted: dict, what: str) -> None:
    """Raise ValueError if a batch has other arrays than `wanted`, or other shapes or types; `what` names the batch."""
    if not isinstance(batch, Mapping):
        raise ValueError(f"{what} is a {type(batch).__name__} and should be a dictionary of arrays")
    found, wanted = ({name: _described(array) for name, array in of.items()} for of in (batch, wanted))
    for name in sorted(wanted.keys() | found.keys()):
        texts = [of.get(name, "missing") for of in (found, wanted)]
        if texts[0] != texts[1]:
            raise ValueError(f"{what}: {name} is {texts[0]} and should be {texts[1]}")


def _described(array) -> str:
    is_array = isinstance(array, np.ndarray | np.generic | jax.Array | jax.ShapeDtypeStruct)
    return f"{array.dtype}{list(array.shape)}" if is_array else f"a {type(array).__name__}"
