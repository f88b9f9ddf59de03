# SPDX-License-Identifier: Apache-2.0
"""Estimates the energy of a step from the published power of a chip."""

from typing import NamedTuple


class Power(NamedTuple):
    """Watts of a chip: idle, mean and most, in production, with their source."""

    idle: float
    mean: float
    most: float
    source: str


POWER = {"v4": Power(90, 170, 192, "Jouppi et al. 2023, arXiv:2304.01433, table 4")}  # no other chip has published ones


def of_step(chip: str, num_chips: int, step_seconds: float, busy_share: float, tokens: int) -> dict | None:
    """Return joules of a step of all chips and of a token; None if the chip's power is not published.

    The power of a chip is taken to rise with its busy share from the idle to the mean one. Memory, hosts, network and
    cooling are not in it.
    """
    if (power := POWER.get(chip)) is None:
        return None
    watts = power.idle + (power.mean - power.idle) * busy_share
    joules = num_chips * watts * step_seconds
    return {
        "estimate": True, "watts_per_chip": watts, "joules_per_step": joules, "joules_per_token": joules / tokens,
        "source": power.source,
    }  # fmt: skip
