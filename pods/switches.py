# SPDX-License-Identifier: Apache-2.0
"""The ENABLE_* switches of the earlier systems: what each changes in the configuration, or that it cannot yet.

A switch whose mechanism Torus does not have is told in a line and is never counted as on.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping

from pods.settings import TRUTH
from pods.transports import usage_error

ALL = "ENABLE_OPTIMIZATIONS"  # off: none of the others is on, whatever it says


@dataclasses.dataclass(frozen=True)
class Switch:
    """One variable. `keys` are set in the configuration where it is on; None: Torus has no such mechanism yet."""

    name: str
    default: bool
    keys: Mapping[str, object] | None
    disable_flag: str  # of scripts/deploy_optimizations.py


SWITCHES = {
    switch.name: switch
    for switch in (
        # On a TPU its kernels are on by themselves; the mesh and the compiler's options come with --topology.
        Switch("ENABLE_TPU_OPT", True, {"model.dtype": "bfloat16", "model.remat": "attention"}, "disable-tpu"),
        Switch("ENABLE_NEUROPLASTICITY", True, None, "disable-neuroplasticity"),
        Switch("ENABLE_CAUSAL", True, None, "disable-causal"),
        Switch("ENABLE_EVOLUTION", False, None, "disable-evolution"),
        Switch("ENABLE_META_LEARNING", True, None, "disable-meta-learning"),
    )
}


@dataclasses.dataclass(frozen=True)
class Resolved:
    """What was asked for and what came of it; `given` has every switch, and the one for all of them."""

    given: dict[str, bool]

    @property
    def wanted(self) -> list[Switch]:
        """Switches that are not off, by themselves or with all of them."""
        return [switch for name, switch in SWITCHES.items() if self.given[name] and self.given[ALL]]

    @property
    def on(self) -> list[str]:
        """Switches that are wanted and change the configuration."""
        return [switch.name for switch in self.wanted if switch.keys is not None]

    @property
    def not_yet(self) -> list[str]:
        """Switches that are wanted and that Torus cannot turn on."""
        return [switch.name for switch in self.wanted if switch.keys is None]

    @property
    def keys(self) -> dict[str, object]:
        """Dotted configuration keys that the switches set."""
        return {key: value for name in self.on for key, value in SWITCHES[name].keys.items()}

    def record(self) -> dict:
        """Return what reports keep."""
        return {"given": self.given, "on": self.on, "not_yet": self.not_yet}

    def lines(self) -> list[str]:
        """Return a line for each switch that is wanted in vain."""
        return [f"{name}=true: not in Torus yet; the run goes without it" for name in self.not_yet]


def resolve(values: Mapping[str, str | bool | None]) -> Resolved:
    """Return the switches as these variables set them, by name; what is absent, None or empty has its default.

    Raises:
      PodError: a value that is neither true nor false (exit status 2).
    """
    defaults = {ALL: True} | {name: switch.default for name, switch in SWITCHES.items()}
    given = {name: values[name] for name in defaults if values.get(name) not in (None, "")}
    return Resolved(defaults | {name: boolean(name, value) for name, value in given.items()})


def boolean(name: str, value: str | bool) -> bool:
    """Return a variable's value as a truth value; PodError where it is none."""
    if isinstance(value, bool):
        return value
    if str(value).strip().lower() not in TRUTH:
        raise usage_error(f"{name}={value} is neither on nor off; write true or false")
    return TRUTH[str(value).strip().lower()]


def read_file(path: str) -> dict[str, bool]:
    """Return the switches of a JSON file, written enable_causal or ENABLE_CAUSAL, at its top or under "switches".

    Raises:
      PodError: it is missing or no JSON object, or a switch has another value (exit status 2).
    """
    try:
        stored = json.loads(pathlib.Path(path).expanduser().read_text())
    except (OSError, ValueError) as error:
        raise usage_error(
            f"{path}: {getattr(error, 'strerror', None) or error}; name a JSON file of switches"
        ) from None
    if not isinstance(stored, dict):
        raise usage_error(f'{path} is no JSON object; write for instance {{"enable_evolution": false}}')
    values = {name.upper(): value for name, value in (stored | stored.get("switches", {})).items()}
    return {name: boolean(name, values[name]) for name in (ALL, *SWITCHES) if name in values}
