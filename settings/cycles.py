# SPDX-License-Identifier: Apache-2.0
"""The cycles of a recursive model by step, which grow to `model.high_cycles` and `model.low_cycles`.

Cycle counts are integers that the compiled step holds, so that each pair of them is a stage with its own program: the
floor of a line from the first counts to the complete ones.
"""

import math

from ml_collections import ConfigDict

from configs.errors import ConfigError

MOST_PAIRS = 7  # each is a compilation
Pair = tuple[int, int]  # high and low cycles


def after(config: ConfigDict, step: int) -> Pair | None:
    """Return the cycles of the next step after `step`; None if they do not grow during the run."""
    if not grows(config):
        return None
    ends = [(end, pair) for end, pair in _stages(config) if end > step]
    return ends[0][1] if ends else _last(config)


def stage_end(config: ConfigDict, step: int) -> int:
    """Return the last step with the same cycles as the next step after `step`."""
    if not grows(config):
        return config.train.steps
    return next((end for end, _ in _stages(config) if end > step), config.train.steps)


def of_pair(config: ConfigDict, pair: Pair | None) -> ConfigDict:
    """Return a copy of the configuration for only these cycles; the configuration itself for None."""
    if pair is None:
        return config
    copy = config.copy_and_resolve_references()
    copy.model.update(high_cycles=pair[0], low_cycles=pair[1])
    copy.supervision.update(first_high_cycles=0, first_low_cycles=0)
    return copy


def grows(config: ConfigDict) -> bool:
    return bool(config.supervision.first_high_cycles)


def changing_keys(config: ConfigDict) -> list[str]:
    """Return the keys for which the compiled step changes during the run."""
    changes = {
        "batch.ramp": config.batch.ramp != "none", "layout.changes": config.layout.changes,
        "supervision.first_high_cycles": grows(config),
    }  # fmt: skip
    return [key for key, changes_step in changes.items() if changes_step]


def check(config: ConfigDict) -> None:
    """Raise ConfigError for first cycles that are not both given, exceed the last ones, or need too many programs."""
    first, last, lows = _first(config), _last(config), config.model.low_latents
    if not any(first):
        return
    if not all(first):
        raise ConfigError("supervision.first_high_cycles and first_low_cycles belong together; give both, or neither")
    for name, begin, end in zip(("high_cycles", "low_cycles"), first, last, strict=True):
        if begin > end:
            raise ConfigError(f"supervision.first_{name}={begin} exceeds model.{name}={end}; use at most {end}")
    if lows != 1:
        raise ConfigError(f"supervision.first_high_cycles needs model.low_latents=1, not {lows}, which take turns")
    if (count := len(_pairs(config))) > MOST_PAIRS:
        raise ConfigError(
            f"supervision.first_high_cycles={first[0]} and first_low_cycles={first[1]} take {count} compilations up to "
            f"{last[0]} and {last[1]} cycles; begin nearer to these, with at most {MOST_PAIRS}"
        )


def _pairs(config: ConfigDict) -> list[tuple[float, Pair]]:
    """Return (part of the growth after which they end, cycles) of each stage, in order."""
    first, last = _first(config), _last(config)
    borders = {n / (end - begin) for begin, end in zip(first, last, strict=True) for n in range(1, end - begin + 1)}
    edges = sorted(borders | {1.0})
    before = [0.0, *edges[:-1]]

    def pair(part: float) -> Pair:
        return tuple(b + math.floor((e - b) * part + 1e-9) for b, e in zip(first, last, strict=True))

    return [*((end, pair(begin)) for begin, end in zip(before, edges, strict=True)), (math.inf, last)]


def _stages(config: ConfigDict) -> list[tuple[int, Pair]]:
    """Return (last step, cycles) of each stage of a run."""
    steps = config.train.steps
    growth = steps * config.supervision.growth_fraction
    return [(min(steps, math.ceil(part * growth)) if part < math.inf else steps, pair) for part, pair in _pairs(config)]


def _first(config: ConfigDict) -> Pair:
    return config.supervision.first_high_cycles, config.supervision.first_low_cycles


def _last(config: ConfigDict) -> Pair:
    return config.model.high_cycles, config.model.low_cycles
