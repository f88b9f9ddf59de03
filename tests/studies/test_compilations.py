# SPDX-License-Identifier: Apache-2.0
"""A configuration of each group of the recursive study compiles, by the code of benchmarks/study_compilations.py."""

import dataclasses

import pytest

from studies import suites
from tests.support import ROOT

STUDY, _ = suites.find("trm")
GROUPS = [name for name, group in STUDY.groups.items() if group.counted]
FEWER = {"model.high_cycles": 1, "model.low_cycles": 2}  # the last cycles are differentiated in any case


@pytest.mark.slow
@pytest.mark.parametrize("group", GROUPS)
def test_a_configuration_of_each_group_compiles(group):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        import study_compilations

        member = next(m for m in reversed(suites.members(STUDY, [group])) if not m.refusal)
        changes = {key: min(count, member.values[key]) for key, count in FEWER.items()}
        changes |= {key: 0 for key in member.values if key.startswith("supervision.first_")}
        program = study_compilations.compiled(dataclasses.replace(member, values=member.values | changes))
    assert program.cost_analysis()["flops"] > 0
