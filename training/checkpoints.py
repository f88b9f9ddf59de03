# SPDX-License-Identifier: Apache-2.0
"""Saves and restores a run's state through Orbax: asynchronously, atomically, onto any mesh.

Beside the arrays stands a JSON record: configuration, topology, data position, library versions.
"""

import importlib.metadata
import logging

import orbax.checkpoint as ocp
from etils import epath

from training.state import TrainState

LIBRARIES = ("jax", "flax", "optax", "orbax-checkpoint", "numpy")
logging.getLogger("absl").setLevel(logging.ERROR)  # orbax reports every save and restore as a warning


class CheckpointError(ValueError):
    """A workdir that cannot be used as asked; the user's to mend."""

    exit_status = 2


class Checkpoints:
    """The checkpoints of one workdir; a context manager that ends with every save on disk."""

    def __init__(self, workdir, keep: int | None = None):
        """Open `workdir`/checkpoints, keeping the newest `keep`; None: only to read, beside a run that may go on."""
        self.folder = epath.Path(workdir).absolute() / "checkpoints"
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

    def __exit__(self, *unused):
        self.manager.close()

    def newest(self) -> int | None:
        """Return the step of the newest complete checkpoint, None where there is none."""
        return self.manager.latest_step()

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

    def wait(self) -> None:
        """Return when every save is complete on disk."""
        self.manager.wait_until_finished()

    def restore(self, step: int, abstract_state):
        """Return the state of `step` in the shapes, types and layouts of `abstract_state`."""
        arguments = ocp.args.Composite(state=ocp.args.StandardRestore(abstract_state))
        return self.manager.restore(step, args=arguments)["state"]

    def restore_evaluated(self, step: int, abstract_state: TrainState) -> dict:
        """Return of `step` the parameters that are evaluated, and nothing else: the average where one is kept."""
        item = {"average" if abstract_state.average else "params": abstract_state.evaluated}
        restore_args = ocp.checkpoint_utils.construct_restore_args(item)
        arguments = ocp.args.PyTreeRestore(item=item, restore_args=restore_args, partial_restore=True)
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
            return reader.restore(self.folder / str(step) / "state", args=arguments).popitem()[1]


def differences(stored: dict, now: dict, may_change: tuple[str, ...]) -> list[str]:
    """Return "key old -> new" for each flat configuration key that differs, prefixes in `may_change` aside."""
    return [
        f"{key} {stored.get(key)} -> {value}"
        for key, value in now.items()
        if stored.get(key) != value and not key.startswith(may_change)
    ]
