# SPDX-License-Identifier: Apache-2.0
"""Check and log steps while later ones run: their scalars stay on the device, and a thread fetches those of a group."""

import math
import time
from concurrent import futures

import jax
import numpy as np

from configs.errors import OfAllProcesses
from reporting.display import Display, counted
from reporting.goodput import Goodput
from reporting.metrics import RESERVED, MetricsWriter
from reporting.throughput import Speed, log_memory

POLL_SECONDS = 0.001
GROUP_SECONDS = 0.1  # of a group of steps; one by one, their scalars take longer to fetch


class Diverged(ArithmeticError):
    """Too many updates in a row were skipped, or a state is not finite; skip `first_step` to `last_step`.

    `applied`: whether these steps changed the parameters, so that no checkpoint of them may be restored.
    `was_finite`: whether each of them had a finite loss and gradient, and was skipped as a spike.
    """

    def __init__(self, what: str, first_step: int, last_step: int, *, applied: bool = False, was_finite: bool = False):
        self.first_step, self.last_step, self.applied, self.was_finite = first_step, last_step, applied, was_finite
        super().__init__(what)


class NonFinite(OfAllProcesses, ArithmeticError):
    """The run diverged, and rolling back did not help; the bad state is not saved."""

    exit_status = 3


def as_count(weight: float) -> int:
    """Return a weight as a whole number, at least 1 if it is more than 0: an objective may weigh in fractions."""
    return max(round(weight), int(weight > 0))


def format_evaluation(objective, figures: dict[str, float], weight: int) -> tuple[str, str, str]:
    """Return the texts of an evaluation: (name, values, unit of the weight)."""
    match objective.format_metrics(figures):
        case (str() as name, str() as values, str() as unit):
            return name, values if weight else "unknown", unit
        case other:
            raise TypeError(f"format_metrics of the objective returned {other!r}; it must return three texts")


class StepLog:
    """Check every step, and write and show every `log_every`-th.

    Attributes:
      last_step: the last step that was checked.
      total_tokens: number of targets with loss weight up to this step.
      last_finite: whether its loss and its gradient were finite.
      last_figures: its scalars by name.
      seconds: time that `add`, `wait` and `flush` took, without waiting for steps.
    """

    def __init__(
        self, run, writer: MetricsWriter, display: Display, *,
        goodput: Goodput, peak_flops: float | None, most_flops: float, record: dict | None,
    ):  # fmt: skip
        """Start, or resume from the `record` of a checkpoint.

        Args:
          peak_flops: of all devices.
          most_flops: model FLOPs of the largest step of the run.
        """
        self.run, self.writer, self.display, self.goodput = run, writer, display, goodput
        self.peak_flops, self.most_flops, self.seconds = peak_flops, most_flops, 0.0
        self.log_every = 1 if run.slow else run.config.train.log_every
        self.num_steps = run.config.train.steps
        self.gathers = jax.process_count() == 1  # several processes must find the same trouble after the same step
        self.copies = jax.default_backend() != "cpu"  # on a CPU, each call takes 4 microseconds and gains nothing
        self.thread = futures.ThreadPoolExecutor(1, "step log")
        self.resume(record)
        writer.write("event", event="start", step=self.last_step)

    def resume(self, record: dict | None) -> None:
        """Resume the counts of a checkpoint's record; None: start from 0."""
        self.checking = self.thread.submit(int)  # checks nothing; what earlier checks raised is dropped
        futures.wait([self.checking])
        record = record or {"total_tokens": 0, "step": 0}
        self.total_tokens, self.last_step, self.pending = record["total_tokens"], record["step"], []
        self.speed, self.last_finite, self.last_figures = Speed(self.goodput.clock), True, {}
        self.streak_finite = True  # whether all steps of the last streak of skipped ones were finite
        self.last_check = -math.inf  # time.perf_counter() at the start of the last check
        self.display.after(self.last_step)

    def record(self) -> dict:
        """Return the counts that a resumed run needs."""
        return {"total_tokens": self.total_tokens, "goodput": self.goodput.record()}

    def average_tokens_per_second(self) -> float:
        """Return the rate over all steps of the run."""
        parts = self.goodput.parts()
        return self.total_tokens / max(parts["training"] + parts["data"], 1e-9)

    def event(self, text: str, event: str, step: int | None = None, **figures) -> None:
        """Write an event to metrics.jsonl and show its text, if any; from any thread."""
        self.writer.write("event", event=event, step=self.last_step if step is None else step, **figures)
        if text:
            self.display.line(text)

    def account(self) -> None:
        """Write the account of the run's time."""
        self.event(
            "", "goodput", goodput=self.goodput.fraction(), wall_seconds=self.goodput.wall_seconds(),
            seconds=self.goodput.parts(),
        )  # fmt: skip

    def evaluation(self, step: int, figures: dict[str, float], weight: int) -> None:
        """Write and show the metrics of held-out data; `weight` counts its tokens."""
        named = {f"eval_{name}": value for name, value in figures.items()}
        self.writer.write("eval", step=step, **named, eval_tokens=weight)
        log_memory()
        name, values, unit = format_evaluation(self.run.objective, figures, weight)
        self.display.line(f"step {step}  held-out {name} {values} ({weight:,} {unit})")

    def add(self, step: int, scalars: dict, rows: int) -> None:
        """Store the scalars of a dispatched step with a batch of `rows`, after a `wait` for the step before it."""
        self.wait()
        began = time.perf_counter()
        if self.copies:
            for value in scalars.values():
                value.copy_to_host_async()
        self.pending.append((step, scalars, rows, rows * self.run.flops_per_example))
        self.seconds += time.perf_counter() - began

    def wait(self) -> None:
        """Wait for the pending steps, and begin to check them if it is time.

        Raises Diverged if a check found that too many updates in a row were skipped.
        """
        if not self.pending:
            return
        self.wait_for_pending()
        began = time.perf_counter()
        if not self.gathers:
            self._begin_check().result()
        elif began - self.last_check >= GROUP_SECONDS or every(self.pending[-1][0], self.log_every):
            self._begin_check()
        self.seconds += time.perf_counter() - began

    def flush(self) -> None:
        """Wait for the pending steps, and count, check and log them.

        Raises Diverged if too many updates in a row were skipped.
        """
        self.wait_for_pending()
        began = time.perf_counter()
        self._begin_check().result()
        self.seconds += time.perf_counter() - began

    def wait_for_pending(self) -> None:
        """Wait for the pending steps."""
        while self.pending and not self.pending[-1][1]["loss"].is_ready():  # block_until_ready would delay signals
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        """End the thread."""
        self.thread.shutdown(wait=False)

    def _begin_check(self) -> futures.Future:
        """Check the pending steps in the thread, after those before them."""
        self.checking.result()
        pending, self.pending, self.last_check = self.pending, [], time.perf_counter()
        self.checking = self.thread.submit(self._check, pending, self.speed.clock.read())
        return self.checking

    def _check(self, pending: list[tuple[int, dict, int, float]], read: dict[str, float]) -> None:
        for step, scalars, rows, flops in pending:
            figures = {name: np.asarray(value).tolist() for name, value in scalars.items()}
            self._complete(step, figures, rows, flops, read)

    def _complete(self, step: int, figures: dict, rows: int, flops: float, read: dict[str, float]) -> None:
        """Count, check and log a step that is done; `read` is the clock when the pending steps had ended."""
        tokens, in_a_row = as_count(figures.pop("tokens")), int(figures.pop("skipped_in_a_row"))
        self.last_finite = all(map(math.isfinite, (figures["loss"], figures["gradient_norm"])))
        if not tokens:  # the mean over nothing is undefined, not 0
            figures["loss"] = math.nan
        self.last_step, self.last_figures = step, figures
        self.total_tokens += tokens
        self.speed.count(tokens, rows, flops)
        self.display.after(step)
        if figures["skipped"]:
            self._report_skipped(step, figures, in_a_row)
        if every(step, self.log_every) or step == self.num_steps:
            counts = {"global_batch": rows, "tokens": tokens, "total_tokens": self.total_tokens}
            self._log(step, figures, counts, read, grows=flops < self.most_flops)

    def _report_skipped(self, step: int, figures: dict, in_a_row: int) -> None:
        self.streak_finite = self.last_finite and (in_a_row == 1 or self.streak_finite)
        bad = {name: figures[name] for name in ("loss", "gradient_norm")}
        what = ", ".join(f"{name} {value:.4g}" for name, value in bad.items())
        self.event(f"step {step}: update skipped ({what})", "update_not_taken", step, in_a_row=in_a_row, **bad)
        if in_a_row >= self.run.config.train.bad_steps:
            raise Diverged(
                f"the updates of {counted(in_a_row, 'step')} in a row were skipped ({what})", step - in_a_row + 1, step,
                was_finite=self.streak_finite,
            )  # fmt: skip

    def _log(self, step: int, figures: dict, counts: dict, read: dict[str, float], *, grows: bool) -> None:
        rates = counts | self.speed.interval(read, self.run.mesh.size, self.peak_flops)
        rates["goodput"] = self.goodput.fraction()
        if taken := figures.keys() & {*RESERVED, *rates}:
            raise ValueError(
                f"a scalar of the objective or of a step transform is called {min(taken)}, as a part of each line of "
                "metrics.jsonl; rename it"
            )
        self.writer.write("train", step=step, **{name: _short(value) for name, value in figures.items()}, **rates)
        log_memory()
        self.display.train(step, figures | rates, self.run.objective.progress, grows=grows)


def _short(figure):
    """Return a figure for metrics.jsonl. An array has many numbers, so each gets four digits, or null if not finite."""
    numbers = np.asarray(figure)
    if not numbers.ndim or numbers.dtype.kind != "f":
        return figure
    short = [float(f"{number:.4g}") if math.isfinite(number) else None for number in numbers.ravel()]
    return np.reshape(short, numbers.shape).tolist()


def every(step: int, interval: int) -> bool:
    """Return whether an event of every `interval` steps is due after `step`; never if `interval` is 0."""
    return interval > 0 and step % interval == 0
