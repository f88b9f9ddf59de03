# SPDX-License-Identifier: Apache-2.0
"""Structural causal models: samples, interventions and counterfactuals.

Each variable is a function of its parents and of noise of its own (Pearl, Causality, 2009, definition 7.1.1). Values of
a variable are an array [n], one entry for each unit.
"""

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

Values = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """How a variable comes about."""

    parents: tuple[str, ...]  # names of the variables that it depends on directly
    function: Callable[..., np.ndarray]  # (values of the parents in this order, noise) -> values
    noise: Callable[[np.random.Generator, int], np.ndarray]  # (generator, n) -> noise of n units
    invert: Callable[..., np.ndarray] | None = None  # (parents, value) -> noise; None: not recoverable


def linear(weights: Mapping[str, float], deviation: float = 1.0, offset: float = 0.0) -> Mechanism:
    """Return the mechanism offset + sum of weight * parent + normal noise of this standard deviation."""
    factors = list(weights.values())

    def mean(parents) -> np.ndarray:
        return offset + sum(factor * parent for factor, parent in zip(factors, parents, strict=True))

    return Mechanism(
        tuple(weights),
        lambda *values: mean(values[:-1]) + values[-1],
        lambda rng, n: deviation * rng.standard_normal(n),
        lambda *values: values[-1] - mean(values[:-1]),
    )


def binary(probability: Callable[..., np.ndarray], *parents: str) -> Mechanism:
    """Return the mechanism of a variable that is 1 with a probability, a function of its parents, and else 0."""
    return Mechanism(
        parents,
        lambda *values: (values[-1] < probability(*values[:-1])).astype(np.float64),
        lambda rng, n: rng.random(n),
    )


@dataclasses.dataclass(frozen=True)
class StructuralModel:
    """A structural causal model: a mechanism for each variable, parents before their children.

    Raises ValueError for a parent that is unknown, or that comes after its child.
    """

    mechanisms: dict[str, Mechanism]

    def __post_init__(self):
        earlier = set()
        for name, mechanism in self.mechanisms.items():
            if unknown := [parent for parent in mechanism.parents if parent not in earlier]:
                raise ValueError(f"StructuralModel: {name} needs {unknown[0]}, which is not a variable before it")
            earlier.add(name)

    def graph(self):
        """Return the networkx.DiGraph with an edge from each parent to its child."""
        import networkx

        edges = [(parent, name) for name, of_name in self.mechanisms.items() for parent in of_name.parents]
        graph = networkx.DiGraph(edges)
        graph.add_nodes_from(self.mechanisms)
        return graph

    def sample(self, n: int, rng: np.random.Generator, do: Mapping[str, float] | None = None) -> Values:
        """Return the variables of n units; those in `do` are set, and their mechanisms not used (definition 7.1.2)."""
        do = do or {}
        self._check(do)
        noises = {name: of_name.noise(rng, n) for name, of_name in self.mechanisms.items()}  # the same for any `do`
        values: Values = {}
        for name, mechanism in self.mechanisms.items():
            if name in do:
                values[name] = np.full(noises[name].shape, do[name], np.float64)
            else:
                values[name] = mechanism.function(*(values[parent] for parent in mechanism.parents), noises[name])
        return values

    def counterfactual(self, observed: Values, do: Mapping[str, float]) -> Values:
        """Return what the observed units would have been with some variables set (theorem 7.1.7).

        The noise of each unit is recovered from what was observed (abduction), the mechanisms of the set variables are
        replaced (action), and all variables that depend on them are computed again (prediction). The others are the
        observed arrays themselves. Raises ValueError if a noise that this needs cannot be recovered.
        """
        self._check(do)
        values: Values = {}
        changed = set(do)
        for name, mechanism in self.mechanisms.items():
            if name in do:
                values[name] = np.full(observed[name].shape, do[name], np.float64)
            elif not changed & set(mechanism.parents):
                values[name] = observed[name]
            elif mechanism.invert is None:
                raise ValueError(f"counterfactual: {name} has no `invert`, so its noise is unknown; give it one")
            else:
                noise = mechanism.invert(*(observed[parent] for parent in mechanism.parents), observed[name])
                values[name] = mechanism.function(*(values[parent] for parent in mechanism.parents), noise)
                changed.add(name)
        return values

    def _check(self, do: Mapping[str, float]) -> None:
        if unknown := [name for name in do if name not in self.mechanisms]:
            raise ValueError(f"do: {unknown[0]} is not a variable; the variables are {', '.join(self.mechanisms)}")
