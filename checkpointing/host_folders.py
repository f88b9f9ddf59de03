# SPDX-License-Identifier: Apache-2.0
"""The checkpoint store of hosts without shared storage: each process keeps its own shards in its own folder.

The processes may have the same path for their folders, as on the hosts of a pod, but not the same folder. Each part has
all shards that its process holds, even those that other processes hold too, so that no host needs files of another
to restore them. A part of the only process of a run is a complete checkpoint.
"""

import contextlib
import json
import pathlib
import shutil
from collections.abc import Sequence

import jax

from checkpointing import host_parts, manifest, orbax_arrays
from checkpointing.folder import UNFINISHED
from checkpointing.folder_store import RECORD, STATE, Files, FolderStore, is_in, sync
from checkpointing.host_parts import Part
from checkpointing.store import CheckpointError, Store
from cluster import processes
from reporting.display import listed
from training.state import named_leaves

MOST_NAMED = 3  # processes that a message names


class HostFolders(FolderStore):
    """A `Store`: the folder `checkpoints` of each process's own workdir."""

    is_shared = False

    def __init__(self, workdir: pathlib.Path):
        """Open the folder of this process's workdir, which is a local path."""
        super().__init__(workdir)
        # These belong to the present save.
        self.abstract, self.files = {}, {}
        self.committed: int | None = None

    def part(self, step: int) -> Part | None:
        return host_parts.read(self.place / str(step))

    def problems(self, step: int, parts: Sequence[str] = ()) -> list[str]:
        found = manifest.problems(self._folder(step), is_read=is_in(parts))
        return [f"{problem} ({processes.name(processes.index())})" for problem in found]

    def restore(self, step: int, arrays: dict, replica_axis: int | None = None) -> dict:
        """Return the arrays. Raises CheckpointError if this process needs shards that it does not have."""
        if missing := _missing(self._folder(step), self._files(step), arrays):
            raise CheckpointError(self._needs_others(step, missing[0]))
        with self.check_complete(step, tuple(arrays)):
            return orbax_arrays.restore(self._folder(step) / STATE, arrays, None, alone=True)

    def begin(self, step: int, arrays: dict) -> None:
        self.committed = None
        self.abstract = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), arrays
        )
        shutil.rmtree(self._landing(step), ignore_errors=True)
        self._landing(step).mkdir(parents=True)
        self.writing = orbax_arrays.begin(self._landing(step) / STATE, arrays, all_replicas=True)

    def write(self, step: int, record: str) -> None:
        orbax_arrays.finish(self.writing)
        (self._landing(step) / RECORD).write_text(record)

    def describe(self, step: int) -> dict:
        """Return the name of this process, and a digest of the files of its part."""
        landing = self._landing(step)
        self.files = manifest.digests(landing, manifest.files_below(landing))
        return {"name": processes.name(processes.index()), "digest": manifest.digest_of(self.files)}

    def join(self, step: int, parts: list[dict]) -> None:
        """Write which part this is; the parts stay apart. OSError if files of its arrays are missing."""
        landing = self._landing(step)
        if missing := _missing(landing, self.files, self.abstract):
            raise OSError(f"{missing[0]} is missing; it was deleted meanwhile")
        if len(parts) > 1:
            holders = [part["name"] for part in parts]
            save = manifest.digest_of([part["digest"] for part in parts])
            part = Part(save=save, process=processes.index(), holders=holders)
            (landing / host_parts.PART).write_text(json.dumps(part))
            self.files |= manifest.digests(landing, [host_parts.PART])
        manifest.write(landing, step, self.files)
        for name in self.files:
            sync(landing / name)

    def commit(self, step: int, parts: list[dict]) -> None:
        self.give_name(self._landing(step), step, self.files)
        self.committed = step

    def discard(self, step: int) -> None:
        shutil.rmtree(self._landing(step), ignore_errors=True)
        if self.committed == step:
            with contextlib.suppress(*self.failures):
                self.remove(step)

    def clear(self) -> None:
        self.remove_unfinished()

    def _folder(self, step: int) -> pathlib.Path:
        return pathlib.Path(self.place) / str(step)

    def _landing(self, step: int) -> pathlib.Path:
        """Return the folder of a part that is not committed."""
        return pathlib.Path(self.place) / f"{step}-{self.writer}{UNFINISHED}"

    def _needs_others(self, step: int, missing: str) -> str:
        """Return why this process cannot restore a checkpoint from its part alone."""
        part, here = self.part(step), processes.name(processes.index())
        if part is None or part["process"] == processes.index():
            why = "this mesh places the arrays otherwise than the one that saved them"
        else:
            why = f"the part here is that of {part['holders'][part['process']]}, whose number this process should have"
        return (
            f"{here} needs {missing} of checkpoint {step}, which is not in {self.place}: {why}. Start it with the mesh "
            f"and the numbers of processes that saved it; {host_parts.REMEDY}"
        )


def of_config(config, workdir: pathlib.Path, bucket=None) -> Store | None:
    """Return the store that `checkpoint.per_host` asks for; None for the usual one.

    Raises CheckpointError if the run is in a bucket.
    """
    if not config.checkpoint.per_host:
        return None
    if bucket:
        raise CheckpointError(
            f"checkpoint.per_host=true keeps checkpoints on the hosts, but --workdir={bucket.url} is a bucket, which "
            "all share; leave one out"
        )
    return HostFolders(workdir)


def _missing(folder: pathlib.Path, files: Files, arrays: dict) -> list[str]:
    """Return the files that this process's shards of some arrays need, and that are not among `files`."""
    missing = []
    for name, leaf in named_leaves(arrays):
        layout = f"{STATE}/{name}/{host_parts.LAYOUT}"
        if layout not in files:
            missing.append(layout)
            continue
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        for bounds in {tuple((part.start, part.stop) for part in index) for index in indices}:
            part = [slice(*ends) for ends in bounds]
            missing += [name for name in host_parts.chunk_files(folder, layout, part) if name not in files]
    return sorted(missing)


def part_problems(store: Store, step: int) -> list[str]:
    """Return a line if the parts of a checkpoint are of different saves.

    Raises CheckpointError if parts are missing; the message names the processes that had them.
    """
    found = [] if store.is_shared else processes.gather(f"parts {step}", store.part(step))
    parts = [part for part in found if part]
    if not parts:
        return []
    if len(parts) < len(found) or len({part["save"] for part in parts}) > 1:
        return ["its parts are of different saves"]
    holders, here = parts[0]["holders"], {part["process"] for part in parts}
    if gone := [name for number, name in enumerate(holders) if number not in here]:
        raise CheckpointError(
            f"{store.place}: checkpoint {step} cannot be restored without the parts of "
            f"{listed(gone, MOST_NAMED, '; ')}, which are not here; start on the {len(holders)} hosts that saved it, "
            "or train in another --workdir"
        )
    return []
