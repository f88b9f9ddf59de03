# SPDX-License-Identifier: Apache-2.0
"""The declaration of experiments: a group answers one question, and a suite is a folder of groups with their bases."""

import dataclasses

from configs.errors import ConfigError, one_of

Changes = dict[str, bool | int | float | str]  # values of dotted keys
DIRECTIONS = ("maximize", "minimize")
FULL, MINI = "configurations", "mini"  # the two sizes of a group


@dataclasses.dataclass(frozen=True)
class Base:
    """What the configurations of a suite differ from.

    Attributes:
      recipe: a file with get_config(), relative to the workspace.
      changes: keys of the recipe that every configuration of the suite changes.
      size: the field of a group that has its configurations: FULL or MINI.
    """

    recipe: str
    changes: Changes = dataclasses.field(default_factory=dict)
    size: str = FULL


@dataclasses.dataclass(frozen=True)
class Suite:
    """The groups in a folder of configs/experiments/; its file suite.py declares it as SUITE.

    Attributes:
      bases: by name; the first is the default.
      metric: figure of an evaluation line in metrics.jsonl that answers the questions.
      direction: whether a larger metric is better: maximize, or minimize.
    """

    bases: dict[str, Base]
    metric: str
    direction: str

    def __post_init__(self):
        one_of("direction", self.direction, DIRECTIONS)


@dataclasses.dataclass(frozen=True)
class Group:
    """Configurations that answer one question; every other file of a suite's folder declares one as GROUP.

    Attributes:
      question: what the group asks, in one sentence.
      hypothesis: what is thought to happen, and why.
      expected: the result that would confirm it, with figures where some are known.
      configurations: {name: keys that differ from the base}.
      mini: the same for a size that a laptop finishes.
      counted: whether naming the suite includes the group; otherwise it runs only when it is named itself.
      axis: the size that the group varies, to which the report fits a line: a key with numbers, or "parameters" of the
        model; "" if there is none.
      analysis: which figures of the report answer the question, and what would mislead.
      troubleshooting: what goes wrong in this group, and what to do then.
    """

    question: str
    hypothesis: str
    expected: str
    configurations: dict[str, Changes]
    mini: dict[str, Changes] = dataclasses.field(default_factory=dict)
    counted: bool = True
    axis: str = ""
    analysis: str = ""
    troubleshooting: str = ""

    def __post_init__(self):
        for name in (*self.configurations, *self.mini):
            if any(part in ("", ".", "..") for part in str(name).split("/")):
                raise ConfigError(
                    f"the configuration {name!r} cannot be the name of a folder; leave out .. and empty parts"
                )

    def of_size(self, size: str) -> dict[str, Changes]:
        """Return the configurations of a size: FULL or MINI."""
        return {FULL: self.configurations, MINI: self.mini}[size]


def changes(config, other) -> Changes:
    """Return the keys of a recipe that differ from another one's, without those of the mesh."""
    return {
        f"{section}.{name}": value for section, keys in config.items() for name, value in keys.items()
        if section != "mesh" and value != other[section][name]
    }  # fmt: skip
