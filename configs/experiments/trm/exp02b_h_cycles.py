# SPDX-License-Identifier: Apache-2.0
"""Cycles over both latents in a step, of which only the last has a gradient."""

from configs.group import Group

GROUP = Group(
    question="How many cycles does a step need?",
    hypothesis="Cycles without a gradient improve the state from which the last one learns.",
    expected="One cycle is clearly worse than three; five are hardly better.",
    configurations={f"{cycles:02}": {"model.high_cycles": cycles} for cycles in (1, 2, 3, 4, 5)},
    mini={"01": {"model.high_cycles": 1}, "02": {}},
)
