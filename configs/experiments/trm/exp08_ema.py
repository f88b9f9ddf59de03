# SPDX-License-Identifier: Apache-2.0
"""Decay of the moving average of the parameters, which is evaluated."""

from configs.group import Group


def ema(decay: float) -> dict:
    """Return the keys of an average; 0: none."""
    return {"optimizer.ema_decay": decay}


GROUP = Group(
    question="Does evaluating an average of the parameters help?",
    hypothesis="Small data make training unstable, and an average is steadier (arXiv:2510.04871, section 4.7).",
    expected="79.9 % without an average, 87.4 % with a decay of 0.999.",
    analysis=(
        "Compare no average with a decay of 0.999: this is the published comparison. Evaluation uses the average, "
        "so early evaluations of a large decay lag: 0.9995 averages about 2,000 updates. Judge by the last "
        "evaluation, and by the spread over seeds, which the average should make smaller."
    ),
    troubleshooting=(
        "In a short run a decay of 0.999 or more still contains the random initial weights: an accuracy near 0 at "
        "the first evaluations is that and no divergence. The earlier TPU code never used its average and "
        "evaluated the raw weights, so that its figures for this group compare equal trials."
    ),
    configurations={
        "a-off": ema(0.0), "b-0.99": ema(0.99), "c-0.995": ema(0.995), "d-0.999": ema(0.999), "e-0.9995": ema(0.9995),
    },
    mini={"a-off": ema(0.0), "b-0.99": {}},
)  # fmt: skip
