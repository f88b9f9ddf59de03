# SPDX-License-Identifier: Apache-2.0
"""The sizes of a batch that grows, the steps that they make, and what is refused of them."""

import pytest

from configs import base
from configs.errors import ConfigError
from settings import ramp
from settings.validation import validate


def ramped(*, shards: int = 1, microbatches: int = 0, **batch):
    config = base.get_config()
    config.mesh.fsdp = shards
    config.train.update(global_batch=32, gradient_accumulation=microbatches, steps=100)
    config.batch.update({"ramp": "steps", "first": 8, "increase_step": 10} | batch)
    return config


@pytest.mark.parametrize(
    ("epochs", "rows", "batch", "steps"),
    [(2.3, 50_000, 8, 14_375), (4.1, 50_000, 10, 20_500), (4.6, 50_000, 100, 2_300), (0.9999, 10_000, 10, 999)],
)
def test_the_steps_of_epochs_are_those_of_their_decimal_number(epochs, rows, batch, steps):
    """In floating point the product may be less: 2.3 * 50,000 is 114,999.99999999999."""
    config = base.get_config()
    config.train.update(global_batch=batch, epochs=epochs, steps=0)
    config.data.update(source="sudoku", puzzle_count=rows)
    assert ramp.known_steps(config) == steps


def test_the_examples_of_epochs_are_exact_so_that_what_is_left_of_them_is():
    """2.3 * 50,000 - 114,995 is 4.99999999999: a resumed run would take a step fewer than one that was not stopped."""
    assert ramp.examples_of(2.3, 50_000) == 115_000 and ramp.examples_of(0.55, 10) == 5.5


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({}, [8, 9, 11, 13, 16, 19, 23, 28, 32]),  # 8 * 1.2^k: 8, 9.6, 11.52, 13.8, 16.6, 19.9, 23.9, 28.7, 34.4
        ({"shards": 4}, [8, 8, 8, 12, 16, 16, 20, 28, 32]),
        ({"shards": 2, "microbatches": 4}, [8, 8, 8, 8, 16, 16, 16, 24, 32]),  # whole microbatches of 8
        ({"shards": 16}, [16] * 8 + [32]),
        ({"increase_factor": 2.0}, [8, 16, 32, 32]),
        ({"first": 10, "increase_factor": 1.1}, [10, 11, 12, 13]),  # 11.000000000000002 and 12.1
        ({"ramp": "none", "first": 0}, [32, 32]),
    ],
    ids=str,
)
def test_sizes_grow_by_the_factor_rounded_to_what_mesh_and_microbatches_divide(options, sizes):
    config = ramped(**options)
    assert [ramp.rows(config, increases) for increases in range(len(sizes))] == sizes
    for size in sizes:
        validate(ramp.of_size(config, size), options.get("shards", 1))


def test_microbatches_stay_as_large_and_become_more():
    config = ramped(shards=2, microbatches=4)
    assert [ramp.of_size(config, size).train.gradient_accumulation for size in (8, 16, 32)] == [1, 2, 4]


@pytest.mark.parametrize(("rule", "factors"), [("none", (1, 1)), ("sqrt", (0.5, 1)), ("linear", (0.25, 1))])
def test_the_learning_rate_goes_with_the_size_by_the_rule(rule, factors):
    config = ramped(learning_rate=rule)
    assert (ramp.rate_factor(config, 8), ramp.rate_factor(config, 32)) == factors


@pytest.mark.parametrize(("step", "increases"), [(0, 0), (7, 0), (10, 1), (35, 2)])
def test_steps_that_take_some_examples_are_those_that_the_sizes_make(step, increases):
    """Counted one by one."""
    config = ramped(increase_factor=2.0, first=4)
    taken, count = 0, 0
    while taken < 1003:
        size = ramp.rows(config, increases)
        taken, count = taken + size, count + 1
        increases_then = increases + ((step + count) % 10 == 0 and size < 32)
        last, increases = size, increases_then
    exact = ramp.num_steps(config, 1003, step, 0 if step < 10 else {10: 1, 35: 2}[step])
    assert exact == pytest.approx(count - (taken - 1003) / last)


@pytest.mark.parametrize("steps", [0, 7, 10, 25, 90])
def test_examples_of_some_steps_are_those_that_the_sizes_make(steps):
    """Counted one by one; the steps that take them are as many again."""
    config = ramped(increase_factor=2.0, first=4)
    examples = ramp.num_examples(config, steps)
    assert examples == sum(ramp.rows(config, step // 10) for step in range(steps))
    assert ramp.num_steps(config, examples, 0, 0) == steps
    assert ramp.num_examples(ramped(ramp="none", first=0), steps) == 32 * steps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch.first": 33}, "batch.first=33 must lie between 1 and train.global_batch=32"),
        ({"batch.ramp": "none"}, "batch.ramp=none needs batch.first=0, not 8"),
        ({"batch.increase_factor": 1.0}, "batch.increase_factor=1.0 must be greater than 1"),
        ({"batch.fit": "auto", "train.gradient_accumulation": 2}, "both say how many microbatches"),
        ({"batch.ramp": "noise_scale", "train.gradient_accumulation": 4, "train.steps": 0, "train.tokens": 999},
         "needs train.steps"),
        ({"batch.ramp": "noise_scale", "train.gradient_accumulation": 4}, "batch.first at least 2 microbatches"),
        ({"evaluation.every_epochs": 1.0}, "an epoch has no fixed steps; use train.eval_every"),
        ({"batch.learning_rate": "square"}, "did you mean sqrt"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_grow_is_told_in_one_line(changes, message):
    config = ramped()
    for key, value in changes.items():
        section, name = key.split(".")
        config[section][name] = value
    with pytest.raises(ConfigError, match=message) as error:
        validate(config, 1)
    assert "\n" not in str(error.value)


def test_each_copy_of_the_parameters_has_parts_of_the_smallest_batch_in_every_slice():
    config = ramped(shards=2, microbatches=4)
    config.mesh.update(dcn_data=2, data=3)
    assert ramp.num_parts(config) == ramp.of_first_stage(config).train.gradient_accumulation * 2 * 3
