# SPDX-License-Identifier: Apache-2.0
"""A curriculum of cycles: they grow from 1 and 2 to 3 and 6 over the first 10,000 of 50,000 epochs."""

from configs.group import Group

GROUP = Group(
    question="Does it help, or save time, to begin with few cycles?",
    hypothesis="Early updates learn what needs little recursion, at a fraction of the cost.",
    expected="The same accuracy in less time.",
    configurations={
        "baseline": {},
        "curriculum": {
            "supervision.first_high_cycles": 1, "supervision.first_low_cycles": 2, "supervision.growth_fraction": 0.2,
        },
    },
    mini={
        "baseline": {},
        "curriculum": {
            "supervision.first_high_cycles": 1, "supervision.first_low_cycles": 1, "supervision.growth_fraction": 0.2,
        },
    },
)  # fmt: skip
