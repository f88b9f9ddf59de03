# SPDX-License-Identifier: Apache-2.0
"""Exploration of halting that falls linearly over the updates."""

from configs.group import Group

ANNEALED = {"supervision.exploration": 0.3, "supervision.final_exploration": 0.05}

GROUP = Group(
    question="Does much exploration at first and little at the end learn better when to halt?",
    hypothesis="At first the halt head knows nothing; at the end exploration only delays easy puzzles.",
    expected="The same accuracy with fewer steps on a puzzle.",
    analysis=(
        "Compare the accuracy, and then `steps` of the training lines in metrics.jsonl, the mean steps of puzzles "
        "that have ended: the same accuracy with fewer steps is the success. Exploration acts in training only, "
        "and evaluation always takes the most steps, so that only these lines show a saving."
    ),
    troubleshooting=(
        "If the halt head never learns, all puzzles use the most steps; look at `halt_accuracy` there before the "
        "accuracy. The earlier TPU code initialised the head so that half of the puzzles halted at once, and its "
        "figures show that. The shipped files had flags for this and no code; a linear fall over the updates is "
        "the choice made here."
    ),
    configurations={"baseline": {}, "annealed": ANNEALED},
    mini={"baseline": {}, "annealed": ANNEALED},
)
