# SPDX-License-Identifier: Apache-2.0
"""Augmented versions of each training puzzle; the number of updates does not change."""

from configs.group import Group

GROUP = Group(
    question="How many augmented versions does a training puzzle need?",
    hypothesis="Versions keep the network from memorising 1,000 boards.",
    expected="10 versions overfit; 1,000 and 2,000 do not differ.",
    axis="data.puzzle_augmentations",
    analysis=(
        "Read the fit over versions. The updates and the 1,000 puzzles are the same everywhere, so that a slope "
        "is the effect of augmentation alone. The fit leaves out a number of 0. It is expected to bend before "
        "1,000."
    ),
    troubleshooting=(
        "With 10 versions the network memorises: watch the gap between training and held-out accuracy. Versions "
        "are made before training; 2,000 of them take twice the disk and the time of the baseline at the first "
        "start."
    ),
    configurations={f"{count}": {"data.puzzle_augmentations": count} for count in (10, 100, 500, 1000, 2000)},
    mini={"0": {"data.puzzle_augmentations": 0}, "100": {}},
)
