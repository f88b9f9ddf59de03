# SPDX-License-Identifier: Apache-2.0
"""The recipe itself, which fourteen configurations of the other groups equal."""

from configs.group import Group

GROUP = Group(
    question="What does the recipe reach without any change?",
    hypothesis="It reproduces the published result: the batch is larger and there are fewer updates.",
    expected="87.4 % of the puzzles exact with a batch of 768 (arXiv:2510.04871, table 4); less with 6,144.",
    configurations={"baseline": {}},
    counted=False,
)
