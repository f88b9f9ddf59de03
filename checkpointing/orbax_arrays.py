# SPDX-License-Identifier: Apache-2.0
"""Arrays written and read with Orbax, by each process independently: no barrier of Orbax waits for a full disk."""

import contextlib
import functools
import logging
import os
import pathlib
import re
import sys
from collections.abc import Callable

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint import type_handlers

# Each replica of an array writes a part of it if the parts have at least this many bytes. Otherwise one replica writes
# all of it, so that no program has to be compiled to slice it.
SMALLEST_PART = 1 << 20
OF_TENSORSTORE = re.compile(r"""[^"]*"(?P<path>[^"]*)".*\[os_error_code='(?P<code>\d+)'\]""", re.DOTALL)
for noisy in ("absl", "asyncio"):  # Orbax warns at every save; `Checkpoints` reports failures
    logging.getLogger(noisy).setLevel(logging.CRITICAL)


def begin(folder: pathlib.Path, arrays: dict, *, all_replicas: bool = False) -> ocp.AsyncCheckpointer:
    """Copy this process's shards, and start to write them; return the Orbax writer, for `finish`.

    With `all_replicas` every shard that this process has is written; else each shard is written by one process.
    """
    alone = _alone()
    which = (
        {"replica_id": None, "use_replica_parallel": False}
        if all_replicas
        else {"min_slice_bytes_for_replica_parallel": SMALLEST_PART}
    )
    of_arrays = type_handlers.ArrayHandler(primary_host=jax.process_index(), array_metadata_store=None, **which)
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=False, multiprocessing_options=alone,
        type_handler_registry=type_handlers.create_type_handler_registry((jax.Array, of_arrays)),
    )  # fmt: skip
    # Asynchronously created folders are signalled under one key for all processes, so none would wait for its own.
    at_once = ocp.options.AsyncOptions(create_directories_asynchronously=False)
    writer = ocp.AsyncCheckpointer(handler, multiprocessing_options=alone, async_options=at_once)
    with _short_errors():
        writer.save(folder, args=ocp.args.PyTreeSave(arrays))
    return writer


def finish(writer: ocp.AsyncCheckpointer) -> None:
    """Wait until the arrays are written."""
    with contextlib.closing(writer), _short_errors():
        writer.wait_until_finished()


def restore(folder, arrays: dict, replica_axis: int | None, *, alone: bool = False) -> dict:
    """Return the arrays of a folder as `Store.restore` describes it; the folder may have others too.

    With `alone`, the process waits for no other one, as each reads a folder of its own.
    """
    options = _alone() if alone else ocp.options.MultiprocessingOptions()
    if replica_axis is None:
        handler = ocp.PyTreeCheckpointHandler(multiprocessing_options=options)
        restore_args = ocp.checkpoint_utils.construct_restore_args(arrays)
    else:
        of_arrays = type_handlers.SingleReplicaArrayHandler(replica_axis_index=replica_axis)
        registry = type_handlers.create_type_handler_registry((jax.Array, of_arrays))
        handler = ocp.PyTreeCheckpointHandler(type_handler_registry=registry)
        restore_args = jax.tree.map(
            lambda leaf: type_handlers.SingleReplicaArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            ),
            arrays,
        )
    with ocp.Checkpointer(handler, multiprocessing_options=options) as reader:
        return reader.restore(
            folder, args=ocp.args.PyTreeRestore(item=arrays, restore_args=restore_args, partial_restore=True)
        )


def _alone() -> ocp.options.MultiprocessingOptions:
    """Return options by which Orbax waits for no other process; it knows processes by jax's index."""
    own = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=own, active_processes={own}, barrier_sync_key_prefix=f"process-{own}"
    )


@contextlib.contextmanager
def _short_errors():
    """Shorten errors of TensorStore, which have many lines, to the file and the cause."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if not (found := OF_TENSORSTORE.match(str(error))):
            raise
        raise OSError(f"{found['path']}: {os.strerror(int(found['code']))}") from error


def _without_late_writes(usual: Callable, unraisable) -> None:
    """Suppress TensorStore's message for each write that ends after Orbax has cancelled a failed save."""
    if str(unraisable.exc_value) != "Event loop is closed":
        usual(unraisable)


sys.unraisablehook = functools.partial(_without_late_writes, sys.unraisablehook)
