# SPDX-License-Identifier: Apache-2.0
"""Saves and restores a run's state through Orbax: asynchronously, atomically, onto any mesh.

Beside the arrays stands a JSON record: configuration, topology, data position, library versions.
"""

import importlib.metadata
import logging
from collections.abc import Callable

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath
from orbax.checkpoint import type_handlers

from parallelism import processes
from training.interruption import Interrupted
from training.state import TrainState

LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every save and restore as a warning


class CheckpointError(ValueError):
    """A workdir that cannot be used as asked; the user's to mend."""

    exit_status = 2


class Checkpoints:
    """The checkpoints of one workdir; a context manager that ends with every save on disk."""

    def __init__(self, workdir, keep: int | None = None, on_save: Callable[[], None] = lambda: None):
        """Open the checkpoints of a folder, or of the address of one in a bucket.

        Args:
          keep: how many of the newest are kept; None: only to read, beside a run that may go on.
          on_save: called after each save has begun.
        """
        self.address, path = workdir, epath.Path(workdir)
        self.folder = (path if "://" in str(workdir) else path.absolute()) / "checkpoints"
        self.on_save = on_save
        self.manager = ocp.CheckpointManager(
            self.folder,
            options=ocp.CheckpointManagerOptions(
                max_to_keep=keep,
                enable_async_checkpointing=True,
                read_only=keep is None,
                create=keep is not None,
                cleanup_tmp_directories=keep is not None,
            ),
        )

    def __enter__(self):
        return self

    def __exit__(self, kind, *unused):
        # Closing waits for all processes, and those of a run that fails may never come.
        if kind is None or processes.count() == 1 or issubclass(kind, Interrupted):
            self.manager.close()

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint that process 0 sees, None where there is none."""
        return processes.shared("newest checkpoint", self.manager.latest_step)

    def newest_or_error(self) -> int:
        """Return the step of the newest checkpoint; CheckpointError where there is none."""
        step = self.newest()
        if step is None:
            raise CheckpointError(f"{self.folder} has no complete checkpoint; train first, or name another --workdir")
        return step

    def record(self, step: int) -> dict:
        """Return the JSON record that was saved beside the arrays of `step`."""
        return self.manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore()))["record"]

    def save(self, step: int, state: TrainState, record: dict) -> None:
        """Begin to write `state`; returns once its arrays are copied. A step that is there already is kept."""
        if step in self.manager.all_steps():
            return
        record = record | {"versions": {name: importlib.metadata.version(name) for name in LIBRARIES}}
        saved = ocp.args.Composite(state=ocp.args.StandardSave(state), record=ocp.args.JsonSave(record))
        self.manager.save(step, args=saved)
        self.on_save()

    def wait(self) -> None:
        """Return when every save is complete on disk."""
        self.manager.wait_until_finished()

    def restore(self, step: int, abstract_state):
        """Return the state of `step` in the shapes, types and layouts of `abstract_state`."""
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        return self.manager.restore(step, args=arguments)["state"]

    def restore_by_broadcast(self, step: int, abstract_state: TrainState, mesh: jax.sharding.Mesh) -> TrainState:
        """Do as `restore`, but have the hosts of one copy of the model read, and send what they read to the others.

        Raises:
          CheckpointError: some host has devices of several copies, so that no part of the hosts reads one copy.
        """
        axis = "dcn_data" if mesh.shape["dcn_data"] > 1 else "data"
        _check_copies_are_hosts(mesh, axis)
        if mesh.shape[axis] == 1 or processes.count() == 1:
            return self.restore(step, abstract_state)
        handler = type_handlers.SingleReplicaArrayHandler(replica_axis_index=mesh.axis_names.index(axis))
        registry = type_handlers.create_type_handler_registry((jax.Array, handler))
        restore_args = jax.tree.map(
            lambda leaf: type_handlers.SingleReplicaArrayRestoreArgs(
                sharding=leaf.sharding, global_shape=leaf.shape, dtype=leaf.dtype
            ),
            abstract_state,
        )
        arguments = ocp.args.PyTreeRestore(item=abstract_state, restore_args=restore_args)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(type_handler_registry=registry)) as reader:
            return reader.restore(self.folder / str(step) / "state", args=arguments)

    def restore_evaluated(self, step: int, abstract_state: TrainState) -> dict:
        """Return of `step` the parameters that are evaluated, and nothing else: the average where one is kept."""
        item = {"average" if abstract_state.average else "params": abstract_state.evaluated}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(self.folder / str(step) / "state", args=arguments).popitem()[1]


def _check_copies_are_hosts(mesh: jax.sharding.Mesh, axis: str) -> None:
    """Raise CheckpointError where a process has devices of more than one, and not of all, places along the axis."""
    places = {}
    for copy, devices in enumerate(np.moveaxis(mesh.devices, mesh.axis_names.index(axis), 0)):
        for device in devices.flat:
            places.setdefault(device.process_index, set()).add(copy)
    several = [number for number, copies in places.items() if len(copies) > 1]
    if several and processes.count() > 1:
        raise CheckpointError(
            f"checkpoint.restore=broadcast: {processes.name(several[0])} has devices of {len(places[several[0]])} "
            f"copies of the model (mesh.{axis}={mesh.shape[axis]}); use read, or a mesh whose copies are whole hosts"
        )


def differences(stored: dict, now: dict, may_change: tuple[str, ...]) -> list[str]:
    """Return "key old -> new" for each flat configuration key that differs, prefixes in `may_change` aside."""
    return [
        f"{key} {stored.get(key)} -> {value}"
        for key, value in now.items()
        if stored.get(key) != value and not key.startswith(may_change)
    ]
