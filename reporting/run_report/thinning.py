# SPDX-License-Identifier: Apache-2.0
"""Curves with few points: minimum, mean and maximum of each bucket, so that no spike is lost."""

from typing import NamedTuple

import numpy as np

BUCKETS = 500  # of a curve; a plot is about 1,000 units wide


class Curve(NamedTuple):
    """Arrays of equal length; `low`, `mean` and `high` are those of the values around `x`."""

    x: np.ndarray
    low: np.ndarray
    mean: np.ndarray
    high: np.ndarray


def thin(x: np.ndarray, y: np.ndarray, buckets: int = BUCKETS) -> Curve:
    """Return a curve with at most `buckets` points; values that are not finite are left out.

    Args:
      x: in ascending order. The buckets have equal widths; empty ones have no point.
    """
    is_finite = np.isfinite(y)
    x, y = x[is_finite], y[is_finite]
    if len(x) <= buckets:
        return Curve(x, y, y, y)
    of_bucket = np.searchsorted(np.linspace(x[0], x[-1], buckets + 1)[1:-1], x, side="right")
    starts = np.flatnonzero(np.diff(of_bucket, prepend=-1))
    sizes = np.diff(starts, append=len(x))
    means = [np.add.reduceat(values, starts) / sizes for values in (x.astype(float), y)]
    return Curve(means[0], np.minimum.reduceat(y, starts), means[1], np.maximum.reduceat(y, starts))
