# SPDX-License-Identifier: Apache-2.0
"""What an objective measures on held-out batches."""

import math
from collections.abc import Callable, Iterable, Sequence


def evaluate(
    run, params: dict, batches: Iterable[dict], is_stopped: Callable[[], bool], frozen: Sequence = ()
) -> tuple[dict, int] | None:
    """Return ({name: mean}, weight of `loss`: tokens or puzzles) over placed batches; None where it was stopped.

    The mean of what weighs nothing is no number.

    Args:
      frozen: as `run.abstract_frozen`.
    """
    sums, weights = {}, {}
    for batch in batches:
        if is_stopped():
            return None
        for name, (total, weight) in run.eval_step(params, batch, *frozen).items():
            sums[name] = sums.get(name, 0.0) + float(total)
            weights[name] = weights.get(name, 0) + int(weight)
    means = {name: total / weights[name] if weights[name] else math.nan for name, total in sums.items()}
    return means, weights["loss"]


def told(objective, figures: dict[str, float], weight: int) -> tuple[str, str, str]:
    """Return what to say of what `evaluate` gave: (name, values, what the weight counts)."""
    name, values, unit = objective.told(figures)
    return name, values if weight else "unknown", unit
