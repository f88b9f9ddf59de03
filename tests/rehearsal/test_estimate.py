# SPDX-License-Identifier: Apache-2.0
"""What a report says of memory, and beside its figures."""

import gzip
import pathlib

import pytest

from configs import base, topologies
from rehearsal.compiler import PROGRAM, Compiled
from rehearsal.estimate import _notes, estimate


@pytest.mark.parametrize(
    ("quantization", "topology", "words"),
    [
        ("none", "v4-8", []),
        ("int8", "v6e-8", ["MFU is of the peak in bfloat16"]),
        ("int8", "v4-8", ["MFU", "int8 gains nothing on v4, which multiplies it no faster than bfloat16; use none"]),
        ("fp8", "v5e-8", ["MFU", "fp8 gains nothing on v5e, which multiplies it no faster than bfloat16; use int8"]),
        ("fp8", "h200-1", ["MFU", "the roofline takes products in fp8 for as slow as those in bfloat16"]),
    ],
)
def test_a_quantisation_is_told_what_it_gains(quantization, topology, words):
    config = base.get_config()
    config.model.quantization = quantization
    facts = {"mesh": {"fsdp": 1}, "device_coordinates": [[]], "on_host": 0}
    notes = _notes(Compiled(config, topologies.get(topology), facts, pathlib.Path()), {"attention kernel": 1.0})
    assert len(notes) == len(words) and all(word in note for word, note in zip(words, notes, strict=True))


def test_a_program_without_the_compilers_cycles_is_not_timed_by_a_guess(tmp_path):
    """Else a compiler that wrote them otherwise would be told as "the schedule of the TPU compiler"."""
    program = "HloModule m\n\nENTRY %main (a: f32[250]) -> f32[250] {\n  %a = f32[250] parameter(0)\n"
    with gzip.open(tmp_path / PROGRAM, "wt") as file:
        file.write(program + "  ROOT %x = f32[250] negate(%a)\n}\n")
    memory = {"arguments": 1000, "temporaries": 0, "outputs": 1000, "aliased": 0, "host": 0}
    facts = {
        "mesh": {"fsdp": 1}, "device_coordinates": [[]], "on_host": 0, "out_of_memory": None, "num_parameters": 250,
        "num_microbatches": 1, "flops_per_step": 250, "memory": memory,
    }  # fmt: skip
    with pytest.raises(ValueError, match="none of the compiler's estimated cycles"):
        estimate(Compiled(base.get_config(), topologies.get("v4-8"), facts, tmp_path))


@pytest.mark.parametrize(("facts", "total"), [({}, 10), ({"host": 1}, 8), ({"out_of_memory": 20}, 20)])
def test_what_is_donated_counts_once_and_what_waits_on_the_host_not_at_all(facts, total):
    memory = {"arguments": 5, "temporaries": 3, "outputs": 4, "aliased": 2, "peak": 9, "host": 0} | facts
    facts = {"out_of_memory": None, "memory": memory} | facts
    assert Compiled(base.get_config(), topologies.get("v4-8"), facts, pathlib.Path()).total_bytes == total
