# SPDX-License-Identifier: Apache-2.0
"""Learning rates by name: `optimizer.schedule = "cosine"` is the function `cosine` here."""

import optax


def cosine(config, num_steps: int) -> optax.Schedule:
    """Linear from 0 over `warmup_steps`, then half a cosine to `final_fraction` of the peak (arXiv:1608.03983)."""
    peak = config.learning_rate
    return optax.warmup_cosine_decay_schedule(
        init_value=0.0, peak_value=peak, warmup_steps=config.warmup_steps,
        decay_steps=max(num_steps, config.warmup_steps + 1), end_value=config.final_fraction * peak,
    )  # fmt: skip
