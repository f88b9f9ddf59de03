# SPDX-License-Identifier: Apache-2.0
"""Follows the steps one behind: scalars stay on the device until the next step is under way."""

import math
import pathlib
import time
from collections.abc import Callable

import jax

from training.display import Display
from training.metrics import MetricsWriter, elapsed_before
from training.step import every
from training.throughput import Stopwatch

POLL_SECONDS = 0.001


class NonFinite(ArithmeticError):
    """The loss or the gradient is not a number any more; nothing from this step on is saved."""

    exit_status = 3


class StepLog:
    """Writes and shows every `log_every`-th step, and watches every one.

    Attributes:
      total_tokens: targets with loss weight that the run has trained on.
    """

    def __init__(
        self, run, writer: MetricsWriter, display: Display, *,
        workdir: pathlib.Path, peak_flops: float | None, record: dict | None, on_end: Callable[[int], None],
    ):  # fmt: skip
        """Begin.

        Args:
          peak_flops: of all devices.
          record: what an earlier process saved beside its state.
          on_end: called with each step that has ended.
        """
        self.on_end = on_end
        record = record or {"total_tokens": 0, "productive_seconds": 0.0}
        self.run, self.writer, self.display = run, writer, display
        self.peak_flops, self.total_tokens, self.pending = peak_flops, record["total_tokens"], None
        self.stopwatch = Stopwatch(record["productive_seconds"], elapsed_before(workdir))
        writer.write("event", event="start", step=record.get("step", 0))
        display.after(record.get("step", 0))

    def record(self) -> dict:
        """Return what a later process needs to go on counting."""
        return {"total_tokens": self.total_tokens, "productive_seconds": self.stopwatch.productive_seconds}

    def average_tokens_per_second(self) -> float:
        """Return the rate over all steps of the run."""
        return self.total_tokens / max(self.stopwatch.productive_seconds, 1e-9)

    def evaluation(self, step: int, result: tuple[float, int] | None) -> None:
        """Write and show a held-out loss (of how many tokens); its time is no step's. None: it was stopped."""
        self.stopwatch.skip()
        if result is None:
            return
        loss, tokens = result
        self.writer.write("eval", step=step, eval_loss=loss, eval_tokens=tokens)
        self.display.line(f"step {step}  held-out loss {loss:.4f} nats a token ({tokens:,} tokens)")

    def add(self, step: int, scalars: dict) -> None:
        """Take the scalars of a step just dispatched, and finish with those of the step before."""
        self.flush()
        self.pending = (step, scalars)

    def flush(self) -> None:
        """Wait for the pending step, count it, check it, and log it if it is due.

        Raises:
          NonFinite: its loss or gradient is not finite.
        """
        if self.pending is None:
            return
        (step, scalars), self.pending = self.pending, None
        while not scalars["loss"].is_ready():  # not block_until_ready, which would keep signals waiting
            time.sleep(POLL_SECONDS)
        figures = {name: float(value) for name, value in jax.device_get(scalars).items()}
        tokens = int(figures.pop("tokens"))
        self.total_tokens += tokens
        self.stopwatch.mark(tokens, self.run.config.train.global_batch)
        self.on_end(step)
        for name in ("loss", "gradient_norm"):
            if not math.isfinite(figures[name]):
                raise NonFinite(
                    f"{name} is {figures[name]} at step {step}, and nothing was saved since; start again in another "
                    "--workdir with a lower optimizer.learning_rate or optimizer.clip_norm"
                )
        self.display.after(step)
        train = self.run.config.train
        if self.run.slow or every(step, train.log_every) or step == train.steps:
            self._log(step, figures | {"tokens": tokens, "total_tokens": self.total_tokens})

    def _log(self, step: int, figures: dict) -> None:
        rates = self.stopwatch.interval(self.run.mesh.size, self.run.flops_per_token, self.peak_flops)
        self.writer.write("train", step=step, **figures, **rates)
        self.display.train(step, figures | rates)
