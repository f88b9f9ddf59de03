# SPDX-License-Identifier: Apache-2.0
"""The stages of a run: batch size, mesh and cycles by step, as `batch.ramp`, `layout.changes` and `supervision` say."""

from typing import NamedTuple

from core.callbacks import Callback, Reshard
from reporting.step_log import every
from settings import cycles, layouts, ramp
from training.compiled_steps import Shape
from training.transforms import noise


class Stage(NamedTuple):
    """Consecutive steps with batches of one size, the first of them after `step`; `examples`: consumed before them."""

    step: int
    examples: int
    rows: int


class Stages(Callback):
    """Increase the batch size and change the mesh when it is time.

    Attributes:
      increases: number of increases of the batch size so far.
      end: the last step of the present shape.
      grows: whether the batch is smaller than it will be.
    """

    def __init__(self, config, record: dict | None):
        self.config = config
        _, _, self.increases = position_of(record)

    def on_start(self, job, record):
        """Return to the batch size of the restored checkpoint; `begin` does the rest."""
        _, _, self.increases = position_of(record)

    @property
    def rows(self) -> int:
        """The present size of the global batch."""
        return ramp.rows(self.config, self.increases)

    def shape(self, step: int) -> Shape:
        """Return the batch size, mesh and cycles of the next step after `step`."""
        return Shape(self.rows, layouts.mesh_after(self.config, step), cycles.after(self.config, step))

    def complete(self, shape: Shape) -> Shape:
        """Return the shape with all cycles: a finished run and the readers of its checkpoint use them."""
        return shape._replace(cycles=cycles.after(self.config, self.config.train.steps))

    def begin(self, step: int) -> Shape | None:
        """Begin the stage after `step`; return the shape of the stage after it, None for the last stage."""
        config = self.config
        self.grows = self.rows != config.train.global_batch
        ramp_end = ramp.stage_end(config, step, self.increases)
        self.end = min(ramp_end, layouts.stage_end(config, step), cycles.stage_end(config, step))
        if self.end >= config.train.steps:
            return None
        grown = ramp.rows(config, self.increases + (ramp_end == self.end))
        return Shape(grown, layouts.mesh_after(config, self.end), cycles.after(config, self.end))

    def on_step(self, job, state, step):
        """Increase the batch size if the ramp says so; return the shape of the next stage at the end of a stage."""
        if step < self.end and not self.grows:
            return None
        self._maybe_grow(job, state, step)  # after the last step too: more of them may follow in a resumed run
        return Reshard(self.shape(step)) if self.end <= step < self.config.train.steps else None

    def _maybe_grow(self, job, state, step: int) -> None:
        config, rows = self.config, self.rows
        if not self.grows or not every(step, config.batch.increase_step):
            return
        job.log.flush()
        larger = ramp.rows(config, self.increases + 1)
        if config.batch.ramp == "noise_scale" and float(noise.estimate(state.extra["noise"])) < larger:
            return
        self.increases += 1
        if larger > rows and step < config.train.steps:  # rounding may keep the size
            text = f"step {step}: batches of {larger} sequences from here on"
            job.log.event(text, "batch", step, global_batch=larger)


def position_of(record: dict | None) -> tuple[int, int, int]:
    """Return (steps, examples, increases of the batch size) of a checkpoint's record; None: those of step 0."""
    return (record["step"], record["examples"], record.get("increases", 0)) if record else (0, 0, 0)
