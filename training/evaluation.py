# SPDX-License-Identifier: Apache-2.0
"""Loss on held-out batches."""

from collections.abc import Callable, Iterable


def evaluate(run, params: dict, batches: Iterable[dict], is_stopped: Callable[[], bool]) -> tuple[float, int] | None:
    """Return (mean loss in nats per token, number of tokens) over placed batches; None where it was stopped."""
    total, weight = 0.0, 0
    for batch in batches:
        if is_stopped():
            return None
        loss, tokens = run.eval_step(params, batch)["loss"]
        total, weight = total + float(loss), weight + int(tokens)
    return total / max(weight, 1), weight
