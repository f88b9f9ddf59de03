# SPDX-License-Identifier: Apache-2.0
"""How much time does the host take between two steps, on this CPU?

Runs the real loop, train.train, on a toy model and the text of this repository. Batches come through the whole
pipeline, and every tenth step is logged to metrics.jsonl, TensorBoard and the terminal. A step returns only when it is
complete, and then sleeps for STEP_SECONDS, during which the pipeline prepares the next batches. So the time between two
calls is host time: taking a batch, transferring it, fetching, checking and logging the scalars. In a run most of this
overlaps with a step. `processor` is the processor time of the loop's thread, without waiting; `wall` includes waiting.
The first steps, in which threads and TensorBoard start, are left out.
"""

import os
import pathlib
import statistics
import tempfile
import time
from collections.abc import Callable
from unittest import mock

import support

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

import train
from configs import tiny
from settings import validation

STEP_SECONDS, WARM_STEPS, STEPS = 0.01, 50, 200 if support.QUICK else 2000
TOY = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 64,
    "model.vocab_size": 258, "data.tokenizer": "byte", "data.path": str(support.ROOT / "layers"),
    "train.global_batch": 4, "train.sequence_length": 32, "train.steps": WARM_STEPS + STEPS,
    "train.eval_every": 0, "train.save_every": 0, "evaluation.sample_tokens": 0,
}  # fmt: skip


def timed(train_step: Callable, between: list[tuple[float, float]]) -> Callable:
    """Return a train_step that takes longer, and appends the seconds from the return of one to the call of the next.

    Args:
      between: of the processor that the loop's thread had, and by the wall clock.
    """
    returned = None

    def step(state, batch):
        nonlocal returned
        if returned:
            between.append((time.thread_time() - returned[0], time.perf_counter() - returned[1]))
        results = jax.block_until_ready(train_step(state, batch))
        time.sleep(STEP_SECONDS)
        returned = time.thread_time(), time.perf_counter()
        return results

    return step


def main() -> None:
    """Train once and print medians and 95th percentiles."""
    config, between = tiny.get_config(), []
    with tempfile.TemporaryDirectory() as folder:
        config.update_from_flattened_dict(TOY | {"data.cache_dir": folder})
        validation.validate(config, jax.device_count())
        with mock.patch.object(train.Faults, "wrapped", lambda faults, step, spoiled: timed(step, between)):
            train.train(config, pathlib.Path(folder) / "run")
    figures = {}
    for name, seconds in zip(("processor", "wall"), zip(*between[WARM_STEPS:], strict=True), strict=True):
        figures[f"{name}_median_ms"] = round(1000 * statistics.median(seconds), 3)
        figures[f"{name}_percentile_95_ms"] = round(1000 * statistics.quantiles(seconds, n=20)[-1], 3)
    support.finish("host_time", figures)


if __name__ == "__main__":
    main()
