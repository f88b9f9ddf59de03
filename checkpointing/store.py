# SPDX-License-Identifier: Apache-2.0
"""The interface of a checkpoint store: a place for checkpoints, and the layout of their bytes there.

`checkpointing/checkpoints.py: Checkpoints` decides when to save, what to keep, when to try again, and which checkpoint
is valid, and makes all processes agree. A store only reads and writes. `checkpointing/shared_folder.py: SharedFolder`
is the usual one. To use another one, pass it to `train.train(..., store=...)`; it does not inherit anything.

A checkpoint has a step, a record, and a tree of arrays. The tree is a nested dictionary (or tuples inside one). The
name of an array is its path in the tree, joined by dots, such as params.norm.scale; see checkpointing/state_names.py.

A save has five phases. No process begins a phase before all processes have ended the one before. `begin` runs in the
thread of the training loop; the others run in one background thread, so that training continues:

1. `begin`: copy the shards of this process, since the next step reuses their memory.
2. `write`: write the shards.
3. `describe`: return what the other processes have to know about them.
4. `join`: bring the parts together, if they belong in one place.
5. `commit`: make this a checkpoint.

If a phase fails in one process, `discard` runs in all processes, and the save is tried again later, from `begin`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from checkpointing.host_parts import Part
from checkpointing.record import Record


class CheckpointError(ValueError):
    """A workdir that cannot be used as requested; the user has to correct it."""

    exit_status = 2


class Store(Protocol):
    """What `Checkpoints` needs from the place that it writes to.

    Methods never wait for other processes, except `restore`, which may communicate through jax. The text at a method
    says which processes call it. "One process calls this" means process 0 if the store is shared, and every process if
    it is not. The answers of several processes are merged.

    What must hold:

    - Atomicity: `steps` lists a checkpoint only if this process's part of it was committed completely. A process that
      is killed at any moment leaves the earlier checkpoints as they were.
    - A damaged or missing file is never read as other numbers: `problems` finds it.
    - All files of a checkpoint that this process committed are on disk when `commit` returns.

    Attributes:
      place: the store in messages, such as its folder.
      is_shared: whether all processes see the same files.
      failures: the exceptions of a place that cannot be written now, such as a full disk. Others are errors of the
        program.
    """

    place: Any
    is_shared: bool
    failures: tuple[type[Exception], ...]

    # Reading. The processes may be those of another command, while a run still writes.

    def steps(self) -> list[int]:
        """Return the steps of the committed checkpoints, in order. One process calls this."""

    def existing(self) -> list[str]:
        """Return the names of all checkpoints, even damaged ones. One process calls this.

        A run must not start from step 0 if there are any.
        """

    def others(self) -> dict[str, str]:
        """Return {name: description} of damaged and unfinished checkpoints. Only --verify_checkpoints calls this."""

    def problems(self, step: int, parts: Sequence[str] = ()) -> list[str]:
        """Return a line for each damaged file. Every process calls this; processes may share the work.

        `parts` are the parts of the state that will be read, by checkpointing/state_names.py; (): all. Arrays of other
        parts need not be checked.

        Raises OSError if a file exists and cannot be read now, which does not count as damage.
        """

    def part(self, step: int) -> Part | None:
        """Return which part of a checkpoint this process has; None if it has all of it.

        Every process calls this, if the store is not shared, for a checkpoint without `problems`.
        """

    def record(self, step: int) -> Record:
        """Return the record, as it was passed to `write`. Process 0 calls this, even if the store is not shared.

        Raises RunError if it cannot be read, JsonError or ConfigError if it has invalid values.
        """

    def arrays(self, step: int) -> dict[str, dict[str, list]]:
        """Return {name of an array: {file: [bytes, SHA-256]}}. Every process calls this; the names must be equal.

        Raises RunError if it cannot be read.
        """

    def restore(self, step: int, arrays: dict, replica_axis: int | None = None) -> dict:
        """Return arrays of a checkpoint, all or some. Every process calls this.

        Args:
          arrays: the tree of arrays to read, of jax.ShapeDtypeStruct with shardings, which are those of the result.
          replica_axis: index of a mesh axis whose replicas are whole hosts. One replica may read, and broadcast to the
            others. A store may ignore it.

        Raises RunError if files disappear during the restore, CheckpointError if the store cannot serve these
        shardings.
        """

    # Writing. Only a run that trains calls these.

    def open(self, writer: str) -> None:
        """Begin to write, before any other method of this kind. Every process calls this.

        `writer` is a unique name of this run, the same in all processes. If two runs write to one place by mistake,
        neither may write into the unfinished save of the other.
        """

    def begin(self, step: int, arrays: dict) -> None:
        """Copy this process's shards, phase 1. A slow part may go on after the return, until `write` waits for it."""

    def write(self, step: int, record: str) -> None:
        """Write this process's shards and, at least in process 0, the record (JSON), phase 2."""

    def describe(self, step: int) -> Any:
        """Return facts about this process's part for the other processes, as a JSON value, phase 3."""

    def join(self, step: int, parts: list) -> None:
        """Bring the parts together, phase 4. `parts` has what `describe` returned, in order of the processes."""

    def commit(self, step: int, parts: list) -> None:
        """Make this a checkpoint, phase 5. It replaces an earlier one of the same step."""

    def discard(self, step: int) -> None:
        """Remove the files of a failed save, as far as possible; do not raise `failures`. Every process calls this.

        If the store is not shared, this process may have committed its part, which is removed too.
        """

    def move_aside(self, step: int) -> str:
        """Rename a damaged checkpoint, so that it is not used; return a text that says its new name.

        If it cannot be renamed now, the text says why. One process calls this, if it has a part of the checkpoint.
        """

    def remove(self, step: int) -> None:
        """Delete a checkpoint. One process calls this. A checkpoint that is partly deleted must not count as one."""

    def clear(self) -> None:
        """Delete the remains of killed saves and deletions. Every process calls this, while no save is going on."""
