# SPDX-License-Identifier: Apache-2.0
"""Says when the steps of a run wait for data, as a callback."""

from core.callbacks import Callback
from input_pipeline import batches as pipeline
from reporting.clock import OF_STEPS

WINDOW_SECONDS = 5.0  # of steps, over which the waiting is judged
SLOW = 0.1  # share of that time from which it is reported


class SlowData(Callback):
    """Report in a line that this process waits for batches, with the keys that help; once until they are fast again."""

    def on_start(self, job, record):
        """Begin before the first step, whose batch waits for the pipeline to start and is not counted."""
        self.begins, self.is_slow = True, False

    def on_step(self, job, state, step):
        """Judge the steps of a window when it is over. No window begins while TensorFlow is being imported."""
        begins, self.begins = self.begins, pipeline.is_importing_tensorflow()
        if not begins and job.clock.since - self.began < WINDOW_SECONDS:  # cheaper than to read the clock each step
            return
        seconds = job.clock.read()
        if begins or self.begins:
            self.before, self.began = seconds, job.clock.since
        passed = {phase: seconds[phase] - self.before[phase] for phase in OF_STEPS}
        total, waited = sum(passed.values()), passed["data"]
        if total < WINDOW_SECONDS:
            return
        if waited >= SLOW * total and not self.is_slow:
            what = f"step {step}: {waited / total:.0%} of the last {total:.1f} s were spent waiting for data"
            job.log.event(f"{what}; {remedy(job)}", "slow_data", step, waited_seconds=waited, seconds=total)
        self.before, self.began, self.is_slow = seconds, job.clock.since, waited >= SLOW * total


def remedy(job) -> str:
    """Return what may help: keys for a corpus; the caller of `train` makes its own batches."""
    if not job.corpus:
        return "they come from the caller of train()"
    keys = pipeline.faster_reading(job.config.data)
    return f"try {' '.join(f'--config.{key}={value}' for key, value in keys.items())}"
