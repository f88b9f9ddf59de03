# SPDX-License-Identifier: Apache-2.0
"""Loss on held-out batches."""

from collections.abc import Iterable


def evaluate(run, state, batches: Iterable[dict]) -> tuple[float, int]:
    """Return (mean loss in nats per token, number of tokens) of the parameters over placed batches."""
    total, weight = 0.0, 0
    for batch in batches:
        loss, tokens = run.eval_step(state.params, state.carry, batch)["loss"]
        total, weight = total + float(loss), weight + int(tokens)
    return total / max(weight, 1), weight
