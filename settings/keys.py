# SPDX-License-Identifier: Apache-2.0
"""Configuration keys by dotted names: read and set values, parse typed text, and suggest keys for unknown names."""

import re
from collections.abc import Mapping, Sized
from typing import SupportsFloat

from ml_collections import ConfigDict

from configs import base
from configs.errors import ConfigError, did_you_mean, initials, shown, similar
from configs.key import SECRET

DASHES = ("\u2010", "\u2011", "\u2012", "\u2013", "\u2014", "\u2212")  # editors replace hyphens by these
DATA_READ = ("data.path", "data.mixture", "data.stream", "data.validation_path")  # keys that name data
WITH_PASSWORD = re.compile(r"://[^/\s@]*:[^/\s]*@")  # the user of a URL
NAMES_ELSEWHERE = {  # names in other programs, and the keys here
    "batch_size": "train.global_batch", "num_epochs": "train.epochs", "max_steps": "train.steps",
    "num_steps": "train.steps", "seq_len": "train.sequence_length", "block_size": "train.sequence_length",
    "d_model": "model.embed_dim", "hidden_size": "model.embed_dim", "n_embd": "model.embed_dim",
    "n_layer": "model.num_layers", "num_hidden_layers": "model.num_layers", "n_head": "model.num_heads",
    "num_attention_heads": "model.num_heads", "intermediate_size": "model.mlp_dim", "dataset": "data.path",
}  # fmt: skip
VARIABLES = {"logging.alerts": "TORUS_ALERTS_URL"}  # of the environment, for the value of a secret key
HIDDEN = "(hidden)"  # in place of a secret, where values are printed and stored
KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}  # of values
CONVERSIONS = {"invalid literal": int, "could not convert": float, "('Non-boolean": bool}  # as absl's errors begin
LENGTHS = ("train.steps", "train.tokens", "train.epochs")  # of a run; one of them is set
ALTERNATIVES = (  # groups of exclusive keys: typing one of them clears the others
    (LENGTHS, "say how long to train"),
    (("data.path", "data.mixture", "data.stream"), "say what to train on"),
)
NO_VALUE = "Missing value for flag "  # of absl, before the option


def flat(config: ConfigDict) -> dict[str, object]:
    """Return {"section.key": value} in alphabetical order, like a ConfigDict; a secret is HIDDEN."""
    values = {f"{section}.{key}": value for section, keys in config.items() for key, value in keys.items()}
    return values | {key: HIDDEN for key in base.keys_of(SECRET) if values.get(key)}


def check_no_secrets(typed: Mapping[str, str]) -> None:
    """Raise ConfigError if a secret key is typed, for commands that store or show what was typed."""
    for name in sorted(name for name in base.keys_of(SECRET) if typed.get(name)):
        raise ConfigError(
            f"--config.{name} is a secret, and would be stored with the command; set {VARIABLES[name]} in the "
            "environment"
        )


def from_flat(values: dict[str, object]) -> ConfigDict:
    """Return the configuration of configs/base.py with these values of dotted keys."""
    config = base.get_config()
    config.update_from_flattened_dict(values)
    return config


def parse_typed(overrides: dict[str, str], current: dict[str, object]) -> dict[str, object]:
    """Return {key: value} of typed text, and of the alternatives that a typed key clears.

    `current` has the values of all keys before. Raises ConfigError if a key is unknown, a value is empty, of the wrong
    type or a URL with a password, or two alternatives are typed.
    """
    typed = {key: parse_value(key, text, current) for key, text in overrides.items()}
    _refuse_empty(typed, current)
    refuse_passwords(typed)
    return typed | _put_out_of_force(typed, current)


def refuse_passwords(values: dict[str, object]) -> None:
    """Raise ConfigError if a key names data by a URL with a password."""
    for name in DATA_READ:
        if WITH_PASSWORD.search(values.get(name, "")):
            raise ConfigError(
                f"{name} has a URL with a password, which would be printed and stored; leave out USER:PASSWORD@, put "
                'them in ~/.netrc, and set FSSPEC_HTTPS=\'{"client_kwargs": {"trust_env": true}}\' in the environment'
            )


def parse_value(key: str, text: str, current: dict[str, object]):
    """Return `text` converted to the type of the key's default; ConfigError names the nearest key or the type."""
    if key not in current:
        near = did_you_mean([f"--config.{name}" for name in similar_keys(key, current)])
        raise ConfigError(f"--config.{shown(key)} is not a configuration key{near or '; configs/base.py has them all'}")
    try:
        return convert(text, type(current[key]))
    except ValueError as error:
        raise ConfigError(f"--config.{key}={shown(text)} {error} (now {current[key]})") from None


def convert(value: object, kind: type):
    """Return a text, a number, or a plain value of a file, as a value of a type of KINDS.

    Raises ValueError, which names the type.
    """
    try:
        is_number = isinstance(value, SupportsFloat) and not isinstance(value, Sized)  # also of numpy, but no array
        if not isinstance(value, str) and not is_number:
            raise ValueError
        text = str(value)
        return {"true": True, "1": True, "false": False, "0": False}[text.lower()] if kind is bool else kind(text)
    except (ValueError, KeyError):
        raise ValueError(f"is not {KINDS[kind]}") from None


def _refuse_empty(typed: dict, current: dict) -> None:
    """Raise ConfigError if data or train.init_from is typed as "" and was empty: a shell variable may be unset."""
    empty = [key for key in (*DATA_READ, "train.init_from") if typed.get(key) == current[key] == ""]
    if empty:
        raise ConfigError(f"--config.{empty[0]}= has no value; give it one, or leave it out")


def stray_argument(argument: str) -> str:
    """Return the message about an argument that is not an option, with a hint if it begins with a typographic dash."""
    if argument.startswith(DASHES):
        return f"{argument!r} begins with a dash, not with hyphens; type --{argument.lstrip(''.join(DASHES) + '-')}"
    return f"stray argument {argument!r}; options are written --name=value"


def value_of_flag(error: Exception) -> str:
    """Return the message of absl's error about the value of a flag, without the words of Python's conversions."""
    text = " ".join(str(error).split()).removeprefix("flag ")
    if text.startswith(NO_VALUE):
        return f"{text.removeprefix(NO_VALUE)} has no value; write {text.removeprefix(NO_VALUE)}=VALUE"
    for words, kind in CONVERSIONS.items():
        option, found, _ = text.rpartition(f": {words}")
        if found:
            return f"{shown(option)} is not {KINDS[kind]}"
    return text


def similar_keys(name: str, keys) -> list[str]:
    """Return the keys whose last part equals that of `name` or has it as initials (lr), else the most similar key.

    If some of them are in the section of `name`, only these are returned. A name from another program returns the key
    that it corresponds to.
    """
    section, _, last = name.rpartition(".")
    if last in NAMES_ELSEWHERE:
        return [NAMES_ELSEWHERE[last]]
    leaves = {key: key.split(".")[-1] for key in keys}
    alike = [key for key, leaf in leaves.items() if leaf == last]
    alike = alike or [key for key, leaf in leaves.items() if initials(leaf) == last]
    return [key for key in alike if key.startswith(section + ".")] or alike or similar(name, keys)


def _put_out_of_force(typed: dict, current: dict) -> dict:
    """Return the cleared values, 0 or '', of the alternatives to typed keys; ConfigError if two are typed."""
    emptied = {}
    for keys, both in ALTERNATIVES:
        given = [key for key in keys if typed.get(key)]
        if len(given) > 1:
            raise ConfigError(f"{' and '.join(given)} both {both}; give one")
        emptied |= {key: type(current[key])() for key in keys if given and key not in given}
    if "train.eval_every" in typed and not typed.get("evaluation.every_epochs"):  # which otherwise takes precedence
        emptied["evaluation.every_epochs"] = 0.0
    return emptied
