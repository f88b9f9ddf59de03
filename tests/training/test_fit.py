# SPDX-License-Identifier: Apache-2.0
"""The fewest microbatches that fit are found, in few compilations, and by the compiler's own count of memory."""

import functools
import math
import types

import jax
import pytest

import rehearse
from configs import topologies
from configs.errors import ConfigError
from core import assembly, batch_fit
from rehearsal.compiler import GIB
from reporting import preflight
from tests.one_step import small_config
from training import fit


def config_of(rows: int):
    config = small_config()
    config.train.global_batch = rows
    config.batch.fit = "auto"
    return config


@pytest.mark.parametrize("rows", [1, 7, 16, 48])
def test_the_fewest_that_fit_are_found_in_few_tries(rows):
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    for fewest in divisors:
        config, tried = config_of(rows), []

        def fits(candidate, tried=tried, fewest=fewest):
            tried.append(candidate.train.gradient_accumulation)
            return tried[-1] >= fewest

        fit.fit(config, fits)
        assert (config.train.gradient_accumulation, config.batch.fit) == (fewest, "none")
        assert len(tried) == len(set(tried)) <= 1 + math.ceil(math.log2(len(divisors)))
    assert tried[0] == 1


@pytest.mark.parametrize(
    ("model", "ways"),
    [
        ({}, "try --config.model.remat=full or more devices that split the weights"),
        ({"remat": "full"}, "try more devices that split the weights"),
        ({"name": "mlp_classifier"}, "try more devices that split the weights"),
    ],
)
def test_where_nothing_fits_one_line_names_what_the_model_has_left_to_try(model, ways):
    config = config_of(48)
    config.model.update(model)
    with pytest.raises(ConfigError, match=rf"^batch.fit=auto: no microbatch of .*batch=48 fits.*; {ways}$"):
        fit.fit(config, lambda candidate: False)


def test_where_noise_is_measured_there_is_more_than_one_microbatch():
    config = config_of(6)
    config.batch.noise_scale = True
    fit.fit(config, lambda candidate: True)
    assert config.train.gradient_accumulation == 2
    config = config_of(1)
    config.batch.noise_scale = True
    with pytest.raises(
        ConfigError, match=r"^batch.fit=auto: train.global_batch=1 .* has no two parts on a device, .*$"
    ):
        fit.fit(config, lambda candidate: True)


def test_where_units_are_measured_on_rows_that_are_no_tasks_a_microbatch_keeps_one():
    """The microbatch of one row fits, but it would be a task."""
    config = config_of(4)
    config.train.objective, config.meta.share, config.plasticity.measure = "meta_language_modeling", 0.5, 1
    tried = []
    with pytest.raises(ConfigError, match=r"no microbatch of .*=4 fits, not even of 2 sequences a device"):
        fit.fit(config, lambda candidate: bool(tried.append(candidate.train.gradient_accumulation)))
    assert max(tried) == 2


def test_a_ramp_of_whole_microbatches_is_fitted_by_those_that_leave_rows():
    """Its first batch is one microbatch, as large as the others."""
    config = config_of(64)
    config.train.objective, config.meta.share, config.plasticity.measure = "meta_language_modeling", 0.25, 1
    config.batch.update(ramp="steps", first=8)
    fit.fit(config, lambda candidate: candidate.train.gradient_accumulation >= 16)
    assert config.train.gradient_accumulation == 16


def test_a_rehearsal_fits_the_chip_and_what_was_typed():
    """A chip that holds what 2 microbatches need, and less, of it, that may be used."""

    def compiled(candidate, topology):
        needed = 32 * GIB / candidate.train.gradient_accumulation
        return types.SimpleNamespace(total_bytes=needed, fits=needed <= 16 * GIB)

    for limit, count in ((0.0, 2), (5.0, 8)):
        config, lines = config_of(48), []
        config.batch.memory_gib = limit
        display = types.SimpleNamespace(compile=compiled, line=lines.append)
        rehearse.fit_batch(config, topologies.get("v4-8"), display)
        assert config.train.gradient_accumulation == count
    assert lines[0] == "train.gradient_accumulation=1 needs 32.00 GiB a chip"


@pytest.mark.slow
def test_a_real_step_fits_the_memory_that_was_typed_and_with_larger_microbatches_would_not(monkeypatch):
    """What a step of 1 and of 2 microbatches needs is found first."""
    of_one_device = functools.partial(assembly.assemble, devices=jax.devices()[:1])
    monkeypatch.setattr(batch_fit, "assemble", of_one_device)
    config, said = config_of(8), []
    config.model.num_layers = 1
    steps = [of_one_device(fit.of_count(config, count)).compile() for count in (1, 2)]
    one, two = map(preflight.compiled_gib, steps)
    assert one > two
    config.batch.memory_gib = (one + two) / 2
    batch_fit.fit_batch(config, said.append)
    assert config.train.gradient_accumulation == 2
    assert [line.split()[0].partition("=")[2] for line in said] == ["1", "4", "2"]
