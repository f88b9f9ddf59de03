# SPDX-License-Identifier: Apache-2.0
"""Configuration keys by dotted names: read and set values, parse typed text, and suggest keys for unknown names."""

import difflib
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
    "total_steps": "train.steps", "max_seq_len": "train.sequence_length", "logging_steps": "train.log_every",
    "save_steps": "train.save_every", "checkpoint_every": "train.save_every", "eval_steps": "train.eval_every",
    "max_grad_norm": "optimizer.clip_norm", "grad_clip": "optimizer.clip_norm",
    "eval_interval": "train.eval_every", "log_interval": "train.log_every", "bf16": "model.dtype",
    "gradient_accumulation_steps": "train.gradient_accumulation", "tp": "mesh.model", "dp": "mesh.data",
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
MISSPELT = 0.85  # difflib's ratio of two spellings of one key
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
    """Return the keys that an unknown name may mean, those of its section if there are some; the most similar first.

    That is the key to which a name of another program corresponds; else the keys with the last part of `name`, or with
    it as initials (lr); else the key that has nearly this spelling; else keys with the same words; else the most
    similar key.
    """
    section, _, last = name.rpartition(".")
    for other in (last, name.replace(".", "_")):
        if other in NAMES_ELSEWHERE:
            return [NAMES_ELSEWHERE[other]]
    leaves = {key: key.rpartition(".")[2] for key in keys}
    in_section = [key for key in keys if key.startswith(section + ".")]
    alike = [key for key, leaf in leaves.items() if leaf == last]
    alike = alike or [key for key, leaf in leaves.items() if initials(leaf) == last]
    if section and not in_section:
        of_section = [key for key in alike if _is_beginning(section, key.partition(".")[0])]
        alike = of_section or _with_words_of(name, keys, least=2) or alike
    alike = alike or difflib.get_close_matches(name, leaves, 1, MISSPELT) or _with_words_of(last, in_section or keys)
    return ([key for key in alike if key in in_section] or alike or similar(name, keys))[:3]


def _with_words_of(name: str, keys, least: int = 1) -> list[str]:
    """Return the keys with the most words of `name`, at least so many; the closest first.

    Words may be cut (eval, evaluation).
    """
    words = set(_words(name))
    shared = {key: sum(any(_is_beginning(word, own) for own in _words(key)) for word in words) for key in keys}
    most = max([least, *shared.values()])
    return difflib.get_close_matches(name, [key for key, count in shared.items() if count == most], len(shared), 0.0)


def _words(name: str) -> list[str]:
    return name.replace("_", ".").split(".")


def _is_beginning(word: str, other: str) -> bool:
    """Return whether the words are equal, or one of at least 3 letters begins the other."""
    return word == other or (min(len(word), len(other)) > 2 and (word.startswith(other) or other.startswith(word)))


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
