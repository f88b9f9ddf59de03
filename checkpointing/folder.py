# SPDX-License-Identifier: Apache-2.0
"""The folder `checkpoints` of a workdir: which checkpoints are complete, and their deletion; without jax.

A local checkpoint gets its step as its name when it is complete. In a bucket, which renames nothing at once, a file
`STEP.unfinished` marks the folder of a checkpoint that is being written or deleted.
"""

import contextlib
import os
import re
import secrets

from checkpointing.bucket import failures_of_buckets, path_of
from files.folders import names_in
from settings.stored_config import UNFINISHED

FAILURES = (OSError, ValueError, RuntimeError)  # errors of writing, from Python and TensorStore
STEP = re.compile("0|[1-9][0-9]{0,9}")  # the name of a checkpoint's folder


class CheckpointFolder:
    """Lists and deletes checkpoints.

    Attributes:
      place: path of the folder.
      is_local: whether it is in a file system rather than in a bucket.
      failures: errors of this place, for an `except`.
    """

    def __init__(self, workdir):
        """Open the folder of a workdir, which is a path or the address of a bucket folder."""
        path = path_of(workdir)
        self.is_local = "://" not in str(workdir)
        self.place = (path.absolute() if self.is_local else path) / "checkpoints"
        self.failures = FAILURES if self.is_local else FAILURES + failures_of_buckets()

    def names(self) -> set[str]:
        """Return the names of all entries of the folder, complete checkpoints or not."""
        return names_in(self.place)

    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, in order."""
        names = self.names()
        return sorted(int(name) for name in names if STEP.fullmatch(name) and not self._is_begun(name, names))

    def _is_begun(self, name: str, names: set[str]) -> bool:
        """Return whether a checkpoint of these names is not complete yet, or deleted in part.

        A local folder is renamed to the step when it is complete. In a bucket, a separate mark is then deleted.
        """
        return not self.is_local and f"{name}{UNFINISHED}" in names

    def remove(self, step: int) -> None:
        """Mark a checkpoint as unfinished, then delete it."""
        if self.is_local:
            (self.place / str(step)).rename(self._mark(step))
        else:
            self._mark(step).write_text("")
        self._erase(self._mark(step))

    def remove_unfinished(self) -> None:
        """Delete what an unfinished save or deletion left."""
        for name in self.names():
            if name.endswith(UNFINISHED):
                self._erase(self.place / name)

    def _erase(self, mark) -> None:
        """Delete an unfinished checkpoint, its mark last."""
        if self.is_local:
            # Rename first: otherwise a process that completes this save could rename the folder during the deletion.
            erased = self.place / f"erased-{secrets.token_hex(4)}{UNFINISHED}"
            with contextlib.suppress(FileNotFoundError):  # the other process was faster
                mark.rename(erased)
                # Of a checkpoint that was moved elsewhere the link alone is deleted.
                erased.unlink() if os.path.islink(erased) else erased.rmtree()
            return
        (self.place / mark.name.removesuffix(UNFINISHED)).rmtree(missing_ok=True)
        if mark.is_dir():  # of a save in a local folder, which was copied here
            mark.rmtree()
        else:
            mark.unlink()

    def _mark(self, step: int):
        """Return the mark of an unfinished checkpoint: its folder's name, or in a bucket a separate file."""
        return self.place / f"{step}{UNFINISHED}"
