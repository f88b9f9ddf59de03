# SPDX-License-Identifier: Apache-2.0
"""Traces steps of a run with jax.profiler and writes their summary: `profile.json`, and lines on the terminal.

The traces are in tensorboard/plugins/profile/steps-START-STOP/ of the run's folder, a file for each process, where
XProf and TensorBoard look for them.
"""

import contextlib
import json
import pathlib
import shutil
import tempfile

import jax

from cluster import processes
from core.callbacks import Callback
from files.atomic import write_atomically
from files.json_reader import JsonError
from profiling import energy, report, windows
from profiling.advice import Measured, advise
from profiling.program import Program
from profiling.summary import summarise
from profiling.trace import read
from profiling.windows import Window
from rehearsal.assumptions import Assumptions, of_topology
from reporting import preflight
from reporting.metrics import read_steps
from reporting.step_log import every
from reporting.throughput import device_peak_gib
from training.compiled_steps import shape_of

FILE = "profile.json"
UNLIMITED = float("inf")


class Profile(Callback):
    """Trace the steps of a window, and of those that are asked for while the run goes on.

    All steps of a trace have the same batch size, mesh and cycles: it ends before they change. It starts again if the
    run rolls back.
    """

    def __init__(self, window: Window | None = None):
        """`window`: of --profile, if any."""
        self.window, self._trace, self._shape = window, None, None

    def on_start(self, job, record):
        """Say that a window cannot be traced, if the run resumes after its start or ends before it."""
        self._num_steps, self._log_every = job.config.train.steps, job.log.log_every
        self.window = self.window and self._if_reached(job, self.window)
        if self._trace:  # the run has rolled back
            return self._discard()
        if self.window and record and record["step"] >= self.window.start:
            job.log.event(
                f"step {record['step']}: the steps {self.window.start} to {self.window.stop} are not traced, as the "
                "run resumes after the first of them", "no_profile",
            )  # fmt: skip
            self.window = None

    def wrap(self, train_step, job):
        """Return the step, which begins the trace where the window begins."""

        def traced(state, batch):
            if self.window is None or job.clock.step < self.window.start:
                return train_step(state, batch)
            if self._trace is None:
                self._begin(job, batch)
            with jax.profiler.StepTraceAnnotation("train", step_num=job.clock.step):
                return train_step(state, batch)

        return traced

    def on_step(self, job, state, step):
        """End the trace after the last step of the window; look for a request at each step that is logged."""
        if self._trace and (step >= min(self.window.stop, self._num_steps) or job.stages.shape(step) != self._stage):
            self._end(job, step)
        elif self.window is None and every(step, self._log_every):
            self.window = self._requested(job, step)

    def on_end(self, job, *, has_failed):
        """End a trace that the end of the run cuts off, without a summary."""
        if self._trace:
            self._discard()

    def _discard(self) -> None:
        with self._trace:
            self._trace.stop()
        self._trace = None

    def _requested(self, job, step: int) -> Window | None:
        """Return the window that process 0 was asked for, in all processes."""
        found = processes.shared("requested profile", lambda: windows.requested(job.workdir, step))
        if found is None:
            return None
        if window := self._if_reached(job, Window(*found)):
            job.log.event(f"step {step}: the steps {window.start} to {window.stop} will be traced", "profile_requested")
        return window

    def _if_reached(self, job, window: Window) -> Window | None:
        """Return the window; None, with a line, if the run ends before its first step."""
        if window.start <= self._num_steps:
            return window
        job.log.event(
            f"the steps {window.start} to {window.stop} are not traced, as the run ends at step {self._num_steps}",
            "no_profile",
        )
        return None

    def _begin(self, job, batch) -> None:
        job.log.flush()  # the step before is not part of the trace
        self._shape = shape_of(batch, job.compiled_steps.cycles)
        self._first, self._stage = job.clock.step, job.stages.shape(job.clock.step - 1)
        self._before, self._between, self._joules = job.clock.read(), _between_steps(job), _joules()
        self._trace = Trace()

    def _end(self, job, step: int) -> None:
        """Stop the trace, keep its file, and summarise it."""
        job.log.flush()
        phases = {phase: seconds - self._before[phase] for phase, seconds in job.clock.read().items()}
        before, after = self._joules, _joules()
        joules = None if None in (before, after) else after - before
        trace, start = self._trace, self._first
        self._trace = self.window = None
        with job.clock.within("profile"), trace:
            if file := trace.stop():
                file = kept(file, job.workdir, Window(start, step))
                figures = self._figures(job, file, step - start + 1, phases) | {"joules": joules}
            else:
                figures = {"failed": f"{processes.name(processes.index())}: {trace.failure}"}
        everyone = processes.gather("profile", figures)
        if failed := [one["failed"] for one in everyone if "failed" in one]:
            job.log.event(f"the steps {start} to {step} have no profile: {failed[0]}", "no_profile")
        elif processes.index() == 0:
            self._report(job, everyone, start, step)

    def _report(self, job, everyone: list[dict], start: int, step: int) -> None:
        """Write and show what the processes measured; the first one does this alone."""
        whole = report.joined(everyone)
        whole = {"steps": [start, step]} | whole
        known = preflight.known_topology(job.topology)
        whole |= report.rehearsed(job.config, known and job.topology) | report.rates(whole, job)
        advice = advise(Measured(whole, job.config, known, lines_of(job.workdir), str(job.checkpoints.address)))
        whole |= report.described(whole) | {"advice": [one._asdict() | {"line": one.line()} for one in advice]}
        with contextlib.suppress(OSError):  # a full disk; the lines are shown below
            write_atomically(job.workdir / FILE, json.dumps(whole, indent=1, allow_nan=False).encode())
        job.log.event("", "profile", step, **{name: whole[name] for name in ("idle_share", "data_wait_share")})
        job.log.display.lines(report.lines(whole))

    def _figures(self, job, trace: pathlib.Path, num_steps: int, phases: dict[str, float]) -> dict:
        """Return the figures of this process."""
        compiled = job.compiled_steps.get(self._shape)
        given = rates(job)
        flops, bandwidth = (None if rate == UNLIMITED else rate for rate in (given.peak_flops, given.memory_bandwidth))
        program = Program(compiled.as_text(), given, dict(job.run.mesh.shape))
        devices = read(trace, program.name)
        found = summarise(devices, program, num_steps, given) if devices else {}
        host = sum(phases.values())
        return found | {
            "callback_share": (_between_steps(job) - self._between) / host,
            "not_donated_gib": report.not_donated_gib(job.run, compiled),
            "host": processes.name(processes.index()), "num_steps": num_steps, "host_seconds": host / num_steps,
            "phases": {phase: seconds / num_steps for phase, seconds in phases.items() if seconds},
            "memory_gib": report.memory_gib(job.run, compiled, program.module), "device_peak_gib": device_peak_gib(),
            "flops_model": job.run.flops_per_example * self._shape.rows / job.run.mesh.size, "rows": self._shape.rows,
            "peak_flops": flops, "peak_bytes_per_second": bandwidth, "platform": jax.default_backend(),
        }  # fmt: skip


class Trace:
    """A trace by jax.profiler, in a temporary folder that is removed after a `with` block.

    Attributes:
      unwritten: of the process: why its last trace could not be written. jax keeps that one open, and begins no other.
      failure: why there is no trace; "" if there is one.
    """

    unwritten = ""

    def __init__(self):
        self.failure, self._folder = Trace.unwritten, None
        if self.failure:
            return
        try:
            self._folder = tempfile.TemporaryDirectory(prefix="trace-")
        except OSError as error:
            self.failure = str(error)
            return
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0  # its events would be most of the file
        jax.profiler.start_trace(self._folder.name, profiler_options=options)

    def stop(self) -> pathlib.Path | None:
        """End the trace; return its file, None if there is none."""
        if self.failure:
            return None
        try:
            jax.profiler.stop_trace()
        except jax.errors.JaxRuntimeError as error:
            self.failure = Trace.unwritten = f"{self._folder.name}: {str(error).partition(chr(10))[0]}"
            return None
        file = next(pathlib.Path(self._folder.name).glob("plugins/profile/*/*.xplane.pb"), None)
        self.failure = "" if file else f"jax wrote no trace to {self._folder.name}"
        return file

    def __enter__(self):
        return self

    def __exit__(self, *unused):
        if self._folder:
            self._folder.cleanup()


def kept(trace: pathlib.Path, workdir: pathlib.Path, window: Window) -> pathlib.Path:
    """Copy the trace of this process to the run's folder; return the copy, or the trace where the disk is full."""
    session = workdir / "tensorboard" / "plugins" / "profile" / f"steps-{window.start}-{window.stop}"
    try:
        session.mkdir(parents=True, exist_ok=True)
        return pathlib.Path(shutil.copy(trace, session / f"worker-{processes.index()}.xplane.pb"))
    except OSError:
        return trace


def lines_of(workdir: pathlib.Path) -> list[dict]:
    """Return the `train` lines of the run's metrics so far; [] if they cannot be read."""
    try:
        return read_steps(workdir / "metrics.jsonl", "train")
    except (OSError, JsonError):
        return []


def _joules() -> float | None:
    """Return the joules that this process's GPUs have used so far; None for other devices."""
    if jax.default_backend() != "gpu":
        return None
    return energy.nvml_joules(device.local_hardware_id for device in jax.local_devices())


def _between_steps(job) -> float:
    """Return the seconds so far that callbacks and metrics took."""
    return job.callback_seconds + job.log.seconds


def rates(job) -> Assumptions:
    """Return the rates of a device; what is unknown is infinite."""
    known = preflight.known_topology(job.topology)
    if known and known.accelerator != "cpu":
        return of_topology(known)
    total, _ = preflight.peak_flops(job.topology, job.run.mesh.size)
    peak = total / job.run.mesh.size if total else UNLIMITED
    return Assumptions(peak, UNLIMITED, UNLIMITED, UNLIMITED, None)
