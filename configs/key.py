# SPDX-License-Identifier: Apache-2.0
"""The declaration of a configuration key: one place for its default, meaning, choices, range and scope."""

import dataclasses
import enum
import math

LARGEST_INT = 2**31 - 1  # the limit of integers that do not declare one


@enum.global_enum  # `from configs.key import RESUME`
class Scope(enum.Flag):
    """What a key belongs to. It decides where a key may be changed after a run was started, and what depends on it."""

    FIXED = 0  # describes the training: it may not change after a run was started, and the compiled step may read it
    RESUME = enum.auto()  # may be typed when a run is resumed
    READ = enum.auto()  # may be typed when a run is evaluated, sampled from, or used by another run
    MACHINE = enum.auto()  # belongs to the machine, not to the run: it is never taken from a run's folder
    PER_HOST = enum.auto()  # may differ between the hosts of a run
    UNCOMPILED = enum.auto()  # no compiled training step reads it
    WEIGHTS = enum.auto()  # describes the weights: another run takes it over with them (`--config=FOLDER_OF_A_RUN`)
    EXECUTION = enum.auto()  # how the weights are executed, and not the function that they stand for
    SECRET = enum.auto()  # its value is neither printed nor stored
    TRANSFER = enum.auto()  # may differ from the run of `train.init_from`, as keys of EXECUTION may


@dataclasses.dataclass(frozen=True)
class Key:
    """One configuration key.

    Attributes:
      default: its value in the base configuration; every value has the type of the default.
      meaning: what it says, with its unit, and what a special value such as 0 means.
      choices: all values that it may have; empty: any value of its type that is in range.
      defined_in: the value names a module in this folder, or a function (config, ...) in this file; "": it does not.
      least, above, below, most: the range of a number. `above` and `below` are exclusive. A `most` without a natural
        limit is far above realistic values; products of these still fit into 64 bits, and loops over them end soon.
      also: a number outside the range that has a special meaning.
      scope: what it belongs to, in addition to the scope of its section.
    """

    default: bool | int | float | str
    meaning: str
    _: dataclasses.KW_ONLY
    choices: tuple = ()
    defined_in: str = ""
    least: float = 0
    above: float | None = None
    below: float = math.inf
    most: float | None = None
    also: float | None = None
    scope: Scope = Scope.FIXED

    @property
    def largest(self) -> float:
        if self.most is not None:
            return self.most
        return LARGEST_INT if isinstance(self.default, int) else math.inf

    def contains(self, value: float) -> bool:
        """Return whether a number is in the range; infinity and nan never are."""
        is_above = value >= self.least if self.above is None else value > self.above
        return value == self.also or (is_above and value < self.below and value <= self.largest)

    def rule(self) -> str:
        """Return the range in words, without its largest number, as in "0 or greater and less than 1"."""
        lower = f"{self.least:g} or greater" if self.above is None else f"greater than {self.above:g}"
        upper = "" if self.below == math.inf else f" and less than {self.below:g}"
        return lower + upper + ("" if self.also is None else f", or {self.also:g}")


class Section:
    """A section of the configuration, in which `section.name = Key(...)` declares a key.

    Args:
      keys: the table to which declared keys are added, by their dotted names.
      name: of the section.
      scope: of all its keys.
    """

    def __init__(self, keys: dict[str, Key], name: str, scope: Scope = Scope.FIXED):
        vars(self).update(_keys=keys, _name=name, _scope=scope)

    def __setattr__(self, name: str, key: Key):
        full_name = f"{self._name}.{name}"
        if full_name in self._keys:
            raise ValueError(f"{full_name} is declared twice; remove one declaration")
        self._keys[full_name] = dataclasses.replace(key, scope=key.scope | self._scope)
