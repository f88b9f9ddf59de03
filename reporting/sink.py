# SPDX-License-Identifier: Apache-2.0
"""The interface of what receives a run's figures besides metrics.jsonl; each is a file of reporting/sinks/.

Such a file has `check(config)`, which raises ConfigError if the configuration asks for a sink that cannot be made, and
`make(config, workdir, process)`, which returns the sink of a process, or None if it has none.
"""

import contextlib
import functools
import pathlib
from collections.abc import Callable, Mapping

from configs.errors import made_by, modules_of

FOLDER = "reporting.sinks"
INTERRUPTED = 75  # exit status
# Called with the last line and the exit status of a process that ends while its `with` blocks are still open, as at a
# hang or when another process was lost. They are called in any thread, and return within 2 seconds.
LAST_WORDS: list[Callable[[str, int], None]] = []


class Sink:
    """Receives the lines of metrics.jsonl.

    An exception of a method ends the run, so a sink logs its failures of the network and raises none.
    """

    def write(self, kind: str, figures: Mapping[str, object], step: int) -> None:
        """Take the figures of a line; one call at a time, from any thread. A figure that is not finite is None."""

    def close(self, error: BaseException | None) -> None:
        """Close the sink; `error` is what ends the run, None if the run has finished."""


def is_interruption(error: BaseException | None) -> bool:
    """Return whether what ends a run is an interruption, after which the same command continues it."""
    match error:
        case KeyboardInterrupt():
            return True
        case BaseException(exit_status=status):
            return status == INTERRUPTED
    return False


def numbers(kind: str, figures: Mapping[str, object]) -> dict[str, float]:
    """Return {KIND/NAME: figure} of the figures of a line that are numbers."""
    return {f"{kind}/{name}": value for name, value in figures.items() if isinstance(value, int | float)}


def check(config) -> None:
    """Raise ConfigError if the configuration asks for a sink that cannot be made."""
    for module in modules_of(FOLDER):
        module.check(config)


def sinks_of(config, workdir: pathlib.Path, process: int) -> list[Sink]:
    """Return the sinks of a process that the configuration asks for; if one cannot be made, the others are closed."""
    sinks: list[Sink] = []
    with contextlib.ExitStack() as unless_all_are_made:
        for module in modules_of(FOLDER):
            for sink in made_by([module], Sink, config, workdir, process):
                unless_all_are_made.push(functools.partial(_close, sink))
                sinks.append(sink)
        unless_all_are_made.pop_all()
    return sinks


def _close(sink: Sink, kind: type | None, error: BaseException | None, trace: object) -> None:
    sink.close(error)
