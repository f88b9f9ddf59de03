# SPDX-License-Identifier: Apache-2.0
"""The ENABLE_* switches of the earlier systems, and the configuration keys that each switch sets."""

from collections.abc import Mapping
from typing import Annotated, NamedTuple

import pydantic

from files.json_reader import JsonError, Object, Scalar, read_json
from files.paths import expanded
from pods.errors import usage_error
from pods.settings import FIELDS, truth

Size = Annotated[int, pydantic.Field(ge=0, lt=2**31)] | None
ALL = "ENABLE_OPTIMIZATIONS"  # if it is off, all other switches are off
TPU_OPT, CAUSAL, EVOLUTION = "ENABLE_TPU_OPT", "ENABLE_CAUSAL", "ENABLE_EVOLUTION"
SWITCHES = {  # configuration keys that an enabled switch sets
    # Kernels need no switch. --topology brings the compiler's options and the mesh, which shards experts where that is
    # faster than gathering them. What a recipe keeps for its backward pass is the fastest that fits.
    TPU_OPT: {"model.dtype": "bfloat16", "batch.fit": "auto"},
    "ENABLE_NEUROPLASTICITY": {"plasticity.method": "continual_backprop"},
    CAUSAL: {  # the same words in another order have as many tokens; explained at each evaluation
        "causality.prompt": "red blue green red blue", "causality.corrupt": "red green blue red blue",
    },
    EVOLUTION: {},  # keys come from the search, see pods/launch.py
    "ENABLE_META_LEARNING": {
        # A step of first-order MAML costs no more than plain training on the same row. Reptile needs several: with one,
        # it is plain training (arXiv:1803.02999). MAML needs second derivatives, which fused kernels do not have.
        "train.objective": "meta_language_modeling", "meta.method": "first_order_maml", "meta.share": 0.1,
    },
}  # fmt: skip


class File(Object, total=False):
    """A file of switches, at the top level or under "switches", and sizes."""

    switches: dict[str, Scalar]
    model_size: Annotated[str, pydantic.Field(max_length=100)] | None
    sequence_length: Size
    num_experts: Size
    evolution_trials: Size
    evolution_steps: Size


class Resolved(NamedTuple):
    """The requested value of every switch and of ALL, and why the configuration cannot have some of them."""

    given: dict[str, bool]
    left_out: dict[str, str] = {}  # noqa: RUF012  it is never changed

    @property
    def on(self) -> list[str]:
        """Enabled switches that take effect."""
        return [name for name in SWITCHES if self.given[name] and self.given[ALL] and name not in self.left_out]

    @property
    def keys(self) -> dict[str, object]:
        """Dotted configuration keys that the switches set."""
        return {key: value for name in self.on for key, value in SWITCHES[name].items()}

    @property
    def effective(self) -> dict[str, bool]:
        """Every switch and ALL; those that are left out are off."""
        return {name: value and name not in self.left_out for name, value in self.given.items()}

    def record(self) -> dict:
        """Return the entry for reports."""
        return {"given": self.given, "on": self.on, "left_out": self.left_out}

    def lines(self) -> list[str]:
        """Return a line for each enabled switch that is left out."""
        return [f"{name}=true is left out, since {reason}" for name, reason in self.left_out.items()]


def resolve(*sources: Mapping) -> Resolved:
    """Return the switches from these sources; later ones win, and an absent, None or empty value means the default.

    A source is {enable_causal or ENABLE_CAUSAL: its value}, at the top level or under "switches". Raises PodError (exit
    status 2) if a value is neither true nor false.
    """
    given = {name: FIELDS[name.lower()].default for name in (ALL, *SWITCHES)}
    for source in sources:
        values = {name.upper(): value for name, value in (source | source.get("switches", {})).items()}
        given |= {name: truth(name, values[name]) for name in given if values.get(name) not in (None, "")}
    return Resolved(given)


def read_file(path: str) -> File:
    """Return the content of a file of switches; PodError (exit status 2) if it is missing or invalid."""
    try:
        return read_json(expanded(path), File)
    except OSError as error:
        raise usage_error(f"{path}: {error.strerror}; name a JSON file of switches") from None
    except JsonError as error:
        raise usage_error(f'{error}; write for instance {{"enable_evolution": false}}') from None
