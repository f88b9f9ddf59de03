# SPDX-License-Identifier: Apache-2.0
"""Advice: each fault leads to its own rule, with its figures and a key that exists; a healthy run leads to none."""

import copy

import pytest

from configs import topologies
from profiling.advice import RULES, Measured, advise
from settings import loading

HEALTHY = {
    "platform": "tpu", "devices": 16, "data_wait_share": 0.004, "idle_share": 0.03, "callback_share": 0.001,
    "peak_flops": 275e12, "flops_per_second": 170e12, "host_step_seconds": 2.0, "not_donated_gib": 0.0,
    "host_seconds_by_phase": {"data": 0.01, "step": 0.02, "wait": 1.97}, "exposed_collective_seconds": 0.05,
    "device_imbalance": {"excess": 0.02, "slowest": "process 1 (b), TPU 7"}, "host_imbalance": None,
    "memory_gib": {"parameters": 2.0, "optimizer": 4.0, "temporaries": 16.0, "total": 22.0},
    "device_peak_gib": {"least": 22.1, "most": 22.4},
    "by_file": [
        {"file": "layers/mlp.py", "part": "forward", "share": 0.6},
        {"file": "layers/attention/attention.py", "part": "backward", "share": 0.38},
        {"file": "layers/mlp.py", "part": "recomputed", "share": 0.02},
    ],
}  # fmt: skip
LINES = [{"gradient_norm": 0.5 + 0.01 * (n % 3), "host_memory_gib": 5.0 + 0.01 * (n % 2)} for n in range(30)]


def measured(profile: dict | None = None, keys: dict | None = None, lines=LINES, root: str = "gs://bucket/run"):
    """A run of a 7B model on v4-32, with changed figures and keys."""
    config = loading.load("configs/llama2_7b.py", "v4-32", keys or {}).config
    return Measured(copy.deepcopy(HEALTHY) | (profile or {}), config, topologies.get("v4-32"), lines, root)


SLOW = {"device_imbalance": {"excess": 0.3, "slowest": "process 2 (c), TPU 9"}}
SMALL = {"parameters": 1.0, "optimizer": 2.0, "temporaries": 1.0, "total": 4.0}
RECOMPUTING = [{"file": "layers/mlp.py", "part": "recomputed", "share": 0.2}]
FAULTS = {
    "slow input": measured({"data_wait_share": 0.4}),
    "tiny batch": measured({"flops_per_second": 30e12}, {"train.global_batch": "16"}),
    "recompilation": measured({"host_seconds_by_phase": {"compile": 1.0, "wait": 1.0}}),
    "replicated optimizer": measured(None, {"mesh.data": "16", "mesh.fsdp": "1"})._replace(
        profile=HEALTHY | {"memory_gib": {"parameters": 6.0, "optimizer": 12.0, "total": 22.0}}
    ),
    "unbalanced devices": measured(SLOW),
    "missing donation": measured({"not_donated_gib": 5.0}),
    "host synchronisation": measured({"callback_share": 0.2, "idle_share": 0.25}, {"train.log_every": "1"}),
    "excess remat": measured({"by_file": RECOMPUTING, "memory_gib": SMALL, "device_peak_gib": None},
                             {"model.remat": "full"}),
    "much accumulation": measured({"memory_gib": SMALL, "device_peak_gib": None},
                                  {"train.gradient_accumulation": "4", "model.remat": "none"}),
    "memory spike": measured({"device_peak_gib": {"least": 30.0, "most": 31.0}}),
    "uneven memory": measured({"device_peak_gib": {"least": 20.0, "most": 23.0}}),
    "growing host memory": measured(lines=[{"host_memory_gib": 5 + 0.1 * n} for n in range(30)]),
    "idle devices": measured({"idle_share": 0.3}),
    "exploding gradient": measured(lines=[*LINES, {"gradient_norm": 40.0}]),
    "checkpoints at risk": measured(root="runs/mine"),
    "small heads": measured(None, {"model.num_heads": "64", "model.num_kv_heads": "64", "model.head_dim": "64"}),
}  # fmt: skip


def test_a_healthy_run_leads_to_no_advice():
    assert advise(measured()) == []


def test_steps_without_a_gradient_are_no_explosion():
    """As in GRPO, where equal rewards teach nothing."""
    lines = [{"gradient_norm": 0.0} for _ in range(20)]
    assert advise(measured(lines=lines)) == advise(measured(lines=[*lines, {"gradient_norm": 0.5}])) == []


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_leads_to_its_rule_alone(name):
    found = advise(FAULTS[name])
    assert [advice.rule for advice in found] == [name]
    (advice,) = found
    line = advice.line()
    assert any(character.isdigit() for character in advice.evidence) or name == "checkpoints at risk"
    assert advice.keys or advice.remedy, "something to do"
    for key in advice.keys:  # a key that does not exist would be an AttributeError here
        section, key_name = key.split(".")
        assert key_name in FAULTS[name].config[section]
        assert f"--config.{key}=" in line
    assert advice.gain is None or 0 <= advice.gain <= 1


@pytest.mark.parametrize(("name", "key"), [
    ("memory spike", "evaluation.batches"), ("growing host memory", "data.prefetch"),
])  # fmt: skip
def test_a_value_that_is_set_already_is_no_advice(name, key):
    fault = FAULTS[name]
    assert advise(measured(fault.profile, {key: "1"}, fault.lines)) == []


def test_every_rule_has_a_fault():
    assert len(FAULTS) == len(RULES)


def test_advice_with_the_largest_gain_comes_first():
    found = advise(measured({"data_wait_share": 0.4} | SLOW))
    assert [advice.rule for advice in found] == ["slow input", "unbalanced devices"]
    assert found[0].gain == 0.4 and found[1].gain == pytest.approx(0.3 / 1.3)


def test_devices_that_share_a_row_by_tensor_parallelism_have_all_of_its_tokens():
    """16 rows of 2,048 tokens on 4 groups of 4 devices are 8,192 tokens of each device at once: no tiny batch."""
    fault = {"flops_per_second": 30e12}, {"train.global_batch": "16"}
    sharing = measured(fault[0], fault[1] | {"mesh.fsdp": "4", "mesh.model": "4"})
    assert not [advice for advice in advise(sharing) if advice.rule == "tiny batch"]


def test_what_changes_the_trained_model_says_so():
    assert "changes what is trained" in advise(FAULTS["tiny batch"])[0].line()
    assert "changes what is trained" not in advise(FAULTS["slow input"])[0].line()


def test_a_model_without_attention_has_no_heads_to_change():
    fault = FAULTS["small heads"]
    fault.config.model.update(name="trm", mixer="mlp")
    try:
        assert advise(fault) == []
    finally:
        fault.config.model.update(name="decoder_lm", mixer="attention")


def test_fewer_microbatches_divide_the_batch():
    (advice,) = advise(
        measured(
            {"memory_gib": SMALL, "device_peak_gib": None},
            {"train.gradient_accumulation": "9", "model.remat": "none"},
        )
    )
    assert advice.keys == {"train.gradient_accumulation": 3}


def test_advice_on_small_heads_needs_no_trace():
    """Without a trace there is no table of files, so the gain is not known."""
    found = advise(FAULTS["small heads"]._replace(profile=HEALTHY | {"by_file": None}))
    assert [(advice.rule, advice.gain) for advice in found] == [("small heads", None)]


def test_a_loop_whose_memory_is_not_known_gets_no_advice_about_memory():
    """A caller's own loop has no trace, which alone says what a step needs."""
    unknown = {"memory_gib": {"total": 0.0}, "device_peak_gib": {"most": 61.2, "least": 61.2}, "by_file": None}
    assert advise(measured(unknown, {"train.gradient_accumulation": "4"})) == []
