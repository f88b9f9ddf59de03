# SPDX-License-Identifier: Apache-2.0
"""Sizes that are known without training, and which configurations nothing beats in cost and metric."""

import importlib

import pytest

from configs.base import KEYS
from settings import loading
from settings.keys import flat
from studies import suites
from studies.report import pareto, sizes

STUDY, _ = suites.find("trm")


def test_parameters_are_those_of_the_study_and_of_an_assembled_run():
    from core.assembly import assemble

    members = suites.members(STUDY, ["exp01-model-scaling"])
    found = [sizes.of_axis(member.values, "parameters") / 1e6 for member in members]
    assert found == pytest.approx([1.48, 2.67, 5.03, 9.76, 17.6, 38.1], rel=0.01)
    config = loading.load("configs/tiny.py", "", {"mesh.fsdp": "1", "mesh.data": "-1", "model.num_layers": "1"}).config
    config.mesh.data = 8
    assert sizes.num_parameters(flat(config)) == assemble(config).models.num_parameters


def test_operations_of_a_training_grow_with_the_updates_of_a_cycle():
    few, *_, many = (sizes.training_flops(member.values) for member in suites.members(STUDY, ["exp02a-l-cycles"]))
    assert many / few == pytest.approx(13 / 3, rel=0.01), "12 + 1 calls of the network against 2 + 1"
    tiny = flat(loading.load("configs/tiny.py", "", {"train.steps": "10"}).config)
    tokens = 10 * tiny["train.global_batch"] * tiny["train.sequence_length"]
    flops_per_token = importlib.import_module("models.decoder_lm").flops_per_token
    model = loading.load("configs/tiny.py", "", {}).config.model
    assert sizes.training_flops(tiny) == tokens * flops_per_token(model, tiny["train.sequence_length"])


def test_every_axis_is_a_size_of_its_configurations_and_every_group_has_a_guide():
    for name, group in STUDY.groups.items():
        assert group.axis in ("", "parameters") or isinstance(KEYS[group.axis].default, int), name
        if group.axis in KEYS:
            values = [member.values[group.axis] for member in suites.members(STUDY, [name])]
            assert len(set(values)) == len(values) >= 3, name
        assert len(group.analysis) > 100 and len(group.troubleshooting) > 100, name


def test_the_front_has_what_nothing_beats_in_order_of_the_first_objective():
    points = [(3.0, 1.0), (1.0, 3.0), (2.0, 2.0), (2.0, 3.0), (3.0, 3.0), (2.0, 2.0), (0.5, 4.0)]
    assert [points[index] for index in pareto.front(points)] == [
        (0.5, 4.0),
        (1.0, 3.0),
        (2.0, 2.0),
        (2.0, 2.0),
        (3.0, 1.0),
    ]
    assert pareto.front([(1.0,), (0.5,), (2.0,)]) == [1] and pareto.front([]) == []


def test_costs_are_chip_hours_or_else_operations_and_are_left_out_if_they_are_equal():
    pytest.importorskip("optuna", reason="studies need `make setup EXTRAS=studies`")
    from studies.report import answers, costs

    def row(name: str, value: float, hours: float, steps: int) -> answers.Row:
        config = flat(loading.load("configs/tiny.py", "", {"train.steps": str(steps)}).config)
        return answers.Row(name, "", [value], [], hours, None, [], 0, [hours], config)

    rows = [row("a", 0.5, 2.0, 10), row("b", 0.9, 1.0, 20), row("c", 0.95, 3.0, 30)]
    found = costs.of_rows(rows, "maximize")
    assert found.unit == costs.CHIP_HOURS and [found.rows[at].name for at in found.front] == ["b", "c"]
    assert [costs.of_rows(rows, "minimize").rows[at].name for at in costs.of_rows(rows, "minimize").front] == ["b", "a"]
    rows[0] = row("a", 0.5, 0.0, 10)
    found = costs.of_rows(rows, "maximize")
    assert found.unit == costs.FLOPS and found.costs[2] == pytest.approx(3 * found.costs[0])
    assert costs.of_rows([row("a", 0.5, 1.0, 1), row("b", 0.7, 1.0, 1)], "maximize") is None
