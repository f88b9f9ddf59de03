# SPDX-License-Identifier: Apache-2.0
"""The PC algorithm: a causal graph from observations, up to what observations can tell.

Source: Spirtes, Glymour and Scheines, Causation, Prediction, and Search, 2000, section 5.4.2. The edges of a level are
removed together, so that which edges are left does not depend on the order of the variables (Colombo and Maathuis,
JMLR 15, 2014, "PC-stable"). Directions may depend on it, where tests contradict each other.
A graph is bool [D, D]: entry (i, j) without (j, i) is i -> j, and both are an edge without direction. Letters: D
variables.
"""

import itertools
import math

import numpy as np
from scipy import special

ROUNDING = 1e-12  # a variance of a residual below this counts as 0; it is 1 before the regression


def pc(data: np.ndarray, alpha: float = 0.01) -> np.ndarray:
    """Return the graph of normally distributed variables with linear effects.

    Args:
      data: float [n, D], n > D + 1; no column may be constant.
      alpha: two variables are called dependent if the Fisher z test has a p-value below this.

    Raises:
      ValueError: there are too few rows for the test of two variables given all others, a column is constant, or a
        value is not finite.
    """
    n, D = data.shape
    if n <= D + 1:
        raise ValueError(f"pc: {n} rows are too few for {D} variables; give more than {D + 1}")
    if not np.isfinite(data).all():
        raise ValueError("pc: the data have values that are not finite; leave out their rows")
    if (constant := np.flatnonzero((data == data[0]).all(axis=0))).size:
        raise ValueError(f"pc: column {constant[0]} is constant, so it correlates with nothing; leave it out")
    adjacent_DD, separators = skeleton(np.atleast_2d(np.corrcoef(data, rowvar=False)), n, alpha)
    return oriented(adjacent_DD, separators)


def fisher_z(correlation_DD: np.ndarray, n: int, first: int, second: int, given: tuple[int, ...]) -> float:
    """Return the p-value of no partial correlation, under which atanh(r) sqrt(n - |given| - 3) is standard normal.

    The partial correlation r is that of the residuals of regressions on `given`, so variables may be sums of each
    other. A variable that `given` determines has no residual, and counts as independent. Fisher, Metron 3, 1924.
    """
    pair, others = [first, second], list(given)
    of_both = correlation_DD[np.ix_(pair, others)]
    inverse = np.linalg.pinv(correlation_DD[np.ix_(others, others)])
    residual = correlation_DD[np.ix_(pair, pair)] - of_both @ inverse @ of_both.T
    if min(residual[0, 0], residual[1, 1]) < ROUNDING:
        return 1.0
    partial = residual[0, 1] / math.sqrt(residual[0, 0] * residual[1, 1])
    z = math.atanh(min(max(partial, -1 + 1e-12), 1 - 1e-12)) * math.sqrt(n - len(given) - 3)
    return 2 * float(special.ndtr(-abs(z)))


def skeleton(
    correlation_DD: np.ndarray, n: int, alpha: float
) -> tuple[np.ndarray, dict[frozenset[int], tuple[int, ...]]]:  # fmt: skip
    """Return which variables are adjacent, symmetric bool [D, D], and {other pair: what makes it independent}."""
    D = len(correlation_DD)
    adjacent_DD, separators = ~np.eye(D, dtype=bool), {}
    for size in range(D - 1):
        before_DD = adjacent_DD.copy()
        for first, second in itertools.permutations(range(D), 2):
            others = [k for k in np.flatnonzero(before_DD[first]).tolist() if k != second]
            if not adjacent_DD[first, second]:
                continue
            sets = itertools.combinations(others, size)
            given = next((one for one in sets if fisher_z(correlation_DD, n, first, second, one) > alpha), None)
            if given is not None:
                adjacent_DD[first, second] = adjacent_DD[second, first] = False
                separators[frozenset((first, second))] = given
    return adjacent_DD, separators


def oriented(adjacent_DD: np.ndarray, separators: dict[frozenset[int], tuple[int, ...]]) -> np.ndarray:
    """Return the skeleton with the directions that follow from it and from the separating sets."""
    graph_DD = adjacent_DD.copy()
    for middle in range(len(graph_DD)):
        for left, right in itertools.combinations(np.flatnonzero(adjacent_DD[middle]).tolist(), 2):
            unshielded = not adjacent_DD[left, right]
            is_collider = unshielded and middle not in separators[frozenset((left, right))]
            if is_collider and graph_DD[left, middle] and graph_DD[right, middle]:  # else an earlier one contradicts it
                graph_DD[middle, left] = graph_DD[middle, right] = False
    return _meek(graph_DD)


def _meek(graph_DD: np.ndarray) -> np.ndarray:
    """Direct further edges until no rule applies (Meek, UAI 1995, rules 1 to 3)."""
    graph_DD, changed = graph_DD.copy(), True
    while changed:
        changed = False
        directed_DD, adjacent_DD = graph_DD & ~graph_DD.T, graph_DD | graph_DD.T
        for a, b in np.argwhere(graph_DD & graph_DD.T).tolist():
            apart = directed_DD[:, a] & ~adjacent_DD[:, b]  # c -> a - b, c and b not adjacent
            chain = directed_DD[a] & directed_DD[:, b]  # a -> c -> b
            both = np.flatnonzero(graph_DD[a] & graph_DD[:, a] & directed_DD[:, b])  # a - c -> b
            kites = any(not adjacent_DD[c, d] for c, d in itertools.combinations(both.tolist(), 2))
            if apart[np.arange(len(apart)) != b].any() or chain.any() or kites:
                graph_DD[b, a], changed = False, True
                break
    return graph_DD
