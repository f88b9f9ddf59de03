# SPDX-License-Identifier: Apache-2.0
"""Tries the advice on a configuration: each change is measured for some steps, and kept if it helps beyond the noise.

Batch, data, model and optimizer stay as they are: advice that changes what is trained is only shown.
"""

import json
import math
import pathlib
import shutil
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax

from cluster import processes
from cluster.hub import RunError
from cluster.interruption import Interrupted
from core.callbacks import Callback, Stop
from input_pipeline.batches import importing_tensorflow
from profiling.advice import Advice
from profiling.recording import FILE, Profile
from profiling.windows import Window
from rehearsal.sections import options, seconds_text
from reporting import preflight
from reporting.display import aligned
from settings import validation

WARM_UP, WINDOWS, TRACED = 3, 8, 3  # steps before; windows that are timed; traced steps
WINDOW_SECONDS, FEWEST_STEPS, MOST_STEPS = 0.4, 2, 100  # of a window
NOISES = 2.0  # a change is kept if it saves more than this many standard errors


class Timing(NamedTuple):
    """Seconds of a step, with waiting for its batch and all work of the host, and their standard error."""

    seconds: float
    error: float


class Timer(Callback):
    """Time windows of steps; after the last one let `profile` trace some steps, and end the run."""

    def __init__(self, warm_up: int, profile: Profile):
        self.profile, self.seconds = profile, []
        self._ends, self._steps, self._since = warm_up, 0, 0.0  # of what is timed or traced now

    def on_step(self, job, state, step):
        """Note the time after each window."""
        if step < self._ends:
            return None
        if len(self.seconds) == WINDOWS:
            return Stop("measured")
        job.log.flush()  # waits for the step
        if self._steps:
            self.seconds.append((time.perf_counter() - self._since) / self._steps)
        if len(self.seconds) == WINDOWS:
            self.profile.window, self._ends = Window(step + 1, step + TRACED), step + TRACED
            return None
        self._steps = processes.shared("steps of a window", self._steps_of_window)
        self._ends, self._since = step + self._steps, time.perf_counter()
        return None

    def _steps_of_window(self) -> int:
        """Return how many steps take WINDOW_SECONDS, by the last window; few for the first one."""
        wanted = WINDOW_SECONDS / self.seconds[-1] if self.seconds else 0
        return max(FEWEST_STEPS, min(MOST_STEPS, round(wanted)))

    def timing(self) -> Timing:
        """Return the median over windows; its error is estimated from their median deviation."""
        middle = statistics.median(self.seconds)
        deviation = 1.48 * statistics.median(abs(seconds - middle) for seconds in self.seconds)
        return Timing(middle, 1.25 * deviation / math.sqrt(len(self.seconds)))


class Trial(NamedTuple):
    """A measured configuration."""

    timing: Timing
    advice: list[Advice]


def measure(train: Callable, config, folder: pathlib.Path, **arguments) -> Trial:
    """Train some steps of a configuration in an empty folder, and remove the folder.

    `train` is train.train, and `arguments` are its other arguments.
    """
    short = config.copy_and_resolve_references()
    # Batches that were made ahead would hide a slow reader from the first windows.
    warm_up = WARM_UP + config.data.prefetch + config.data.readers
    latest = warm_up + WINDOWS * MOST_STEPS + 1  # step at which the trace begins
    with short.unlocked():
        short.train.update(steps=latest + TRACED, eval_every=0, save_every=0, epochs=0.0, tokens=0)
        short.evaluation.every_epochs = 0.0
        short.logging.update(report=False, alerts="", wandb=False, trackio=False)
    tracer = Profile(Window(latest, latest + TRACED - 1))
    timer = Timer(warm_up, tracer)
    try:
        train(short, folder, callbacks=[tracer, timer], **arguments)
        if processes.index() == 0 and not (folder / FILE).exists():
            raise RunError("a trial has no profile; the line `have no profile` above says why")
        profile = json.loads((folder / FILE).read_text()) if processes.index() == 0 else None
    except Interrupted:  # its message names a checkpoint, which is removed with the folder
        raise KeyboardInterrupt from None
    finally:
        if processes.index() == 0 or short.checkpoint.per_host:
            shutil.rmtree(folder, ignore_errors=True)
    profile = processes.shared("tuned profile", lambda: profile)
    found = [Advice(**{name: one[name] for name in Advice._fields}) for one in profile["advice"]]
    return Trial(Timing(*processes.shared("timing", timer.timing)), found)


def tune(train: Callable, config, workdir: pathlib.Path, say: Callable[[str], None], **arguments) -> dict:
    """Try the advice, one change after the other; return the keys to set, and say what each saved.

    The trials are in a folder of `workdir`, which is removed. `arguments` are those of train.train.
    """
    num_devices = math.prod(config.mesh.values())
    folder, kept, rows, tried = workdir / "tuning", {}, [], set()
    processes.log_file(workdir).parent.mkdir(parents=True, exist_ok=True)  # what the trials log
    importing_tensorflow().result()  # until then batches of short steps wait
    best = measure(train, config, folder, **arguments)
    before = best.timing
    say(f"as it is: {_text(before)} a step")
    while change := next((one for one in best.advice if _is_new(one, tried)), None):
        tried.add(_name(change))
        changed = validation.changed(config, kept | change.keys, num_devices)
        if changed is None:
            continue
        say(f"{change.line()}; trying it")
        trial = _measured_if_it_fits(train, changed, folder, **arguments)
        if trial is None:
            rows.append((options(change.keys), "-", "-", "not kept: does not fit"))
            say("  does not fit into memory")
            continue
        saved = best.timing.seconds - trial.timing.seconds
        helped = saved > NOISES * math.hypot(best.timing.error, trial.timing.error)
        said = "kept" if helped else "not kept: no gain beyond the noise"
        rows.append((options(change.keys), _text(trial.timing), f"{saved / best.timing.seconds:+.1%}", said))
        say(f"  {rows[-1][1]} a step, {rows[-1][2]} of the time saved: {said}")
        if helped:  # what did not help may help now, where something else was slower before
            kept, best, tried = kept | change.keys, trial, set()
    _conclude(say, rows, kept, before, best)
    return kept


def _measured_if_it_fits(*what, **arguments) -> Trial | None:
    """Return what `measure` does; None if there is too little memory for the step."""
    try:
        return measure(*what, **arguments)
    except preflight.StepTooLarge:
        return None
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return None


def _is_new(advice: Advice, tried: set) -> bool:
    return bool(advice.keys) and not advice.changes_training and _name(advice) not in tried


def _name(advice: Advice) -> tuple:
    return tuple(sorted(advice.keys.items()))


def _text(timing: Timing) -> str:
    return f"{seconds_text(timing.seconds)} +- {seconds_text(timing.error)}"


def _conclude(say: Callable, rows: list, kept: dict, before: Timing, best: Trial) -> None:
    say("")
    for line in aligned([("change", "a step", "saved", "verdict"), *rows]) if rows else ("nothing to try",):
        say(line)
    for one in best.advice:
        if one.changes_training or not one.keys:
            say(f"not tried: {one.line()}")
    if kept:
        gain = before.seconds / best.timing.seconds
        say(f"\nadd {options(kept)}: {gain:.2f} times as fast")
