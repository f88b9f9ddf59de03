# SPDX-License-Identifier: Apache-2.0
"""The methods of a search: which point of a space is tried next, from the trials so far.

Evolution and local search are samplers of Optuna. They keep no state but what the storage has, so a search continues
after any interruption, with any number of workers.
"""

import math
from collections.abc import Callable

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from studies.report import pareto

Space = dict[str, BaseDistribution]
POPULATION, SAMPLE = 10, 8  # of evolution: the last trials that may be parents, and how many compete to be one
FIRST = 5  # random trials before local search
STEP = 0.2  # standard deviation of a mutated number, as a fraction of its range


class FromHistory(optuna.samplers.RandomSampler):
    """A sampler that derives a point from one of the earlier trials, or draws one at random.

    Subclasses define `parent`.
    """

    def __init__(self, space: Space, seed: int):
        super().__init__(seed)
        self.space, self._seed = space, seed

    def parent(self, study: optuna.Study, trials: list[FrozenTrial], rng: np.random.Generator) -> FrozenTrial | None:
        """Return the trial to mutate; None: draw a random point.

        `trials` are the complete ones, in the order of their ends.
        """
        raise NotImplementedError

    def infer_relative_search_space(self, study, trial) -> Space:
        """Return the whole space."""
        return self.space

    def sample_relative(self, study, trial, search_space) -> dict:
        """Return the parameters of the parent with one of them changed.

        A point that was tried before is drawn again. If all draws near the parent were tried, random points follow.
        """
        rng = np.random.default_rng((self._seed, trial.number))
        ended = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        ended = [one for one in ended if one.params.keys() == self.space.keys()]
        chosen = self.parent(study, sorted(ended, key=lambda one: one.datetime_complete), rng)
        known = [one.params for one in study.get_trials(deepcopy=False)]
        draws = 2 * len(self.space)
        for number in range(2 * draws):
            is_near = chosen is not None and number < draws
            point = mutated(chosen.params, self.space, rng) if is_near else drawn(self.space, rng)
            if point not in known:
                break
        return point


class Evolution(FromHistory):
    """Regularized evolution: the oldest trial leaves the population, not the worst (arXiv:1802.01548, algorithm 1).

    The parent is the best of SAMPLE of the last POPULATION complete trials; one of its parameters changes.
    """

    def parent(self, study, trials, rng):
        """Return the winner of a tournament; None while the first population is drawn."""
        if len(trials) < POPULATION:
            return None
        places = rng.choice(POPULATION, SAMPLE, replace=False)
        return best(study, [trials[-POPULATION:][place] for place in places], rng)


class LocalSearch(FromHistory):
    """Local search: the best trial so far with one parameter changed (arXiv:2005.02960)."""

    def parent(self, study, trials, rng):
        """Return the best trial; None for the first ones."""
        return best(study, trials, rng) if len(trials) >= FIRST else None


def best(study: optuna.Study, trials: list[FrozenTrial], rng: np.random.Generator) -> FrozenTrial:
    """Return the best trial; with several objectives a random one of those that no other dominates."""
    signs = [-1 if direction == StudyDirection.MAXIMIZE else 1 for direction in study.directions]
    points = [tuple(sign * value for sign, value in zip(signs, one.values, strict=True)) for one in trials]
    front = pareto.front(points)
    return trials[front[0] if len(signs) == 1 else front[rng.integers(len(front))]]


def drawn(space: Space, rng: np.random.Generator) -> dict:
    """Return a random point."""
    return {name: _value(distribution, rng.random()) for name, distribution in space.items()}


def mutated(point: dict, space: Space, rng: np.random.Generator) -> dict:
    """Return a point with another value of one parameter: any other choice, or a number nearby."""
    changing = [name for name, distribution in space.items() if not distribution.single()]
    name = changing[rng.integers(len(changing))]
    distribution, old = space[name], point[name]
    if isinstance(distribution, CategoricalDistribution):
        others = [choice for choice in distribution.choices if choice != old]
        return point | {name: others[rng.integers(len(others))]}
    place = _place(distribution, old)
    while (new := _value(distribution, np.clip(rng.normal(place, STEP), 0, 1))) == old:
        pass
    return point | {name: new}


def nearest(distribution: BaseDistribution, value: float) -> int | float:
    """Return the number of a distribution that is nearest to a value."""
    inside = min(max(value, distribution.low), distribution.high)
    return _value(distribution, min(_place(distribution, inside), 1.0))


def scaled(distribution: BaseDistribution, value: float, factor: float) -> int | float:
    """Return a number of a distribution times a factor, or the next one if a step is too large for that."""
    new = nearest(distribution, value * factor)
    return new if new != value else nearest(distribution, value + math.copysign(distribution.step or 0, factor - 1))


def _value(distribution: BaseDistribution, place: float):
    """Return the value at a place in [0, 1] of a distribution."""
    if isinstance(distribution, CategoricalDistribution):
        count = len(distribution.choices)
        return distribution.choices[min(int(place * count), count - 1)]
    low, high = distribution.low, distribution.high
    if distribution.log:
        first, last = _logarithms(distribution)
        value = float(np.exp(first + place * (last - first)))
    elif distribution.step:
        value = low + distribution.step * min(int(place * _count(distribution)), _count(distribution) - 1)
    else:
        value = low + place * (high - low)
    value = min(max(value, low), high)  # rounding may have left the range
    return round(value) if isinstance(distribution, optuna.distributions.IntDistribution) else float(value)


def _place(distribution: BaseDistribution, value: float) -> float:
    """Return where in [0, 1] a number is."""
    low, high = distribution.low, distribution.high
    if distribution.log:
        first, last = _logarithms(distribution)
        return float((np.log(value) - first) / (last - first))
    if distribution.step:
        return ((value - low) / distribution.step + 0.5) / _count(distribution)
    return (value - low) / (high - low)


def _logarithms(distribution: BaseDistribution) -> tuple[float, float]:
    """Return the logarithms between which a logarithmic range lies, with what rounds to its first and last number."""
    half = 0.5 if isinstance(distribution, optuna.distributions.IntDistribution) else 0.0
    return math.log(distribution.low - half), math.log(distribution.high + half)


def _count(distribution: BaseDistribution) -> int:
    return round((distribution.high - distribution.low) / distribution.step) + 1


METHODS: dict[str, Callable[[Space, int], optuna.samplers.BaseSampler]] = {
    "random": lambda space, seed: optuna.samplers.RandomSampler(seed),
    "tpe": lambda space, seed: optuna.samplers.TPESampler(seed=seed, multivariate=True, constant_liar=True),
    "cmaes": lambda space, seed: optuna.samplers.CmaEsSampler(seed=seed, warn_independent_sampling=False),
    "evolution": Evolution,
    "local_search": LocalSearch,
}
RUNGS = 9, 3  # a pruner looks after a ninth and a third of the steps


class _SuccessiveHalving(optuna.pruners.SuccessiveHalvingPruner):
    """ASHA with two rungs. Optuna's pruner goes on to the end, where 9 * (steps // 9) would be a third one."""

    def __init__(self, first: int):
        super().__init__(first, reduction_factor=RUNGS[1])
        self.end = first * RUNGS[0]

    def prune(self, study, trial):
        """Return whether others were better at the rung that the trial has just reached."""
        return trial.last_step < self.end and super().prune(study, trial)


# Which trials end early, given the steps of a whole one. ASHA: arXiv:1810.05934.
PRUNERS: dict[str, Callable[[int], optuna.pruners.BasePruner]] = {
    "none": lambda steps: optuna.pruners.NopPruner(),
    "median": lambda steps: optuna.pruners.MedianPruner(n_startup_trials=4, n_warmup_steps=steps // RUNGS[0]),
    "asha": lambda steps: _SuccessiveHalving(max(1, steps // RUNGS[0])),
}
