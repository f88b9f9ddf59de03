# SPDX-License-Identifier: Apache-2.0
"""Training puzzles. The number of updates is held fixed: with fixed epochs, data and compute would grow together."""

from configs.group import Group

EPOCHS, BETWEEN = 50_000.0, 5_000.0  # of 1,000 puzzles, and from one evaluation to the next


def puzzles(count: int) -> dict:
    """Return the keys of a number of training puzzles, with the updates and evaluations of 1,000."""
    return {
        "data.puzzle_count": count, "train.epochs": EPOCHS * 1000 / count,
        "evaluation.every_epochs": BETWEEN * 1000 / count,
    }  # fmt: skip


GROUP = Group(
    question="How many training puzzles are enough?",
    hypothesis="Augmentation cannot replace puzzles that need other reasoning.",
    expected="Accuracy rises steeply up to 1,000 puzzles, and slowly beyond.",
    axis="data.puzzle_count",
    analysis=(
        "Read the scaling fit over puzzles, and then the learning curves: with few puzzles the held-out accuracy "
        "falls after its best evaluation. Updates are held fixed. The shipped configurations fixed the epochs, so "
        "that 100 puzzles had 813 updates and 5,000 had 40,690; figures from those mix data and compute, and do "
        "not compare with these."
    ),
    troubleshooting=(
        "100 and 250 puzzles are repeated many times; their training loss goes to nearly 0 and that is not an error. "
        "Each number of puzzles is sampled and augmented once and kept in the cache, which needs disk and time at "
        "the first start. An error about data.path means that the CSV files of the puzzles are missing there."
    ),
    configurations={f"{count}": puzzles(count) for count in (100, 250, 500, 1000, 2000, 5000)},
    mini={"30": {"data.puzzle_count": 30}, "1000": {}},
)
