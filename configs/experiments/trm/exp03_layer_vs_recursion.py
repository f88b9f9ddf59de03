# SPDX-License-Identifier: Apache-2.0
"""Layers against recursion at the same number of layer calls; the parameters grow from 2.5 to 15.1 million."""

from configs.group import Group


def depth(layers: int, cycles: int) -> dict:
    """Return the keys of a network of so many layers, applied so often in a cycle."""
    return {"model.num_layers": layers, "model.low_cycles": cycles}


GROUP = Group(
    question="At the same depth, are few layers applied often better than many layers applied rarely?",
    hypothesis="Fewer parameters overfit 1,000 puzzles less (arXiv:2510.04871, section 4.4).",
    expected="Two layers with six updates win; four layers reached 79.5 % there.",
    configurations={
        "a-1x12": depth(1, 12), "b-2x6": depth(2, 6), "c-3x4": depth(3, 4), "d-4x3": depth(4, 3), "e-6x2": depth(6, 2),
    },
    mini={"a-1x6": depth(1, 6), "b-2x3": {}},
)  # fmt: skip
