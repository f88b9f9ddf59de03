# SPDX-License-Identifier: Apache-2.0
"""The Pareto front: the points that no other point beats in one objective without losing in another."""

from collections.abc import Sequence

Point = tuple[float, ...]  # all objectives; less is better


def front(points: Sequence[Point]) -> list[int]:
    """Return the indices of the points that no other dominates, in the order of the first objective.

    Of equal points all are returned.
    """
    found = [index for index, point in enumerate(points) if not any(dominates(other, point) for other in points)]
    return sorted(found, key=lambda index: points[index])


def dominates(one: Point, other: Point) -> bool:
    """Return whether a point is nowhere worse than another, and somewhere better."""
    return one != other and all(mine <= its for mine, its in zip(one, other, strict=True))
