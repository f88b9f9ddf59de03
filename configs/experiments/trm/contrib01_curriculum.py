# SPDX-License-Identifier: Apache-2.0
"""A curriculum of cycles: they grow from 1 and 2 to 3 and 6 over the first 10,000 of 50,000 epochs."""

from configs.group import Group

GROUP = Group(
    question="Does it help, or save time, to begin with few cycles?",
    hypothesis="Early updates learn what needs little recursion, at a fraction of the cost.",
    expected="The same accuracy in less time.",
    analysis=(
        "Compare accuracy and chip-hours in cost against accuracy: the curriculum is worth it if it is to the "
        "left at the same height. The learning curves over steps hide the saving, because early steps are "
        "cheaper."
    ),
    troubleshooting=(
        "Each new number of cycles compiles another program, up to seven in all; in a short run the compilations "
        "take longer than the cycles save, so judge the hours of long runs only. A jump of the loss when cycles "
        "are added is expected and should vanish within some hundred steps. The shipped files had flags for this "
        "and no code."
    ),
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
