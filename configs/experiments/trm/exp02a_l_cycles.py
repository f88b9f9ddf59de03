# SPDX-License-Identifier: Apache-2.0
"""Updates of the low latent in a cycle."""

from configs.group import Group

GROUP = Group(
    question="How many updates of the low latent does a cycle need?",
    hypothesis="More updates reason longer before an answer is written; their gradient costs memory and time.",
    expected="Accuracy rises up to 6 updates, and less beyond.",
    axis="model.low_cycles",
    analysis=(
        "Read the table with cost against accuracy: a step with 12 updates takes about 13/7 of the time of one "
        "with 6, so that more updates have to be worth their chip-hours. The fit is expected to bend at 6."
    ),
    troubleshooting=(
        "Only the last cycle has a gradient, but all its updates keep activations: memory grows with the updates, "
        "and 12 may not fit where 6 does. Then use more chips. Each number of updates is another program, so that "
        "every trial compiles once."
    ),
    configurations={
        f"{number:02}-{cycles}": {"model.low_cycles": cycles} for number, cycles in enumerate((2, 4, 6, 8, 10, 12), 1)
    },
    mini={"01-1": {"model.low_cycles": 1}, "02-3": {}},
)
