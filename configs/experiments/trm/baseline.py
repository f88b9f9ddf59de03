# SPDX-License-Identifier: Apache-2.0
"""The recipe itself, which fourteen configurations of the other groups equal."""

from configs.group import Group

GROUP = Group(
    question="What does the recipe reach without any change?",
    hypothesis="It reproduces the published result: the batch is larger and there are fewer updates.",
    expected="87.4 % of the puzzles exact with a batch of 768 (arXiv:2510.04871, table 4); less with 6,144.",
    analysis=(
        "One configuration answers no comparison: read its mean and its spread over seeds, which is the size "
        "below which no other group can conclude anything. Run it with at least three seeds before the rest."
    ),
    troubleshooting=(
        "Accuracy below the published one is expected with a batch of 6,144: it has 8,138 updates in place of "
        "65,104. Use --base=paper for the published batch. An accuracy of 0 after the first tenth of the steps "
        "points at the data: check data.path and the number of puzzles in the log."
    ),
    configurations={"baseline": {}},
    counted=False,
)
