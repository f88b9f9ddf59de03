# SPDX-License-Identifier: Apache-2.0
"""Follows the steps one behind: scalars stay on the device until the next step is under way."""

import math
import time

import jax

from training.display import Display
from training.goodput import Goodput
from training.metrics import MetricsWriter
from training.step import every
from training.throughput import Speed

POLL_SECONDS = 0.001


class Diverged(ArithmeticError):
    """Updates were not taken too often, or a state is not finite; `first_step` to `last_step` are to be left out."""

    def __init__(self, what: str, first_step: int, last_step: int):
        self.first_step, self.last_step = first_step, last_step
        super().__init__(what)


class NonFinite(ArithmeticError):
    """The run diverged, and going back did not help; nothing of it is saved."""

    exit_status = 3


def told(objective, figures: dict[str, float], weight: int) -> tuple[str, str, str]:
    """Return what to say of an evaluation: (name, values, what the weight counts)."""
    name, values, unit = objective.told(figures)
    return name, values if weight else "unknown", unit


class StepLog:
    """Writes and shows every `log_every`-th step, and watches every one.

    `total_tokens` are the targets with loss weight that the run has trained on; `last_finite` says whether the last
    step's loss and gradient were finite.
    """

    def __init__(
        self, run, writer: MetricsWriter, display: Display, *,
        goodput: Goodput, peak_flops: float | None, record: dict | None,
    ):  # fmt: skip
        """Begin with `peak_flops` of all devices and, as `record`, what an earlier process saved beside its state."""
        self.run, self.writer, self.display, self.goodput = run, writer, display, goodput
        self.peak_flops = peak_flops
        self.go_on(record)
        writer.write("event", event="start", step=self.last_step)

    def go_on(self, record: dict | None) -> None:
        """Count on from a checkpoint; None: from nothing."""
        record = record or {"total_tokens": 0, "step": 0}
        self.total_tokens, self.last_step, self.pending = record["total_tokens"], record["step"], None
        self.speed, self.last_finite = Speed(self.goodput.clock), True
        self.display.after(self.last_step)

    def record(self) -> dict:
        """Return what a later process needs to go on counting."""
        return {"total_tokens": self.total_tokens, "goodput": self.goodput.record()}

    def average_tokens_per_second(self) -> float:
        """Return the rate over all steps of the run."""
        parts = self.goodput.parts()
        return self.total_tokens / max(parts["training"] + parts["data"], 1e-9)

    def event(self, text: str, event: str, step: int | None = None, **figures) -> None:
        """Write what happened to metrics.jsonl and, where there is a text, show it; from any thread."""
        self.writer.write("event", event=event, step=self.last_step if step is None else step, **figures)
        if text:
            self.display.line(text)

    def account(self) -> None:
        """Write where the time of the run has gone."""
        self.event(
            "", "goodput", goodput=self.goodput.fraction(), wall_seconds=self.goodput.wall_seconds(),
            seconds=self.goodput.parts(),
        )  # fmt: skip

    def evaluation(self, step: int, figures: dict[str, float], weight: int) -> None:
        """Write and show what was found on what is held out (of how many tokens)."""
        named = {f"eval_{name}": value for name, value in figures.items()}
        self.writer.write("eval", step=step, **named, eval_tokens=weight)
        name, values, unit = told(self.run.objective, figures, weight)
        self.display.line(f"step {step}  held-out {name} {values} ({weight:,} {unit})")

    def add(self, step: int, scalars: dict, rows: int) -> None:
        """Take the scalars of a step just dispatched, its batch of `rows`, and finish with those of the step before."""
        self.flush()
        self.pending = (step, scalars, rows)

    def flush(self) -> None:
        """Wait for the pending step, count it, check it, and log it if it is due.

        Raises Diverged where it was the last of too many whose update was not taken.
        """
        if self.pending is None:
            return
        (step, scalars, rows), self.pending = self.pending, None
        while not scalars["loss"].is_ready():  # not block_until_ready, which would keep signals waiting
            time.sleep(POLL_SECONDS)
        figures = {name: value.tolist() for name, value in jax.device_get(scalars).items()}
        tokens, in_a_row = int(figures.pop("tokens")), int(figures.pop("skipped_in_a_row"))
        self.last_finite = all(map(math.isfinite, (figures["loss"], figures["gradient_norm"])))
        if not tokens:  # a mean over nothing is not 0
            figures["loss"] = math.nan
        self.last_step = step
        self.total_tokens += tokens
        self.speed.count(tokens, rows)
        self.display.after(step)
        if figures["skipped"]:
            self._tell_skipped(step, figures, in_a_row)
        train = self.run.config.train
        if self.run.slow or every(step, train.log_every) or step == train.steps:
            self._log(step, figures | {"global_batch": rows, "tokens": tokens, "total_tokens": self.total_tokens})

    def _tell_skipped(self, step: int, figures: dict, in_a_row: int) -> None:
        bad = {name: figures[name] for name in ("loss", "gradient_norm")}
        what = ", ".join(f"{name} {value:.4g}" for name, value in bad.items())
        self.event(f"step {step}: update not taken ({what})", "update_not_taken", step, in_a_row=in_a_row, **bad)
        if in_a_row >= self.run.config.train.bad_steps:
            raise Diverged(
                f"the updates of {in_a_row} steps in a row were not taken ({what})", step - in_a_row + 1, step
            )

    def _log(self, step: int, figures: dict) -> None:
        rates = self.speed.interval(self.run.mesh.size, self.run.flops_per_example, self.peak_flops)
        rates["goodput"] = self.goodput.fraction()
        self.writer.write("train", step=step, **figures, **rates)
        self.display.train(step, figures | rates)
