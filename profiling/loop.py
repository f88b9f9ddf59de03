# SPDX-License-Identifier: Apache-2.0
"""Times the steps of any loop, train.py's or a caller's own, and gives advice by the rules of profiling/advice.py."""

import json
import statistics
import time
import weakref

import jax

from configs import topologies
from profiling import energy
from profiling.advice import Measured, advise
from profiling.recording import FILE, Profile
from profiling.windows import Window
from reporting.clock import OF_STEPS
from reporting.preflight import peak_flops
from reporting.throughput import device_peak_gib, host_memory_gib

COMPILED = "/jax/core/compile/backend_compile_duration"
UNKNOWN = dict.fromkeys(  # what only a trace of train.py has
    ("idle_share", "device_imbalance", "host_imbalance", "by_file", "exposed_collective_seconds", "not_donated_gib")
) | {"callback_share": 0.0, "memory_gib": {"total": 0.0}}  # 0: not known


class LoopProfile(Profile):
    """Call `start_step` and `end_step` around each step; or pass it to `train` as a callback, which traces some too."""

    def __init__(self, config, window: Window):
        """`config`: what advice is about; `window`: the steps of a run of `train` that are traced."""
        super().__init__(window)
        self.config, self._asked, self._clock, self._workdir, self._since = config, window, None, None, 0.0
        self._begin_anew()
        listener = weakref.WeakMethod(self._on_compilation)  # jax keeps what it calls for ever

        def listen(*event, **about) -> None:
            if method := listener():
                method(*event, **about)

        jax.monitoring.register_event_duration_secs_listener(listen)

    def _begin_anew(self) -> None:
        self._seconds, self._details = [], {}
        self._began = self._ended = None
        self._waiting = self._compiling = 0.0  # seconds between steps, and of compilation in them after the first

    def start_step(self) -> None:
        """Begin a step; the time since the last one counts as waiting for its batch."""
        self._began = time.perf_counter()
        self._waiting += self._began - (self._ended or self._began)

    def end_step(self, result=None) -> None:
        """End a step; waits for the arrays in `result`, since JAX returns before they are computed.

        Raises ValueError if no step has begun.
        """
        if self._began is None:
            raise ValueError("end_step() ends a step that start_step() has begun; call that first")
        jax.block_until_ready(result)
        self._ended = time.perf_counter()
        self._seconds.append(self._ended - self._began)
        self._began = None

    def summary(self) -> dict:
        """Return steps, seconds, share of waiting for data, and memory; the first step, which may compile, is apart."""
        if not self._seconds:
            return {"steps": 0}
        later, peaks = self._seconds[1:] or self._seconds, device_peak_gib()
        phases = self._clock.read() if self._clock else {"data": self._waiting, "step": sum(later), "wait": 0.0}
        return {
            "steps": len(self._seconds), "first_step_seconds": self._seconds[0],
            "step_seconds": statistics.fmean(later), "median_step_seconds": statistics.median(later),
            "data_wait_share": phases["data"] / sum(phases.get(phase, 0.0) for phase in OF_STEPS),
            "compile_seconds": self._compiling, "host_memory_gib": host_memory_gib()[0],
            "device_peak_gib": peaks and max(peaks),
        } | self._details  # fmt: skip

    def add_details(self, compiled=None) -> dict:
        """Add compute efficiency, memory bandwidth, latency and energy to the summary, and return them; None: unknown.

        They are those of the traced steps, or of a `compiled` step, which `jax.jit(step).lower(...).compile()` returns.
        Before the first step there are none.
        """
        summary, profile, train = self.summary(), self._profile(), self.config.train
        if not summary["steps"]:
            return {}
        seconds = summary["step_seconds"]
        flops, moved = profile.get("flops_per_second"), profile.get("bytes_per_second")
        if compiled is not None:
            costs = compiled.cost_analysis() or {}  # a program that computes nothing has no "flops"
            flops, moved = (costs[name] / seconds if name in costs else None for name in ("flops", "bytes accessed"))
        count = jax.device_count()
        peak, chip = peak_flops(None, count)[0], topologies.CHIP_OF_KIND.get(jax.devices()[0].device_kind, "")
        rows, busy = profile.get("rows") or train.global_batch, 1 - summary["data_wait_share"]
        used = profile.get("energy") or energy.of_step(chip, count, seconds, busy, rows * train.sequence_length)
        self._details = {
            "compute_efficiency": flops * count / peak if flops and peak else None, "memory_bandwidth": moved,
            "latency_seconds": summary["median_step_seconds"],
            "energy_joules_per_step": used and used["joules_per_step"],
        }  # fmt: skip
        return self._details

    def advice(self) -> list[str]:
        """Return what would help, with its evidence and the keys to set, the largest gain first."""
        if profile := self._profile():
            return [one["line"] for one in profile["advice"]]
        summary, peaks = self.summary(), device_peak_gib()
        if not summary["steps"]:
            return []
        waits = max(0.0, sum(self._seconds[1:]) - self._compiling)
        measured = UNKNOWN | {
            "data_wait_share": summary["data_wait_share"], "host_step_seconds": summary["step_seconds"],
            "host_seconds_by_phase": {"data": self._waiting, "compile": self._compiling, "wait": waits},
            "device_peak_gib": peaks and {"least": min(peaks), "most": max(peaks)}, "devices": jax.device_count(),
            "platform": jax.default_backend(), "flops_per_second": None, "peak_flops": None,
        }  # fmt: skip
        return [advice.line() for advice in advise(Measured(measured, self.config, None))]

    def wrap(self, train_step, job):
        """Return the step of a run, timed and traced; what was timed before is not part of it."""
        self._begin_anew()
        self.window, self._since = self._asked, time.time()
        self._clock, self._workdir = job.clock, job.workdir  # not the job, which has arrays
        traced = super().wrap(train_step, job)

        def timed(state, batch):
            self.start_step()
            return traced(state, batch)

        return timed

    def on_step(self, job, state, step):
        """End the step when it is computed."""
        self.end_step(state.step)
        super().on_step(job, state, step)

    def _profile(self) -> dict:
        file = self._workdir and self._workdir / FILE
        is_ours = file and file.is_file() and file.stat().st_mtime >= self._since  # not that of an earlier run
        return json.loads(file.read_text()) if is_ours else {}

    def _on_compilation(self, event: str, seconds: float, **_) -> None:
        if event == COMPILED and self._began is not None and self._seconds:
            self._compiling += seconds
