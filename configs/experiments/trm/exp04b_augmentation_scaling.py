# SPDX-License-Identifier: Apache-2.0
"""Augmented versions of each training puzzle; the number of updates does not change."""

from configs.group import Group

GROUP = Group(
    question="How many augmented versions does a training puzzle need?",
    hypothesis="Versions keep the network from memorising 1,000 boards.",
    expected="10 versions overfit; 1,000 and 2,000 do not differ.",
    configurations={f"{count}": {"data.puzzle_augmentations": count} for count in (10, 100, 500, 1000, 2000)},
    mini={"0": {"data.puzzle_augmentations": 0}, "100": {}},
)
