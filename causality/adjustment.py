# SPDX-License-Identifier: Apache-2.0
"""Effects from observations: which variables to adjust for, and the adjusted effect.

Graphs are networkx.DiGraph without cycles; networkx is in the extra `causality`.
"""

from collections.abc import Collection

import numpy as np


def d_separated(graph, first: str, second: str, given: Collection[str] = ()) -> bool:
    """Return whether the graph implies that two variables are independent given others (Pearl, 2009, 1.2.3)."""
    import networkx

    return networkx.is_d_separator(graph, {first}, {second}, set(given))


def is_backdoor_set(graph, treatment: str, outcome: str, adjust: Collection[str]) -> bool:
    """Return whether adjusting for these variables gives the effect of a treatment (Pearl, 2009, definition 3.3.1).

    None of them may be a descendant of the treatment, and they must block every path that enters the treatment.
    """
    import networkx

    if {treatment, outcome} & set(adjust) or networkx.descendants(graph, treatment) & set(adjust):
        return False
    return d_separated(_without_effects(graph, treatment), treatment, outcome, adjust)


def backdoor_set(graph, treatment: str, outcome: str) -> set[str] | None:
    """Return a set that satisfies `is_backdoor_set` and from which nothing can be left out; None if there is none."""
    import networkx

    allowed = set(graph) - networkx.descendants(graph, treatment) - {treatment, outcome}
    trimmed = _without_effects(graph, treatment)
    return networkx.find_minimal_d_separator(trimmed, {treatment}, {outcome}, restricted=allowed)


def _without_effects(graph, treatment: str):
    trimmed = graph.copy()
    trimmed.remove_edges_from(list(graph.out_edges(treatment)))
    return trimmed


def _is_treated(values: dict[str, np.ndarray], treatment: str) -> np.ndarray:
    if not np.isin(values[treatment], (0, 1)).all():
        raise ValueError(f"{treatment} is a treatment, so each value must be 0 or 1")
    return values[treatment] == 1


def naive_effect(values: dict[str, np.ndarray], treatment: str, outcome: str) -> float:
    """Return E[y | x = 1] - E[y | x = 0], which is not a causal effect if something causes both.

    Raises ValueError if the treatment is neither 0 nor 1, or is the same for all.
    """
    treated = _is_treated(values, treatment)
    if treated.all() or not treated.any():
        raise ValueError(f"naive_effect: {treatment} has one value only; both 0 and 1 must occur")
    return float(values[outcome][treated].mean() - values[outcome][~treated].mean())


def adjusted_effect(values: dict[str, np.ndarray], treatment: str, outcome: str, adjust: Collection[str]) -> float:
    """Return sum over z of P(z) (E[y | x = 1, z] - E[y | x = 0, z]) (Pearl, 2009, theorem 3.3.2).

    Args:
      values: {variable: [n]}; the treatment is 0 or 1, and the variables to adjust for have few values.

    Raises:
      ValueError: a stratum has only treated or only untreated units, or a treatment is neither 0 nor 1.
    """
    is_treated = _is_treated(values, treatment)
    strata = np.stack([np.zeros_like(values[treatment]), *(values[name] for name in sorted(adjust))], axis=1)
    rows, inverse = np.unique(strata, axis=0, return_inverse=True)
    effect = 0.0
    for number, row in enumerate(rows):
        here = inverse == number
        treated, untreated = here & is_treated, here & ~is_treated
        if not treated.any() or not untreated.any():
            where = ", ".join(f"{name}={value}" for name, value in zip(sorted(adjust), row[1:], strict=True))
            where, advice = (f"where {where}, ", "merge strata") if where else ("", "both 0 and 1 must occur")
            raise ValueError(f"adjusted_effect: {where}{treatment} has one value only; {advice}")
        difference = values[outcome][treated].mean() - values[outcome][untreated].mean()
        effect += here.mean() * float(difference)
    return effect


def linear_effect(values: dict[str, np.ndarray], treatment: str, outcome: str, adjust: Collection[str]) -> float:
    """Return the treatment's coefficient in the least-squares fit of the outcome by it and the variables of `adjust`.

    In a linear model it is the total effect, if the set satisfies `is_backdoor_set`. Raises ValueError if those
    variables determine the treatment, so that its coefficient may be anything.
    """
    columns = [values[treatment], *(values[name] for name in sorted(adjust)), np.ones_like(values[treatment])]
    columns = np.stack(columns, axis=1).astype(float)
    others = columns[:, 1:]
    rest = columns[:, 0] - others @ np.linalg.lstsq(others, columns[:, 0], rcond=None)[0]
    if np.linalg.norm(rest) <= 1e-10 * np.linalg.norm(columns[:, 0]):
        constant = "it has one value only" if np.ptp(columns[:, 0]) == 0 else "leave some of these out"
        given = ", ".join(sorted(adjust)) or "nothing"
        raise ValueError(f"linear_effect: {treatment} follows from what is adjusted for, {given}; {constant}")
    return float(np.linalg.lstsq(columns, values[outcome], rcond=None)[0][0])
