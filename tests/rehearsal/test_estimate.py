# SPDX-License-Identifier: Apache-2.0
"""What a report says about memory, and the notes to its figures."""

import gzip
import pathlib

import pytest

from cluster import identity
from configs import base, topologies
from configs.errors import ConfigError
from rehearsal import assumptions, memory
from rehearsal.compiler import PROGRAM, Compiled
from rehearsal.estimate import _notes, estimate
from tests.rehearsal.test_gpu_attention import rehearsed


@pytest.mark.parametrize(
    ("quantization", "topology", "words"),
    [
        ("none", "v4-8", []),
        ("int8", "v6e-8", ["MFU is relative to the bfloat16 peak"]),
        ("int8", "v4-8", ["MFU", "int8 gains nothing on v4, which multiplies it no faster than bfloat16; use none"]),
        ("fp8", "v5e-8", ["MFU", "fp8 gains nothing on v5e, which multiplies it no faster than bfloat16; use int8"]),
        (
            "fp8",
            "h200-1",
            ["MFU", "the roofline assumes that products in fp8 are as slow as those in bfloat16", "compiled for a CPU"],
        ),
    ],
)
def test_a_quantisation_is_told_what_it_gains(quantization, topology, words):
    config = base.get_config()
    config.model.quantization = quantization
    facts = {"mesh": {"fsdp": 1}, "device_coordinates": [[]], "on_host": 0, "decoded": None}
    notes = _notes(Compiled(config, topologies.get(topology), facts, pathlib.Path()), {"attention kernel": 1.0})
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


def test_a_program_without_the_compilers_cycles_is_not_timed_by_a_guess(tmp_path):
    """Else a guess would be reported as "the schedule of the TPU compiler" if a compiler wrote the cycles otherwise."""
    program = "HloModule m\n\nENTRY %main (a: f32[250]) -> f32[250] {\n  %a = f32[250] parameter(0)\n"
    with gzip.open(tmp_path / PROGRAM, "wt") as file:
        file.write(program + "  ROOT %x = f32[250] negate(%a)\n}\n")

    facts = {
        "mesh": {"fsdp": 1}, "device_coordinates": [[]], "on_host": 0, "out_of_memory": False, "num_parameters": 250,
        "num_microbatches": 1, "flops_per_step": 250, "total_bytes": 2000,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no cycle estimates of the compiler"):
        estimate(Compiled(base.get_config(), topologies.get("v4-8"), facts, tmp_path))


def test_a_breakdown_counts_frozen_weights_and_what_transforms_add_to_the_state():
    """A base that adapters are trained on is parameters, and an average of the parameters belongs to the optimizer."""
    state = {"parameters": 1.0, "optimizer": 2.0, "extra": 4.0, "batch": 8.0, "carry": 16.0}
    found = memory.breakdown({"gradients": 64.0, "saved activations": 128.0}, state, frozen=32.0, total=511.0)
    assert found == {
        "parameters": 33.0, "optimizer": 6.0, "batch": 24.0, "gradients": 64.0, "saved activations": 128.0,
        "temporaries": 256.0,
    }  # fmt: skip


def test_an_estimate_is_kept_for_one_memory_of_the_chip(tmp_path, monkeypatch):
    """The share of a GPU's memory that jax takes is set by a variable, and not by the topology."""
    state = dict.fromkeys(("parameters", "optimizer", "extra", "batch", "carry"), 100)
    facts = {
        "mesh": {"fsdp": 1}, "out_of_memory": True, "num_parameters": 250, "num_microbatches": 1, "flops_per_step": 250,
        "total_bytes": 2000, "state": state, "frozen": 0, "on_host": 0,
    }  # fmt: skip
    for share, capacity in ((".5", 70.5), (".004", 0.564)):
        monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", share)
        found = estimate(Compiled(base.get_config(), topologies.get("h200-1"), facts, tmp_path))
        assert found["hbm_gib"]["capacity"] == pytest.approx(capacity, rel=0.08)


@pytest.mark.parametrize(("topology", "priced"), [("v4-8", "attention kernel"), ("h200-1", "matmul")])
def test_what_is_priced_as_bfloat16_is_told(topology, priced):
    facts = {"mesh": {"fsdp": 1}, "device_coordinates": [[]], "on_host": 0, "decoded": None}

    def told(dtype: str, seconds: float) -> bool:
        config = base.get_config()
        config.model.dtype = dtype
        spent = {"attention kernel": 1.0, "matmul": 1.0} | {priced: seconds}
        notes = _notes(Compiled(config, topologies.get(topology), facts, pathlib.Path()), spent)
        return f"the time of category {priced!r} is estimated as in bfloat16; in float32 it is longer" in notes

    assert told("float32", 1.0) and not told("float32", 0.0) and not told("bfloat16", 1.0)


@pytest.mark.slow
def test_products_in_float32_are_not_rounded_unless_the_environment_asks_for_it(tmp_path, monkeypatch):
    """A TPU takes six products of bfloat16 for one of float32."""

    def seconds() -> float:
        sizes = {"dtype": "float32", "embed_dim": 512, "mlp_dim": 2048}
        return rehearsed(tmp_path, topologies.get("v4-8"), **sizes)["seconds_by_category"]["matmul"]

    monkeypatch.delenv(identity.PRECISION, raising=False)
    exact = seconds()
    monkeypatch.setenv(identity.PRECISION, "default")
    assert exact > 2 * seconds()


@pytest.mark.parametrize(
    ("chip", "missing"),
    [("gpu", "peak_flops, hbm_bandwidth, link_bandwidth"), ("tpu", "clock_hz, dcn_bandwidth, host_bandwidth")],
)
def test_an_own_chip_without_the_figures_of_a_rehearsal_is_one_line_before_anything_is_compiled(
    chip, missing, tmp_path
):
    known = {} if chip == "gpu" else {"peak_flops": 1e14, "hbm_bandwidth": 1e12, "link_bandwidth": 1e10}
    topology = topologies.Topology("mine-8", "mine", chip, 8, hbm_gib=80.0, **known)
    with pytest.raises(ConfigError, match=f"^mine-8 lacks {missing} in configs/topologies.py: a rehearsal needs them"):
        assumptions.check(topology)
