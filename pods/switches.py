# SPDX-License-Identifier: Apache-2.0
"""The ENABLE_* switches of the earlier systems: what each changes in the configuration, or that it cannot yet.

A switch whose mechanism Torus does not have is told in a line and is never counted as on.
"""

import pathlib
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import pydantic

from files.json_reader import JsonError, Object, Scalar, read_json
from pods.settings import FIELDS, truth
from pods.transports import usage_error

Size = Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None
ALL = "ENABLE_OPTIMIZATIONS"  # off: none of the others is on, whatever it says
SWITCHES = {  # keys that are set in the configuration where it is on; None: Torus has no such mechanism yet
    # On a TPU its kernels are on by themselves; the mesh and the compiler's options come with --topology.
    "ENABLE_TPU_OPT": {"model.dtype": "bfloat16", "model.remat": "attention"},
    "ENABLE_NEUROPLASTICITY": None,
    "ENABLE_CAUSAL": None,
    "ENABLE_EVOLUTION": None,
    "ENABLE_META_LEARNING": None,
}


class File(Object, total=False):
    """A file of switches: these at the top or under "switches", and sizes."""

    switches: dict[str, Scalar]
    model_size: Annotated[str, pydantic.Field(max_length=100)] | None
    sequence_length: Size
    num_experts: Size


class Resolved(NamedTuple):
    """What was asked for, of every switch and the one for all of them, and what came of it."""

    given: dict[str, bool]

    @property
    def on(self) -> list[str]:
        """Switches that are wanted and change the configuration."""
        return [name for name, keys in SWITCHES.items() if self._wanted(name) and keys is not None]

    @property
    def not_yet(self) -> list[str]:
        """Switches that are wanted and that Torus cannot turn on."""
        return [name for name, keys in SWITCHES.items() if self._wanted(name) and keys is None]

    @property
    def keys(self) -> dict[str, object]:
        """Dotted configuration keys that the switches set."""
        return {key: value for name in self.on for key, value in SWITCHES[name].items()}

    def record(self) -> dict:
        """Return what reports keep."""
        return {"given": self.given, "on": self.on, "not_yet": self.not_yet}

    def lines(self) -> list[str]:
        """Return a line for each switch that is wanted in vain."""
        return [f"{name}=true: not in Torus yet; the run goes without it" for name in self.not_yet]

    def _wanted(self, name: str) -> bool:
        return self.given[name] and self.given[ALL]


def resolve(*sources: Mapping) -> Resolved:
    """Return the switches by these sources, of which later ones win; what is absent, None or empty has its default.

    Args:
      sources: {enable_causal or ENABLE_CAUSAL: its value}, at the top or under "switches".

    Raises:
      PodError: a value that is neither true nor false (exit status 2).
    """
    given = {name: FIELDS[name.lower()].default for name in (ALL, *SWITCHES)}
    for source in sources:
        values = {name.upper(): value for name, value in (source | source.get("switches", {})).items()}
        given |= {name: truth(name, values[name]) for name in given if values.get(name) not in (None, "")}
    return Resolved(given)


def read_file(path: str) -> File:
    """Return the content of a file of switches; PodError (exit status 2) where it is missing or none."""
    try:
        return read_json(pathlib.Path(path).expanduser(), File)
    except OSError as error:
        raise usage_error(f"{path}: {error.strerror}; name a JSON file of switches") from None
    except JsonError as error:
        raise usage_error(f'{error}; write for instance {{"enable_evolution": false}}') from None
