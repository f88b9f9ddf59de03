# SPDX-License-Identifier: Apache-2.0
"""The error of a configuration, and the words of its message; errors that all processes of a run raise."""

import difflib
import importlib
import pkgutil
import re
import unicodedata

from files.paths import shortened

DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}  # which reorder what follows
OF_KERNEL = re.compile(r"memory space [sv]mem|ScopedVmemOom|shared memory size limit", re.IGNORECASE)  # as XLA says it


class ConfigError(ValueError):
    """A configuration that cannot run: one line with the key, the value, the rule and what would work."""

    exit_status = 2


class OfAllProcesses(Exception):
    """An error that all processes of a run raise, so that each ends by itself once it has done what it does then."""


def is_too_large(message: str) -> bool:
    """Return whether XLA refuses a program for a device's memory, and not for the small one of a kernel.

    Smaller batches help in the first case only.
    """
    return "RESOURCE_EXHAUSTED" in message and not OF_KERNEL.search(message)


def shown(value) -> str:
    """Return a value as a message has it: in one line, its end left out where it is long."""
    text = str(value)
    return shortened(text if text.isprintable() else ascii(text)[1:-1])


def visible(text: str) -> str:
    """Return a text in which characters that a terminal would act on are replaced, such as escape sequences."""
    return "".join("\ufffd" if _is_obeyed(character) else character for character in text)


def _is_obeyed(character: str) -> bool:
    is_control = unicodedata.category(character) in ("Cc", "Cs", "Zl", "Zp") and character not in "\t\n"
    return is_control or unicodedata.bidirectional(character) in DIRECTIONS


def similar(name: str, candidates) -> list[str]:
    """Return [candidate] for the one with the initials `name` (wsd), else for the most similar one; [] if none is."""
    candidates = list(map(str, candidates))
    by_initials = [candidate for candidate in candidates if initials(candidate) == name]
    return by_initials[:1] or difflib.get_close_matches(name, candidates, n=1)


def initials(name: str) -> str:
    return "".join(word[:1] for word in name.split("_"))


def did_you_mean(names: list[str]) -> str:
    """Return the end of a message about an unknown name; "" without suggestions."""
    return f"; did you mean {' or '.join(names)}?" if names else ""


def check_text(name: str, text: str) -> None:
    """Raise ConfigError if the text of a flag or key is not UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ConfigError(f"{name}={text!r} is not UTF-8") from None


def check_returned(name: str, found: object, is_right: bool, wanted: str) -> None:
    """Raise TypeError, which names it, if an addition returned what is not `wanted`."""
    if not is_right:
        raise TypeError(f"{name} returned {found!r:.60}; it must return {wanted}")


def modules_of(package: str) -> list:
    """Return the modules in a folder, in the order of their names."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__, f"{package}.")
    return [importlib.import_module(module.name) for module in found]


def made_by(modules, kind: type, *arguments) -> list:
    """Return what `make(*arguments)` of each module makes, if anything; TypeError if it is not of a kind."""
    found = [(module.__name__, module.make(*arguments)) for module in modules]
    for name, made in found:
        check_returned(f"make of {name}", made, not made or isinstance(made, kind), f"None or a {kind.__name__}")
    return [made for _, made in found if made]


def one_of(key: str, value: str, choices, more: str = "") -> None:
    """Raise ConfigError if the value of a key is not one of the choices; the line ends with `more`."""
    if value not in choices:
        near = did_you_mean(similar(shown(value), choices))
        raise ConfigError(f"{key}={shown(value)} is unknown{near} (all: {', '.join(map(str, choices))}){more}")
