# SPDX-License-Identifier: Apache-2.0
"""How much time does the host take between two steps, on this CPU?

Runs the real loop, train.train, on a toy model and the text of this repository. Batches come through the whole
pipeline, and every tenth step is logged to metrics.jsonl, TensorBoard and the terminal. A step returns only when it is
complete, and then sleeps for STEP_SECONDS, during which the pipeline prepares the next batches. So the time between two
calls is host time: taking a batch, transferring it, fetching, checking and logging the scalars. In a run most of this
overlaps with a step. `processor` is the processor time of the loop's thread, without waiting; `wall` includes waiting.
The first steps, in which threads and TensorBoard start, are left out.

The other figures are of a second run, of a larger model and at its own pace. `callbacks_us` and `metrics_us` are what
the job counts itself: mean microseconds of a step for which callbacks and the step log keep the loop. `thread_us` is
the processor time a step of the log's thread, which fetches, checks and logs the scalars while later steps run.

Gate: callbacks and metrics take at most 50 microseconds together.
"""

import os
import pathlib
import statistics
import sys
import tempfile
import time

import support

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import train
from configs import tiny
from core.callbacks import Callback
from settings import validation

STEP_SECONDS, WARM_STEPS, MOST_US, STEPS = 0.01, 50, 50.0, 200 if support.QUICK else 2000
TOY = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 64,
    "model.vocab_size": 258, "data.tokenizer": "byte", "data.path": str(support.ROOT / "layers" / "*.py"),
    "train.global_batch": 4, "train.sequence_length": 32, "train.steps": WARM_STEPS + STEPS,
    "train.eval_every": 0, "train.save_every": 0, "evaluation.sample_tokens": 0,
}  # fmt: skip
REAL = {"model.embed_dim": 128, "model.mlp_dim": 384, "train.global_batch": 16}


class Slowed(Callback):
    """Makes the step slow and blocking, and measures the time between two calls of it.

    Attributes:
      between: seconds from the return of a step to the call of the next: (processor time of the loop's thread, time).
    """

    def __init__(self):
        self.between, self._returned = [], None

    def wrap(self, train_step, job):
        """Return a step that is complete when it returns, and takes STEP_SECONDS longer."""

        def step(state, batch):
            if self._returned:
                cpu, clock = self._returned
                self.between.append((time.thread_time() - cpu, time.perf_counter() - clock))
            results = jax.block_until_ready(train_step(state, batch))
            time.sleep(STEP_SECONDS)
            self._returned = time.thread_time(), time.perf_counter()
            return results

        return step


class Counted(Callback):
    """Reads what a step takes after the first ones: `seconds` in callbacks, in metrics, and in the log's thread."""

    def on_step(self, job, state, step):
        """Read the sums after the warm steps and after the last step."""
        if step not in (WARM_STEPS, WARM_STEPS + STEPS):
            return
        sums = job.callback_seconds, job.log.seconds, job.log.thread.submit(time.thread_time).result()
        if step == WARM_STEPS:
            self._before = sums
        else:
            self.seconds = [(now - then) / STEPS for now, then in zip(sums, self._before, strict=True)]


def train_with(callback: Callback, **keys) -> None:
    """Train the toy model in a temporary folder."""
    config = tiny.get_config()
    with tempfile.TemporaryDirectory() as folder:
        config.update_from_flattened_dict(TOY | keys | {"data.cache_dir": folder})
        validation.validate(config, jax.device_count())
        train.train(config, pathlib.Path(folder) / "run", callbacks=[callback])


def main() -> None:
    """Train twice, print medians, 95th percentiles and means, and judge."""
    figures, slowed, counted = {}, Slowed(), Counted()
    train_with(slowed)
    for name, seconds in zip(("processor", "wall"), zip(*slowed.between[WARM_STEPS:], strict=True), strict=True):
        figures[f"{name}_median_ms"] = round(1000 * statistics.median(seconds), 3)
        figures[f"{name}_percentile_95_ms"] = round(1000 * statistics.quantiles(seconds, n=20)[-1], 3)
    train_with(counted, **REAL)
    for name, seconds in zip(("callbacks", "metrics", "thread"), counted.seconds, strict=True):
        figures[f"{name}_us"] = round(1e6 * seconds, 1)
    support.finish("host_time", figures)
    if figures["callbacks_us"] + figures["metrics_us"] > MOST_US:
        sys.exit("gate missed")


if __name__ == "__main__":
    main()
