# SPDX-License-Identifier: Apache-2.0
"""The interface of what acts on the host between the steps of a run."""

import concurrent.futures
import dataclasses
from collections.abc import Callable, Iterable, Mapping

from cluster import processes
from cluster.hub import ACTING
from cluster.interruption import in_thread
from reporting.step_log import every
from training import replicas
from training.compiled_steps import Shape


@dataclasses.dataclass(frozen=True)
class Save:
    """Save a checkpoint after this step."""


@dataclasses.dataclass(frozen=True)
class Stop:
    """Save a checkpoint and end the run after this step; `reason` becomes the reason of its Result."""

    reason: str


@dataclasses.dataclass(frozen=True)
class Reshard:
    """Continue with another batch size or mesh from the next step on.

    `shape` must be that of `job.stages`, because the batches and a resumed run follow it. So only `Stages` returns this
    action; `batch.ramp` and `layout.changes` say when.
    """

    shape: Shape


@dataclasses.dataclass(frozen=True)
class RollBack:
    """Restore the newest checkpoint from before `first_step`, and leave out the batches of the steps up to this one.

    If `first_step` is from before a resume, the batches since the restored checkpoint are left out. A run on a caller's
    batches, or without a checkpoint that is old enough, ends with NonFinite, and the message has the reason.
    """

    reason: str
    first_step: int


class Stopped(Exception):
    """The action Stop of a callback ended the run; the state is saved. The message is its reason.

    The loop raises it after the save. A callback returns Stop.
    """


Action = Save | Stop | Reshard | RollBack


def as_list(name: str, given: Iterable, kind: type) -> list:
    """Return an argument of `train` as a list; TypeError unless it is an iterable of objects of a kind."""
    if isinstance(given, kind) or not isinstance(given, Iterable):
        raise TypeError(f"{name}={given!r:.60} is not a list; give a list of objects of a subclass of {kind.__name__}")
    objects = list(given)
    for one in objects:
        if not isinstance(one, kind):
            raise TypeError(f"{name}: {one!r} is not an object of a subclass of {kind.__name__}")
    return objects


def check_action(callback: "Callback", action: object, present: Shape, step: int) -> None:
    """Raise TypeError if what a callback returned is not an action, ValueError for one that is not possible now.

    `present` is the shape of the next step, as `Stages` has it, and `step` the step that was just done.
    """
    name = type(callback).__name__
    if not isinstance(action, Action):
        raise TypeError(
            f"{name}.on_step returned {action!r}; it must return None, Save(), Stop(reason), Reshard(shape) or "
            "RollBack(reason, first_step)"
        )
    if isinstance(action, RollBack) and not 1 <= action.first_step <= step:
        raise ValueError(f"{name}.on_step returned {action}; first_step must be from 1 to {step}, the present step")
    if isinstance(action, Reshard) and action.shape != present:
        raise ValueError(
            f"{name}.on_step returned {action}, but the next step has {present}; use the keys batch.ramp and "
            "layout.changes to change the batch size and the mesh"
        )


def check_all_act(actions: Mapping[type, Action], job, step: int) -> None:
    """Raise ValueError if callbacks of other processes acted otherwise; the hub ends a run in which some did not act.

    Without this, the processes that save or stop would wait for the others, and those for them in the next step. The
    last step has none, and all save after it.
    """
    if not actions or processes.count() == 1 or step == job.config.train.steps:
        return
    names = " and ".join(sorted(kind.__name__ for kind in actions))
    first, *others = processes.gather(ACTING, [job.clock.number, step, names])
    for number, theirs in enumerate(others, start=1):
        if theirs[1:] != first[1:]:  # not the number, which a callback may advance in one process
            raise ValueError(
                f"callbacks returned {theirs[2]} after step {theirs[1]} in {processes.name(number)}, but {first[2]} "
                f"after step {first[1]} in process 0; they must return the same in all processes"
            )


def wrapped(train_step: Callable, callbacks: Iterable["Callback"], job) -> Callable:
    """Return a train step that all callbacks have wrapped; TypeError for one that returns no step."""
    for callback in callbacks:
        train_step = callback.wrap(train_step, job)
        if not callable(train_step):
            raise TypeError(f"{type(callback).__name__}.wrap returned {train_step!r}; it must return a step")
    return train_step


class Callback:
    """Acts between steps. Every process of a run calls it, and it must return the same action in each.

    `job` is the run in this process, see core/job.py. A callback may read `job.config`, `job.run`, `job.workdir`,
    `job.corpus` and `job.clock.step`, and write to `job.log`.
    """

    def on_start(self, job, record: dict | None) -> None:
        """Act before the first step, and after each roll back; `record` is that of the restored checkpoint, if any."""

    def wrap(self, train_step: Callable, job) -> Callable:
        """Return the function (state, batch) -> (state, scalars) to call for a step; called once per run."""
        return train_step

    def on_step(self, job, state, step: int) -> Action | None:
        """Act after a step was dispatched; its numbers may not be computed yet.

        If several callbacks return an action of the same type, the last one counts. If processes return different
        actions, the run ends with an error. Where a clock decides, or anything else that differs between processes, use
        the answer of process 0: `cluster.processes.shared("NAME", decide)` sends it to all.
        """
        return None

    def on_end(self, job, *, has_failed: bool) -> None:
        """Act when the run ends, even if another callback fails here.

        If the run `has_failed` or was interrupted, an exception follows.
        """


class Recheck(Callback):
    """Compute every `train.recheck_every`-th step twice, and compare the bits; see training/replicas.py."""

    def wrap(self, train_step, job):

        def checked(state, batch):
            if every(job.clock.step, job.config.train.recheck_every):
                return replicas.run_twice(train_step, state, batch, job.run.mesh)
            return train_step(state, batch)

        return checked


class StepsInAThread(Callback):
    """Run steps that take minutes in a thread of their own, so that a stop does not wait for the present step."""

    def wrap(self, train_step, job):
        self.executor = concurrent.futures.ThreadPoolExecutor(1)
        return in_thread(
            self.executor, train_step, job.signals, lambda: job.lost.stop_error(job.checkpoints.begun or 0)
        )

    def on_end(self, job, *, has_failed):
        self.executor.shutdown(wait=False)
