# SPDX-License-Identifier: Apache-2.0
"""The most supervision steps on a puzzle, in training and in evaluation."""

from configs.group import Group

GROUP = Group(
    question="How many supervision steps does a puzzle need?",
    hypothesis="More steps correct more errors of earlier ones.",
    expected="Accuracy rises up to 16 steps.",
    configurations={
        f"{letter}-{steps}": {"supervision.max_steps": steps}
        for letter, steps in zip("abcdef", (4, 8, 12, 16, 24, 32), strict=True)
    },
    mini={"a-2": {"supervision.max_steps": 2}, "b-8": {}},
)
