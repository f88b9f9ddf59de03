# SPDX-License-Identifier: Apache-2.0
"""Cycles over both latents in a step; only the last has a gradient."""

from configs.group import Group

GROUP = Group(
    question="How many cycles does a step need?",
    hypothesis="Cycles without a gradient improve the state from which the last one learns.",
    expected="One cycle is clearly worse than three; five are hardly better.",
    axis="model.high_cycles",
    analysis=(
        "Compare one cycle with three: this is the effect of cycles without a gradient. Use cost against accuracy "
        "to judge four and five, whose steps take about a fifth longer for each cycle."
    ),
    troubleshooting=(
        "Cycles without a gradient keep no activations, so that memory is nearly the same in the whole group. If "
        "more cycles need much more memory, the gradient is not stopped between them: that would be an error of "
        "the code."
    ),
    configurations={f"{cycles:02}": {"model.high_cycles": cycles} for cycles in (1, 2, 3, 4, 5)},
    mini={"01": {"model.high_cycles": 1}, "02": {}},
)
