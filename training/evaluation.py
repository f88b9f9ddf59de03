# SPDX-License-Identifier: Apache-2.0
"""What an objective measures on held-out batches."""

from collections.abc import Callable, Iterable, Sequence


def evaluate(
    run, params: dict, batches: Iterable[dict], is_stopped: Callable[[], bool], frozen: Sequence = ()
) -> tuple[dict, int] | None:
    """Return ({name: mean}, weight of `loss`: tokens or puzzles) over placed batches; None where it was stopped.

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
    return {name: total / max(weights[name], 1) for name, total in sums.items()}, weights.get("loss", 0)
