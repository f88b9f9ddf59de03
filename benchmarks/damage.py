# SPDX-License-Identifier: Apache-2.0
"""Is damage to a checkpoint ever restored? 1,000 random damages over all files of the checkpoint of a tiny run.

Half of the checkpoints have an older one next to them, which must be restored instead. The other half have none, which
must be an error. A damage is detected, or it is harmless: the restored state equals the saved one bit for bit. Anything
else is a wrong restore, and so is a run that would start from nothing. Bit flips in array files are also restored by
Orbax alone.
"""

import collections
import contextlib
import dataclasses
import logging
import os
import pathlib
import shutil
import sys
import tempfile
import time
from collections.abc import Callable

import support

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"

import jax
import numpy as np

from core import assembly
from configs import base
from settings.keys import flat
from input_pipeline.synthetic import MarkovWindows
from parallelism.mesh import mesh_context
from parallelism.placement import place
from checkpointing.checkpoints import Checkpoints, Damaged
from checkpointing.retention import Retention

DAMAGES, FLIPS = (100, 20) if support.QUICK else (1000, 200)
STEPS = 3  # of the run; the last two are saved


def flip(content: bytes, rng, other: bytes) -> bytes:
    """Flip one bit."""
    position = int(rng.integers(len(content)))
    return content[:position] + bytes([content[position] ^ 1 << int(rng.integers(8))]) + content[position + 1 :]


def truncate(content: bytes, rng, other: bytes) -> bytes:
    """Remove some of the last bytes."""
    return content[: -int(rng.integers(1, min(8, len(content)) + 1))]


def extend(content: bytes, rng, other: bytes) -> bytes:
    """Append some bytes."""
    return content + rng.bytes(int(rng.integers(1, 9)))


def zero_range(content: bytes, rng, other: bytes) -> bytes:
    """Overwrite a range with zeros."""
    first, last = sorted(rng.integers(len(content) + 1, size=2))
    return content[:first] + bytes(last - first) + content[last:]


def replace(content: bytes, rng, other: bytes) -> bytes:
    """Replace the content with that of another file."""
    return other


def half_written(content: bytes, rng, other: bytes) -> bytes:
    """Keep only the beginning, or nothing."""
    return content[: int(rng.integers(len(content)))]


CHANGES: dict[str, Callable] = {
    change.__name__: change for change in (flip, truncate, extend, zero_range, replace, half_written)
}
KINDS = (*CHANGES, "delete", "rename", "swap")
PARTS = ("array", "array_metadata", "orbax_metadata", "record", "manifest")


def damage(kind: str, path: pathlib.Path, other: pathlib.Path, rng) -> None:
    """Damage a file; `other` is another file of the same checkpoint."""
    match kind:
        case "delete":
            path.unlink()
        case "rename":
            path.rename(path.with_name(f"{path.name}.{rng.integers(100)}"))
        case "swap":
            path.rename(path.with_name("between"))
            other.rename(path)
            path.with_name("between").rename(other)
        case _:
            content = CHANGES[kind](path.read_bytes(), rng, other.read_bytes())
            path.unlink()  # it is a link; the original stays undamaged
            path.write_bytes(content)


@dataclasses.dataclass
class Saved:
    """Saved checkpoints and their contents.

    Attributes:
      run: the run.
      folder: an undamaged workdir.
      states, records: by step.
    """

    run: assembly.Run
    folder: pathlib.Path
    states: dict[int, list[np.ndarray]]
    records: dict[int, dict]

    def files(self, step: int) -> list[pathlib.Path]:
        """Return the files of a checkpoint, below the workdir."""
        found = sorted(path for path in (self.folder / "checkpoints" / str(step)).rglob("*") if path.is_file())
        return [path.relative_to(self.folder) for path in found]

    def is_restored(self, checkpoints: Checkpoints, step: int) -> bool:
        """Return whether the restored state of a step equals the saved one, bit for bit."""
        state = bits(checkpoints.restore(step, self.run.abstract_state))
        same = all(np.array_equal(one, other) for one, other in zip(state, self.states[step], strict=True))
        return same and checkpoints.record(step) == self.records[step]


def bits(state) -> list[np.ndarray]:
    """Return the bytes of the leaves of a state."""
    return [np.asarray(leaf).reshape(-1).view(np.uint8) for leaf in jax.tree.leaves(state)]


def tiny_run() -> assembly.Run:
    """Return a run with a checkpoint of few bytes in many files: each array is sharded over eight devices."""
    config = base.get_config()
    config.model.update(dict(num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=32))
    config.train.update(dict(global_batch=8, sequence_length=16))
    config.mesh.fsdp = 8
    return assembly.assemble(config)


def train_and_save(folder: pathlib.Path) -> Saved:
    """Train a few steps and save the last two."""
    run = tiny_run()
    saved = Saved(run, folder, {}, {})
    windows = MarkovWindows(run.config.model.vocab_size, seed=0, num_tokens=1 << 12, stream="train")
    batches = (windows.read(range(8 * step, 8 * step + 8), 16) for step in range(STEPS))
    with mesh_context(run.mesh), Checkpoints(folder, Retention(newest=2)) as checkpoints:
        state = run.init()
        for step, batch in enumerate(place(batches, run.batch_sharding, 8), start=1):
            state, _ = run.train_step(state, batch)
            checkpoints.save_and_wait(step, state, {"step": step, "config": flat(run.config)})
            saved.states[step], saved.records[step] = bits(state), checkpoints.record(step)
    return saved


def outcome(saved: Saved, workdir: pathlib.Path, damaged: list[str], good: int | None) -> str:
    """Return the outcome of a damaged workdir: harmless, detected, or an outcome that must not happen.

    Args:
      damaged: names of the damaged files.
      good: the step of an undamaged checkpoint next to the damaged one.
    """
    told = []
    with Checkpoints(workdir, Retention(newest=2)) as checkpoints:
        checkpoints.report = lambda text, **figures: told.append(text)
        try:
            step = checkpoints.newest()
        except Damaged:
            step = "error"
        if step is None or (step != "error" and not saved.is_restored(checkpoints, step)):
            return "wrong"
        aside = [name for name in checkpoints.store.others() if name == f"{STEPS}.damaged"]
    if step == STEPS:
        return "harmless"
    is_named = any(name in line for line in told for name in damaged)
    return "detected" if step == (good or "error") and is_named and aside else "wrong"


def part_of(name: pathlib.Path) -> str:
    """Return the kind of a checkpoint's file, one of PARTS."""
    if name.parts[2] != "state":
        return name.stem
    return "array" if name.name[0].isdigit() else "array_metadata" if name.name == ".zarray" else "orbax_metadata"


def strike(saved: Saved, kind: str, part: str, rng) -> str:
    """Damage a copy of the checkpoints in a file of this kind; return the outcome."""
    names = saved.files(STEPS)
    first = rng.choice([name for name in names if part_of(name) == part])
    second = rng.choice([name for name in names if name != first])
    good = STEPS - 1 if rng.random() < 0.5 else None
    with tempfile.TemporaryDirectory() as parent:
        workdir = pathlib.Path(parent) / "workdir"
        shutil.copytree(saved.folder, workdir, copy_function=os.link)
        if not good:
            shutil.rmtree(workdir / "checkpoints" / str(STEPS - 1))
        damage(kind, workdir / first, workdir / second, rng)
        inside = [str(path.relative_to(f"checkpoints/{STEPS}")) for path in (first, second)]
        found = outcome(saved, workdir, inside, good)
    if found == "wrong":
        print(f"WRONG: {kind} of {first} (and {second}), older checkpoint: {good}", flush=True)
    return found


def outcomes(saved: Saved, number: int, seed: int = 0) -> dict[str, collections.Counter]:
    """Return the counts of outcomes of `number` damages, by kind of damage and by kind of file."""
    rng, counts = np.random.default_rng(seed), {name: collections.Counter() for name in (*KINDS, *PARTS)}
    for index in range(number):
        kind, part = KINDS[index % len(KINDS)], PARTS[index % len(PARTS)]
        found = strike(saved, kind, part, rng)
        counts[kind][found] += 1
        counts[part][found] += 1
    return counts


def wrong_by_orbax_alone(saved: Saved, number: int, seed: int = 1) -> int:
    """Return how many of these flips in array files Orbax restores as other numbers without an error."""
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)  # it reports each unreadable array again
    rng, wrong = np.random.default_rng(seed), 0
    arrays = [name for name in saved.files(STEPS) if part_of(name) == "array"]
    with tempfile.TemporaryDirectory() as parent:
        workdir = pathlib.Path(parent) / "workdir"
        shutil.copytree(saved.folder, workdir)
        checkpoints = Checkpoints(workdir)
        for _ in range(number):
            path = workdir / arrays[rng.integers(len(arrays))]
            content = path.read_bytes()
            path.write_bytes(flip(content, rng, b""))
            with contextlib.suppress(Exception):  # noticed; Orbax raises nothing narrower
                wrong += not saved.is_restored(checkpoints, STEPS)
            path.write_bytes(content)
    return wrong


def main() -> None:
    """Train, damage and count."""
    with tempfile.TemporaryDirectory() as folder:
        saved = train_and_save(pathlib.Path(folder))
        with mesh_context(saved.run.mesh):
            start = time.perf_counter()
            counts = outcomes(saved, DAMAGES)
            seconds = time.perf_counter() - start
            alone = wrong_by_orbax_alone(saved, FLIPS)
        files = len(saved.files(STEPS))
    total = sum((counts[kind] for kind in KINDS), collections.Counter())
    for name, found in counts.items():
        print(f"{name}: {dict(found)}", flush=True)
    figures = {
        "files": files, "damages": DAMAGES, "detected": total["detected"], "harmless": total["harmless"],
        "wrong_restores": total["wrong"],
        **{f"{name}_detected": f"{found['detected']} of {found.total()}" for name, found in counts.items()},
        "seconds": round(seconds, 1), "orbax_alone_flips": FLIPS, "orbax_alone_wrong_restores": alone,
    }  # fmt: skip
    support.finish("damage", figures)
    if total["wrong"]:
        sys.exit(f"{total['wrong']} damages were not noticed, not named, or restored")


if __name__ == "__main__":
    main()
