# SPDX-License-Identifier: Apache-2.0
"""Documents that are held in memory, and a mixture of one part."""

import io
from fractions import Fraction
from typing import NamedTuple

from input_pipeline.mixture import Mixture
from input_pipeline.reading.documents import Span, scan


class InMemory(NamedTuple):
    """A document made of these bytes."""

    name: str
    content: bytes

    def open(self):
        return io.BytesIO(self.content)


def spans_of(*contents: str | bytes, name: str = "memory.txt") -> list[Span]:
    """Return the spans of some documents."""
    encoded = [content if isinstance(content, bytes) else content.encode() for content in contents]
    return scan(InMemory(name, content) for content in encoded)


def mixture_of_one(windows) -> Mixture:
    """Return the mixture that takes every example from one window source."""
    return Mixture((windows,), ((0, (Fraction(1),)),))
