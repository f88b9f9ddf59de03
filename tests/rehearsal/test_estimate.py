# SPDX-License-Identifier: Apache-2.0
"""What a report says of memory, and beside its figures."""

import pathlib

import pytest

from configs import base, topologies
from rehearsal.compiler import Compiled
from rehearsal.estimate import _notes


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


@pytest.mark.parametrize(("facts", "total"), [({}, 10), ({"host": 1}, 8), ({"out_of_memory": 20}, 20)])
def test_what_is_donated_counts_once_and_what_waits_on_the_host_not_at_all(facts, total):
    memory = {"arguments": 5, "temporaries": 3, "outputs": 4, "aliased": 2, "peak": 9, "host": 0} | facts
    facts = {"out_of_memory": None, "memory": memory} | facts
    assert Compiled(base.get_config(), topologies.get("v4-8"), facts, pathlib.Path()).total_bytes == total
