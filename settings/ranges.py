# SPDX-License-Identifier: Apache-2.0
"""Checks of each value by the declaration of its key; validation.py checks the rules between keys."""

import ast
import functools
import re

from configs.base import KEYS
from configs.errors import ConfigError, check_text, one_of, shown
from files.folders import source_files
from settings.loading import ROOT
from settings.stored_config import check_types

MOST_EXAMPLES = 2**32  # a run counts examples in 32 bits
TEXTS = ("causality.prompt", "causality.corrupt")  # which a tokenizer encodes
FLOAT16 = (
    "model.dtype=float16 is refused: gradients below 6e-8 are 0 in it without loss scaling, and TPUs do not multiply "
    "it; use bfloat16 or float32"
)
MAKE = re.compile(r"^(def )?make\b", re.MULTILINE)  # in a module that a configuration may name


def check(values: dict[str, object]) -> None:
    """Raise ConfigError for the first dotted key with a value of another type, not among its choices, or out of range.

    ml_collections accepts None for every key, and a bool for a number; a stored run with these could not be read.
    """
    check_types(values, "the configuration")
    if values["model.dtype"] == "float16":
        raise ConfigError(FLOAT16)
    for name, value in values.items():
        key = KEYS[name]
        if key.defined_in and (ROOT / key.defined_in).is_dir() and value not in _names(key.defined_in):
            _names.cache_clear()  # the module may have been added since
        if key.choices or key.defined_in:
            one_of(name, value, key.choices or _names(key.defined_in))
        if name in TEXTS:
            check_text(name, value)
        if isinstance(value, int | float) and not isinstance(value, bool):
            check_number(name, value)


def check_steps(steps: int, examples: int) -> None:
    """Raise ConfigError if a run cannot count its steps, or the examples that it has had after the last one."""
    check_number("train.steps", steps)
    if examples >= MOST_EXAMPLES:
        raise ConfigError(
            f"after train.steps={steps} the run would have had {examples:,} examples, which has to be less than "
            f"{MOST_EXAMPLES:,}; use fewer steps, or fewer and longer sequences"
        )


def check_number(name: str, value: float) -> None:
    """Raise ConfigError if a number is out of the range of its key."""
    key = KEYS[name]
    if not key.contains(value):
        rule = f"at most {key.largest:,}" if value > key.largest else key.rule()
        raise ConfigError(f"{name}={shown(value)} must be {rule} ({key.meaning})")


@functools.cache
def _names(place: str) -> list[str]:
    """Return the names of a folder's modules with `make`, or of a file's public functions that take `config` first.

    Nothing is imported, so that a misspelled name is answered before jax is loaded.
    """
    path = ROOT / place
    if path.is_dir():
        return sorted(file.stem for file in source_files(path, "*.py") if MAKE.search(file.read_text()))
    functions = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)]
    return sorted(f.name for f in functions if f.name[0] != "_" and f.args.args and f.args.args[0].arg == "config")
