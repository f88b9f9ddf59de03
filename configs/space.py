# SPDX-License-Identifier: Apache-2.0
"""The declaration of a search space: the values that a search may give to configuration keys.

A file of configs/spaces/ declares SPACE, a dictionary from a key to a range or to a choice.
"""

import dataclasses
import math

from configs.errors import ConfigError

Value = bool | int | float | str


@dataclasses.dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`.

    Attributes:
      log: whether equal ratios are equally likely, not equal differences.
      step: distance between values; 0: any value, which only floats may have. A logarithmic range has no step.
    """

    low: float
    high: float
    log: bool = False
    step: float = 0

    def __post_init__(self):
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low < self.high):
            raise ConfigError(f"a range from {self.low} to {self.high} is empty; the first number must be smaller")
        if self.log and (self.low <= 0 or self.step):
            raise ConfigError("a logarithmic range begins above 0 and has no step")
        if self.step < 0:
            raise ConfigError(f"the step of a range is {self.step}; it must be at least 0")
        if self.is_whole and self.step % 1:
            raise ConfigError(f"the step of a range of whole numbers is {self.step}; give {self.low}.0 for any number")

    @property
    def is_whole(self) -> bool:
        """Whether all values are integers."""
        return isinstance(self.low, int) and isinstance(self.high, int)


@dataclasses.dataclass(frozen=True)
class Choice:
    """One of several values of a key, or one of several named sets of keys that only make sense together.

    Attributes:
      values: a tuple of values, or {name: {key: value}}. In the second case the name of the choice is not a key.
    """

    values: tuple[Value, ...] | dict[str, dict[str, Value]]

    def __post_init__(self):
        if len(self.values) < 2 or len(set(self.values)) < len(self.values):
            raise ConfigError(f"a choice needs at least two different values, not {self.values}")


Space = dict[str, Range | Choice]
