# SPDX-License-Identifier: Apache-2.0
"""Exploration of halting that falls linearly over the updates."""

from configs.group import Group

ANNEALED = {"supervision.exploration": 0.3, "supervision.final_exploration": 0.05}

GROUP = Group(
    question="Does much exploration at first and little at the end learn better when to halt?",
    hypothesis="At first the halt head knows nothing; at the end exploration only delays easy puzzles.",
    expected="The same accuracy with fewer steps on a puzzle.",
    configurations={"baseline": {}, "annealed": ANNEALED},
    mini={"baseline": {}, "annealed": ANNEALED},
)
