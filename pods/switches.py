# SPDX-License-Identifier: Apache-2.0
"""The ENABLE_* switches of the earlier systems, and the configuration keys that each switch sets.

Torus lacks the mechanisms of some switches. These never count as on, and a line reports them.
"""

import pathlib
from collections.abc import Mapping
from typing import Annotated, NamedTuple

import pydantic

from files.json_reader import JsonError, Object, Scalar, read_json
from pods.errors import usage_error
from pods.settings import FIELDS, truth

Size = Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None
ALL = "ENABLE_OPTIMIZATIONS"  # if it is off, all other switches are off
EVOLUTION = "ENABLE_EVOLUTION"
SWITCHES = {  # configuration keys that an enabled switch sets; None: Torus has no such mechanism yet
    # TPU kernels need no switch; the mesh and the compiler's options come from --topology.
    "ENABLE_TPU_OPT": {"model.dtype": "bfloat16", "model.remat": "attention"},
    "ENABLE_NEUROPLASTICITY": None,
    "ENABLE_CAUSAL": None,
    EVOLUTION: {},  # keys come from the search, see pods/launch.py
    "ENABLE_META_LEARNING": None,
}


class File(Object, total=False):
    """A file of switches, at the top level or under "switches", and sizes."""

    switches: dict[str, Scalar]
    model_size: Annotated[str, pydantic.Field(max_length=100)] | None
    sequence_length: Size
    num_experts: Size


class Resolved(NamedTuple):
    """The requested value of every switch and of ALL, and the switches that take effect."""

    given: dict[str, bool]

    @property
    def on(self) -> list[str]:
        """Enabled switches that change the configuration."""
        return [name for name, keys in SWITCHES.items() if self._wanted(name) and keys is not None]

    @property
    def not_yet(self) -> list[str]:
        """Enabled switches that Torus does not support."""
        return [name for name, keys in SWITCHES.items() if self._wanted(name) and keys is None]

    @property
    def keys(self) -> dict[str, object]:
        """Dotted configuration keys that the enabled switches set."""
        return {key: value for name in self.on for key, value in SWITCHES[name].items()}

    def record(self) -> dict:
        """Return the entry for reports."""
        return {"given": self.given, "on": self.on, "not_yet": self.not_yet}

    def lines(self) -> list[str]:
        """Return a line for each enabled switch that Torus does not support."""
        return [f"{name}=true: not in Torus yet; the run does without it" for name in self.not_yet]

    def _wanted(self, name: str) -> bool:
        return self.given[name] and self.given[ALL]


def resolve(*sources: Mapping) -> Resolved:
    """Return the switches from these sources; later ones win, and an absent, None or empty value means the default.

    Args:
      sources: {enable_causal or ENABLE_CAUSAL: its value}, at the top level or under "switches".

    Raises:
      PodError: a value is neither true nor false (exit status 2).
    """
    given = {name: FIELDS[name.lower()].default for name in (ALL, *SWITCHES)}
    for source in sources:
        values = {name.upper(): value for name, value in (source | source.get("switches", {})).items()}
        given |= {name: truth(name, values[name]) for name in given if values.get(name) not in (None, "")}
    return Resolved(given)


def read_file(path: str) -> File:
    """Return the content of a file of switches; PodError (exit status 2) if it is missing or invalid."""
    try:
        return read_json(pathlib.Path(path).expanduser(), File)
    except OSError as error:
        raise usage_error(f"{path}: {error.strerror}; name a JSON file of switches") from None
    except JsonError as error:
        raise usage_error(f'{error}; write for instance {{"enable_evolution": false}}') from None
