# SPDX-License-Identifier: Apache-2.0
"""Updates of the low latent in a cycle."""

from configs.group import Group

GROUP = Group(
    question="How many updates of the low latent does a cycle need?",
    hypothesis="More updates reason longer before an answer is written; their gradient costs memory and time.",
    expected="Accuracy rises up to 6 updates, and less beyond.",
    configurations={
        f"{number:02}-{cycles}": {"model.low_cycles": cycles} for number, cycles in enumerate((2, 4, 6, 8, 10, 12), 1)
    },
    mini={"01-1": {"model.low_cycles": 1}, "02-3": {}},
)
