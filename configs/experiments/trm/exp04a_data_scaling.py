# SPDX-License-Identifier: Apache-2.0
"""Training puzzles. The number of updates is held fixed: with fixed epochs, data and compute would grow together."""

from configs.group import Group

EPOCHS, BETWEEN = 50_000.0, 5_000.0  # of 1,000 puzzles, and from one evaluation to the next


def puzzles(count: int) -> dict:
    """Return the keys of so many training puzzles, with the updates and evaluations of 1,000."""
    return {
        "data.puzzle_count": count, "train.epochs": EPOCHS * 1000 / count,
        "evaluation.every_epochs": BETWEEN * 1000 / count,
    }  # fmt: skip


GROUP = Group(
    question="How many training puzzles are enough?",
    hypothesis="Augmentation cannot replace puzzles that need other reasoning.",
    expected="Accuracy rises steeply up to 1,000 puzzles, and slowly beyond.",
    configurations={f"{count}": puzzles(count) for count in (100, 250, 500, 1000, 2000, 5000)},
    mini={"30": {"data.puzzle_count": 30}, "1000": {}},
)
