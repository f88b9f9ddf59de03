# SPDX-License-Identifier: Apache-2.0
"""What the terminal behind a stream can show."""

import os
from typing import TextIO

DUMB = ("dumb", "unknown")  # values of TERM, as of a shell in Emacs; such a terminal cannot draw a line again


def is_live(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that can draw a line again, as a bar of progress does."""
    return stream.isatty() and os.environ.get("TERM", "").lower() not in DUMB
