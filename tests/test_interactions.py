# SPDX-License-Identifier: Apache-2.0
"""Features together: the page says what the rules say, and what they accept trains and resumes bit for bit."""

import pytest

from tests import features, pair_runs
from tests.support import ROOT


def test_the_page_says_of_each_pair_what_the_rules_say():
    written = (ROOT / "docs" / "interactions.md").read_text()
    assert written == features.page(), "write it again: .venv/bin/python -m tests.features > docs/interactions.md"


def test_each_feature_is_accepted_alone_and_each_refusal_is_a_line():
    assert {name: line for name in features.FEATURES if (line := features.refusal([name]))} == {}
    lines = features.verdicts().refused
    assert not [line for line in lines if "\n" in line or len(line) > 300]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """The data of all features."""
    return pair_runs.Place(tmp_path_factory.mktemp("place"))


@pytest.mark.slow
@pytest.mark.parametrize(  # all pairs in benchmarks/interactions.py
    "names",
    [
        ("EMA", "accumulation", "spike guard", "offload", "continual backprop", "FSDP", "mesh change"),
        ("experts", "accumulation", "ramp"),
    ],
    ids=" + ".join,
)
def test_features_train_together_and_resume_bit_for_bit(names, place, tmp_path):
    assert pair_runs.faults(place, names, tmp_path) == []


@pytest.mark.parametrize(
    ("names", "line"),
    [
        (("int8", "LoRA"), "lora.rank=2 needs model.quantization=none, not int8"),
        (("ramp", "GRPO"), "train.objective=grpo needs batch.ramp=none, not steps (its rows are groups of answers)"),
        (("recursive", "dropout"), "model.name=trm needs model.dropout=0.0, not 0.1 (this model does not read it)"),
        (
            ("recursive", "ReDo"),
            "model.name=trm needs plasticity.method=none, l2_init or shrink_perturb, not redo (it names no",
        ),
        (("classifier", "causality"), "train.objective=classification needs causality.prompt='', not 1 2 3 (which"),
        (("tree of thoughts", "mixture"), "data.source=countdown needs data.mixture='', not 0.7 FOLDER"),
        (("experts", "context"), "model.num_experts=4 needs mesh.context=1, not 2 (mesh.fsdp splits what mesh.context"),
    ],
    ids=str,
)
def test_features_that_do_not_go_together_are_one_line(names, line):
    assert features.refusal(names).startswith(line)
