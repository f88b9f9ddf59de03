# SPDX-License-Identifier: Apache-2.0
"""The ramp of the global batch: its size and its learning rate after each increase, and the number of steps of a run.

After k increases a batch has batch.first * batch.increase_factor^k sequences, rounded down to complete microbatches on
every shard, and at most train.global_batch. Rules of the learning rate: arXiv:1706.02677 (linear, for SGD),
arXiv:2205.10287 (sqrt, for Adam).
"""

import math

from ml_collections import ConfigDict

from configs.base import batch_shards, supports_shard_map
from settings import layouts

RATES = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}  # the learning rate is proportional to this power of the size
PRODUCT_ROUNDING = 1e-12  # relative error of a few products of float64
ROUNDING = 1e-9  # tolerance for products that are integers except for rounding errors


def rows(config: ConfigDict, increases: int) -> int:
    """Return the number of sequences of a global batch after this number of increases."""
    batch, most = config.batch, config.train.global_batch
    if batch.ramp == "none":
        return most
    unit = _unit(config)
    exact = batch.first * batch.increase_factor**increases
    return min(most, max(1, math.floor(exact / unit + ROUNDING)) * unit)


def of_size(config: ConfigDict, size: int) -> ConfigDict:
    """Return a copy with batches of `size` sequences and no ramp; its microbatches are as large as at the end."""
    copy = config.copy_and_resolve_references()
    copy.train.global_batch = size
    if config.train.gradient_accumulation > 1:
        copy.train.gradient_accumulation = size // _unit(config)
    copy.batch.update(ramp="none", first=0, noise_scale=measures_noise(config))
    return copy


def of_first_stage(config: ConfigDict) -> ConfigDict:
    """Return a copy with the smallest batches, and no ramp."""
    return of_size(config, rows(config, 0))


def rate_factor(config: ConfigDict, size: int) -> float:
    """Return the factor of the learning rate for batches of `size` sequences; 1 for train.global_batch."""
    return (size / config.train.global_batch) ** RATES[config.batch.learning_rate]


def stage_end(config: ConfigDict, step: int, increases: int) -> int:
    """Return the last step with the same batch size as the next step after `step`."""
    if rows(config, increases) == config.train.global_batch:
        return config.train.steps
    every = config.batch.increase_step
    return min(config.train.steps, (step // every + 1) * every)


def num_steps(config: ConfigDict, examples: float, step: int, increases: int) -> float:
    """Return the number of steps after `step` that consume `examples`; the last step may be a fraction."""
    every, most, done = config.batch.increase_step, config.train.global_batch, 0
    while (size := rows(config, increases)) < most:
        count = every - (step + done) % every
        if examples <= count * size:
            break
        examples, done, increases = examples - count * size, done + count, increases + 1
    return done + max(0.0, examples) / size


def whole_steps(count: float) -> int:
    """Return a count without its fraction; 2.3 epochs of 50,000 rows are 115,000, although their product is less."""
    return math.floor(count * (1 + PRODUCT_ROUNDING))


def examples_of(epochs: float, rows: int) -> float:
    """Return the examples of some epochs of a data set; a whole number if only rounding errors say otherwise."""
    product, whole = epochs * rows, round(epochs * rows)
    return whole if math.isclose(product, whole, rel_tol=PRODUCT_ROUNDING) else product


def known_steps(config: ConfigDict) -> int | None:
    """Return the steps of a run; None if only its documents say how many there are, as with `train.epochs`."""
    train, data = config.train, config.data
    if train.steps:
        return train.steps
    if train.tokens:
        return math.ceil(num_steps(config, train.tokens / train.sequence_length, 0, 0))
    is_counted = data.source in ("sudoku", "maze")  # a pass has data.puzzle_count examples
    return whole_steps(num_steps(config, train.epochs * data.puzzle_count, 0, 0)) if is_counted else None


def num_examples(config: ConfigDict, steps: int, step: int = 0, increases: int = 0) -> int:
    """Return the number of examples of the `steps` steps after `step`; if the noise scale decides, the most."""
    every, most, examples = config.batch.increase_step, config.train.global_batch, 0
    while (size := rows(config, increases)) < most and steps > (count := every - step % every):
        steps, step, increases, examples = steps - count, step + count, increases + 1, examples + count * size
    return examples + steps * size


def measures_noise(config: ConfigDict) -> bool:
    """Return whether the gradient noise scale is measured."""
    return config.batch.noise_scale or config.batch.ramp == "noise_scale"


def num_parts(config: ConfigDict) -> int:
    """Return the least number of parts of the smallest batch whose gradients are computed separately."""
    microbatches = max(1, of_first_stage(config).train.gradient_accumulation)
    copies = config.mesh.dcn_data * config.mesh.data if supports_shard_map(config) else 1
    return microbatches * copies


def line(config: ConfigDict) -> str:
    """Return the line about the ramp that is shown before step 1."""
    batch = config.batch
    when = " where the noise scale is larger" if batch.ramp == "noise_scale" else ""
    return (
        f"Ramp: from {rows(config, 0)} to {config.train.global_batch} sequences, times {batch.increase_factor} every "
        f"{batch.increase_step} steps{when}; learning rate by rule {batch.learning_rate}"
    )


def _unit(config: ConfigDict) -> int:
    """Return the unit of batch sizes: one row, or one microbatch if there are several, on every shard of any mesh."""
    microbatches = config.train.gradient_accumulation
    if microbatches > 1:
        return config.train.global_batch // microbatches
    return math.lcm(*(batch_shards(on_mesh.mesh) for on_mesh in layouts.on_each_mesh(config).values()))
