# SPDX-License-Identifier: Apache-2.0
"""Configuration keys that are typed as arguments of a command."""

import functools

from configs import base
from configs.key import SECRET
from settings.keys import HIDDEN


def split_overrides(argv: list[str]) -> tuple[dict[str, str], list[str]]:
    """Separate `--config.a.b=value` and `--config.a.b value` from other arguments; a key without a value is "true"."""
    pairs, rest = _split_pairs(argv)
    return dict(pairs), rest


def _split_pairs(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return what `split_overrides` does, with every value of a key that is typed several times."""
    pairs, rest, arguments = [], [], list(argv)
    while arguments:
        argument = arguments.pop(0)
        name, equals, value = argument.lstrip("-").partition("=")
        if not argument.startswith("-") or not name.startswith("config."):
            rest.append(argument)
        elif equals:
            pairs.append((name.removeprefix("config."), value))
        else:
            takes_next = bool(arguments) and not arguments[0].startswith("--")
            pairs.append((name.removeprefix("config."), arguments.pop(0) if takes_next else "true"))
    return pairs, rest


def without_secrets(argv: list[str]) -> list[str]:
    """Return arguments in which the values of secret keys are hidden."""
    pairs, _ = _split_pairs(argv)
    secrets = [value for key, value in pairs if value and key in base.keys_of(SECRET)]
    secrets.sort(key=len, reverse=True)  # one may be a part of another
    return [functools.reduce(lambda text, secret: text.replace(secret, HIDDEN), secrets, word) for word in argv]
