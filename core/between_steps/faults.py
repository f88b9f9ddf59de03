# SPDX-License-Identifier: Apache-2.0
"""Fault injection, to test that a run keeps its promises: --faults="sigterm@120,kill:1@300".

FAULT[:WHERE]@STEP strikes at that step, once in a run, also across restarts. P is a process index; the default is in
parentheses:

    sigterm[:P]@N    SIGTERM to a process (0), as from a scheduler
    kill[:P]@N       kill -9 of a process (0)
    hang:PHASE[:P]@N a process (the last) hangs for ever in a phase: data, step, evaluation, save, compile (at any N)
    freeze[:P]@N     SIGSTOP of a process (the last)
    slow:PxF@N       process P takes F times as long for each step from then on, also after a restart
    full_disk[:K]@N  for K steps (20) nothing can be written, as on a full disk
    flip[:P]@N       a bit of a parameter flips on the last device of a process (the last)
    nan@N            the gradient is not a number
"""

import contextlib
import dataclasses
import math
import os
import pathlib
import re
import resource
import signal
import threading
import time
from collections.abc import Callable, Sequence

import jax
import numpy as np

from cluster import processes
from configs.errors import ConfigError
from core.callbacks import Callback
from reporting.clock import Clock
from training.step_transform import StepTransform

OF_ONE = r"(:(?P<process>\d+))?"
KINDS = {  # the pattern of the text between the kind and the step, and the default process
    "sigterm": (OF_ONE, 0), "kill": (OF_ONE, 0), "freeze": (OF_ONE, -1), "flip": (OF_ONE, -1), "nan": ("", None),
    "hang": (rf":(?P<phase>data|compile|step|evaluation|save){OF_ONE}", -1), "full_disk": (r"(:(?P<steps>\d+))?", None),
    "slow": (r":(?P<process>\d+)x(?P<factor>\d+(\.\d+)?)", -1),
}  # fmt: skip
SIGNALS = {"sigterm": signal.SIGTERM, "kill": signal.SIGKILL, "freeze": signal.SIGSTOP}
EXAMPLE = "sigterm@120,kill:1@300,hang:data@400,full_disk@450,flip@500,nan@550,slow:2x3@600"
FULL_DISK_STEPS = 20


@dataclasses.dataclass(frozen=True)
class Fault:
    """One fault; `process` is the index of its process, None for all."""

    text: str
    kind: str
    step: int
    process: int | None
    phase: str
    factor: float
    steps: int

    @property
    def is_mine(self) -> bool:
        return self.process is None or self.process in (processes.index(), processes.index() - processes.count())


def parse_faults(text: str) -> list[Fault]:
    """Return the faults of a --faults flag. Raises ConfigError for an invalid one."""
    return [_parse(part.strip()) for part in text.split(",") if part.strip()]


def _parse(text: str) -> Fault:
    kind = text.partition("@")[0].partition(":")[0]
    pattern, process = KINDS.get(kind, ("", None))
    found = re.fullmatch(rf"{kind}{pattern}@(?P<step>[1-9]\d*)", text) if kind in KINDS else None
    if not found:
        raise ConfigError(f"--faults: {text!r} is not a fault; an example is {EXAMPLE}")
    given = {name: value for name, value in found.groupdict().items() if value is not None}
    return Fault(
        text, kind, int(given["step"]), int(given["process"]) if "process" in given else process,
        given.get("phase", "step"), float(given.get("factor", 1)), int(given.get("steps", FULL_DISK_STEPS)),
    )  # fmt: skip


class Faults(Callback):
    """Inject the faults that are due: the clock calls `strike` when a phase begins, and `wrap` changes the step."""

    def __init__(self, faults: Sequence[Fault], workdir: pathlib.Path, clock: Clock, nan_step: Callable[[], Callable]):
        """Register the faults; `workdir` records which have struck.

        `nan_step` returns a train_step with NaN gradients. Raises ConfigError for an unknown process.
        """
        for fault in faults:
            if fault.process is not None and fault.process >= processes.count():
                raise ConfigError(
                    f"--faults: {fault.text!r}: this run has {processes.count()} processes, counted from 0"
                )
        self.struck_file = workdir / "workers" / f"faults-{processes.index()}.txt"
        struck = self.struck_file.read_text().splitlines() if self.struck_file.exists() else []
        # A slow process stays slow after a restart.
        self.pending = [
            fault for fault in faults if fault.is_mine and (fault.text not in struck or fault.kind == "slow")
        ]
        self.clock, self.nan_step, self.slow, self.disk_full_until, self.spoiled = clock, nan_step, 1.0, None, 0
        clock.on_enter = self.strike if self.pending else clock.on_enter

    def strike(self, phase: str, step: int) -> None:
        """Inject the faults that are due when a phase of a step begins."""
        if self.disk_full_until is not None and step > self.disk_full_until:
            _limit_files(resource.RLIM_INFINITY)
            self.disk_full_until = None
        for fault in self._due(phase, step):
            match fault.kind:
                case "hang":
                    threading.Event().wait()
                case "slow":
                    self.slow = fault.factor
                case "full_disk":
                    _limit_files(0)
                    self.disk_full_until = step + fault.steps
                case kind:
                    os.kill(os.getpid(), SIGNALS[kind])

    def wrap(self, train_step, job):
        """Return a train_step that is slow, has NaN gradients or flips a bit when such a fault is due."""
        if not self.pending:
            return train_step

        def step(state, batch):
            began, number = time.monotonic(), self.clock.step
            self.spoiled = self.clock.number if self._due("nan", number) else self.spoiled
            spoils = self.spoiled == self.clock.number  # a step that is computed twice is spoiled twice
            state, scalars = (self.nan_step() if spoils else train_step)(state, batch)
            if self.slow > 1:
                jax.block_until_ready(scalars)
                time.sleep((self.slow - 1) * (time.monotonic() - began))
            return (flipped(state) if self._due("flip", number) else state), scalars

        return step

    def on_end(self, job, *, has_failed):
        """Name the faults that never struck."""
        if not has_failed:
            job.log.display.lines([f"never struck: {fault.text}" for fault in self.pending])

    def _due(self, what: str, step: int) -> list[Fault]:
        """Remove from `pending` and return the due faults of a kind, or of a phase."""
        wanted = [
            fault for fault in self.pending
            if what == (fault.kind if fault.kind in ("nan", "flip") else fault.phase)
            and (step >= fault.step or what == "compile")
        ]  # fmt: skip
        for fault in wanted:
            self.pending.remove(fault)
            self._keep(fault)
            with contextlib.suppress(OSError):  # stdout may be a file on a full disk
                print(f"fault: {fault.text}\n", end="", flush=True)  # in one piece, since the log prints too
        return wanted

    def _keep(self, fault: Fault) -> None:
        """Record that a fault has struck, even while a full disk is simulated."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (before[1], before[1]))
        self.struck_file.parent.mkdir(parents=True, exist_ok=True)
        with self.struck_file.open("a") as file:
            file.write(f"{fault.text}\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def flipped(state):
    """Return a copy of a state with one bit of one parameter flipped on the last device of this process."""
    leaves, tree = jax.tree.flatten(state.params)
    leaf = max(leaves, key=lambda leaf: leaf.size)
    shards = [shard.data for shard in leaf.addressable_shards]
    bits = np.array(shards[-1]).view(np.uint32)
    bits.flat[0] ^= 1 << 20
    shards[-1] = jax.device_put(bits.view(np.float32), shards[-1].device)
    changed = jax.make_array_from_single_device_arrays(leaf.shape, leaf.sharding, shards)
    leaves = [changed if other is leaf else other for other in leaves]
    return dataclasses.replace(state, params=jax.tree.unflatten(tree, leaves))


class NaNGradients(StepTransform):
    """Replace each number of the gradients by NaN."""

    name = "nan_gradients"

    def change_gradients(self, gradients, state):
        return jax.tree.map(lambda g: g * math.nan, gradients)


def _limit_files(size: int) -> None:
    """Limit the size of files to `size` bytes: larger writes fail as on a full disk."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
