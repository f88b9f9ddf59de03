# SPDX-License-Identifier: Apache-2.0
"""Which steps are traced: those of --profile=START:STOP, or those that a file in the run's folder asks for."""

import contextlib
import pathlib
import re
from typing import NamedTuple

from configs.errors import ConfigError, shown

REQUEST = "profile.request"  # a file in the run's folder with a number of steps
USUAL_STEPS, MOST_STEPS = 10, 1000  # the trace of a step of a large model has some megabytes
AHEAD = 2  # steps between a request and the first traced step


class Window(NamedTuple):
    """Steps that are traced, from the first to the last."""

    start: int
    stop: int


def parse(text: str) -> Window:
    """Return the window of --profile; ConfigError if the text is not a window."""
    found = re.fullmatch(r"(\d{1,12}):(\d{1,12})", text)
    if not found:
        raise ConfigError(
            f"--profile={shown(text)} is not START:STOP; write the first and the last step, as in 100:109"
        )
    window = Window(*map(int, found.groups()))
    if not 1 <= window.start <= window.stop:
        raise ConfigError(f"--profile={text}: steps begin with 1, and STOP is not before START")
    if (count := window.stop - window.start + 1) > MOST_STEPS:
        raise ConfigError(f"--profile={text} has {count:,} steps; a trace has at most {MOST_STEPS:,}")
    return window


def requested(workdir: pathlib.Path, step: int) -> Window | None:
    """Return the window that the file asks for, and remove the file; None if there is none.

    The file has a number of steps; at most MOST_STEPS are traced. Any other content means USUAL_STEPS.
    """
    path = workdir / REQUEST
    try:
        text = path.read_text(errors="replace").strip()
    except OSError:
        return None
    with contextlib.suppress(OSError):
        path.unlink()
    count = min(int(text), MOST_STEPS) if re.fullmatch(r"0*[1-9]\d{0,8}", text) else USUAL_STEPS
    return Window(step + AHEAD, step + AHEAD + count - 1)
