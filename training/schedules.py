# SPDX-License-Identifier: Apache-2.0
"""Learning rate schedules by name: `optimizer.schedule = "cosine"` selects the function `cosine` here.

Each schedule first rises linearly from 0 to the peak over `warmup_steps`. To add one, write a function (config,
num_steps) -> optax.Schedule, and a test.
"""

import jax.numpy as jnp
import optax


def cosine(config, num_steps: int) -> optax.Schedule:
    """Return a schedule that falls by half a cosine to `final_fraction` of the peak (arXiv:1608.03983)."""
    return _after_warmup(config, optax.cosine_decay_schedule(1.0, _after(config, num_steps), config.final_fraction))


def cosine_from_one(config, num_steps: int) -> optax.Schedule:
    """Return `cosine` shifted by one step: the first update has 1 / warmup_steps of the peak, not 0."""
    schedule = cosine(config, num_steps)
    return lambda step: schedule(step + 1)


def linear(config, num_steps: int) -> optax.Schedule:
    """Return a schedule that falls linearly to `final_fraction` of the peak."""
    return _after_warmup(config, optax.linear_schedule(1.0, config.final_fraction, _after(config, num_steps)))


def warmup_stable_decay(config, num_steps: int) -> optax.Schedule:
    """Return a schedule that stays at the peak, then falls by 1 - sqrt over the last `cooldown_fraction` of all steps.

    It falls to `final_fraction` of the peak. Source: arXiv:2405.18392, section 3, which finds 1 - sqrt better than a
    line. If `train.steps` is raised before the fall begins, the resumed run continues at the peak.
    """
    fall = min(max(1, round(config.cooldown_fraction * num_steps)), _after(config, num_steps))
    begin = _after(config, num_steps) - fall

    def factor(step):
        part = jnp.clip((step - begin) / fall, 0.0, 1.0)
        return 1 - (1 - config.final_fraction) * jnp.sqrt(part)

    return _after_warmup(config, factor)


def constant(config, num_steps: int) -> optax.Schedule:
    """Return a schedule that stays at the peak to the end."""
    return _after_warmup(config, optax.constant_schedule(1.0))


def scaled(schedule: optax.Schedule, factor: float) -> optax.Schedule:
    """Return a schedule multiplied by a factor; the schedule itself if the factor is 1."""
    return schedule if factor == 1 else lambda step: factor * schedule(step)


def _after(config, num_steps: int) -> int:
    """Return the number of steps after the warm-up, at least 1."""
    return max(1, num_steps - config.warmup_steps)


def _after_warmup(config, factor: optax.Schedule) -> optax.Schedule:
    """Return the warm-up, followed by the peak * factor(steps since the end of the warm-up)."""
    peak, warmup = config.learning_rate, config.warmup_steps
    rise = optax.linear_schedule(0.0, 1.0, max(1, warmup))
    joined = optax.join_schedules([rise, factor], [warmup])
    return lambda step: peak * joined(step)
