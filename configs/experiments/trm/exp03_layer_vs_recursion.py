# SPDX-License-Identifier: Apache-2.0
"""Layers against recursion at the same number of layer calls; the parameters grow from 2.5 to 15.1 million."""

from configs.group import Group


def depth(layers: int, cycles: int) -> dict:
    """Return the keys of a network with a number of layers and of applications in a cycle."""
    return {"model.num_layers": layers, "model.low_cycles": cycles}


GROUP = Group(
    question="At the same depth, are few layers applied often better than many layers applied rarely?",
    hypothesis="Fewer parameters overfit 1,000 puzzles less (arXiv:2510.04871, section 4.4).",
    expected="Two layers with six updates win; four layers reached 79.5 % there.",
    analysis=(
        "Compare the means of the table. There is no fit, because layers and updates change together. The layer "
        "calls are equal and the parameters are not: 2.5, 5.0, 7.5, 10.0 and 15.1 million. A win of two layers is "
        "therefore a win of fewer parameters and of more recursion, and the group cannot separate the two; "
        "exp01-model-scaling varies parameters alone."
    ),
    troubleshooting=(
        "A network of six layers overfits 1,000 puzzles: a training accuracy that rises while the held-out one "
        "falls is the expected effect and no failure. Compare the best evaluation of the learning curve with the "
        "last one before a conclusion."
    ),
    configurations={
        "a-1x12": depth(1, 12), "b-2x6": depth(2, 6), "c-3x4": depth(3, 4), "d-4x3": depth(4, 3), "e-6x2": depth(6, 2),
    },
    mini={"a-1x6": depth(1, 6), "b-2x3": {}},
)  # fmt: skip
