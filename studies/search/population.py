# SPDX-License-Identifier: Apache-2.0
"""Population-based training: members train in generations, and the worst continue with the weights of the best.

Jaderberg et al., arXiv:1711.09846, with truncation selection: after a generation, each member of the worst quarter
takes the weights of a random one of the best quarter, and its parameters with small changes. A generation of a member
is a trial, which begins with the weights of its parent by `train.init_from`; moments of the optimizer start at 0. A
generation begins when the one before has ended, so the result does not depend on the number of workers.
"""

import numpy as np
from optuna.distributions import BaseDistribution, CategoricalDistribution
from optuna.trial import FrozenTrial, TrialState

from configs.base import KEYS
from configs.errors import ConfigError
from configs.key import EXECUTION, TRANSFER
from settings import loading
from studies import suites, trials
from studies.search import samplers, searches, spaces
from studies.search.searching import TRIES, Search, Searcher
from studies.worker import main

FRACTION = 4  # a quarter is replaced by a quarter
FACTORS = 0.8, 1.2  # of a number that is changed
RESAMPLED = 0.25  # probability that a parameter that is not a number is drawn again, from all its values


class Population(Searcher):
    """Runs the trials of a population: trial number g * size + m is generation g of member m."""

    def __init__(self, search: Search):
        super().__init__(search)
        self.size = search.population

    def is_over(self) -> bool:
        """Return whether the last generation has ended, or no member is left to go on from."""
        with self.queue.locked():
            known = self._members()
            return all(one.state.is_finished() for one in known) and self._next_place(known) is None

    def _members(self) -> list[FrozenTrial]:
        return [one for one in self.study.get_trials(deepcopy=False) if "member" in one.user_attrs]

    def _next_place(self, known: list[FrozenTrial]) -> int | None:
        """Return the number of the next trial that may begin; None if there is none now."""
        place = len(known)
        if place >= self.search.count:
            return None
        before = _generation(known, place // self.size - 1)
        may_begin = place < self.size or (
            all(one.state.is_finished() for one in before) and any(one.state == TrialState.COMPLETE for one in before)
        )
        return place if may_begin else None

    def _begun(self) -> FrozenTrial | None:
        """Begin the next trial of the population; None if it has to wait for others, or all have begun."""
        with self.queue.locked():
            known = self._members()
            place = self._next_place(known)
            if place is None:
                return None
            generation, number = divmod(place, self.size)
            rng = np.random.default_rng((self.search.seed, generation, number))
            distributions = spaces.distributions(self.space)
            before = _generation(known, generation - 1)
            parent = parent_of(number, before, rng) if before else None
            is_copy = parent is not None and parent.user_attrs["member"] != number
            for _ in range(TRIES):
                point = dict(parent.params) if parent else samplers.drawn(distributions, rng)
                point = perturbed(point, distributions, rng) if is_copy else point
                member = self._configuration(place, point, parent)
                if not member.refusal:
                    break
            else:
                raise ConfigError(
                    f"no point of {TRIES} of --space={self.search.space} can be trained: {member.refusal}"
                )
            order = trials.order_of(member, suites.folder(self.search.root, member), self.search.topology)
            family = {"member": number, "generation": generation, "parent": parent.number if parent else None}
            self.queue.add(order | family, params=point, distributions=distributions)
        return self.queue.claim_next({member.digest})

    def _configuration(self, place: int, point: dict, parent: FrozenTrial | None) -> suites.Member:
        """Return the configuration of a trial; its seed gives each generation other batches."""
        family = {suites.SEED: place} | ({"train.init_from": parent.user_attrs["workdir"]} if parent else {})
        name = "generation{}-member{}".format(*divmod(place, self.size))
        return self.search.member(self.recipe, name, spaces.changes(self.space, point) | family)


def check(search: Search) -> None:
    """Raise ConfigError if a population cannot be trained as asked, also in its later generations."""
    if search.prune != "none":
        raise ConfigError(f"--prune={search.prune} is not for --method=pbt, which replaces its worst members itself")
    if search.population < 2 or search.count % search.population:
        raise ConfigError(
            f"--trials={search.count} is not a number of generations times --population={search.population} (2 or more)"
        )
    searched = spaces.searched_keys(search.searched())
    given = search.overrides.keys() | searched
    if suites.SEED in given:
        raise ConfigError(f"--method=pbt gives each trial a seed of its own; omit {suites.SEED}")
    if "train.init_from" in given:
        raise ConfigError("--method=pbt sets train.init_from to a trial's parent; for the first, set it in the recipe")
    for key in sorted(searched):
        if key.startswith("model.") and not KEYS[key].scope & (EXECUTION | TRANSFER):
            raise ConfigError(f"--method=pbt copies weights, so {key} may not differ; leave it out of the space")
    recipe = loading.run_recipe(search.recipe)
    first, later = (search.member(recipe, "0", changes) for changes in ({}, {"train.init_from": search.root}))
    if later.refusal and not first.refusal:
        raise ConfigError(f"--method=pbt continues the weights of trials, and that is refused here: {later.refusal}")
    if not first.refusal and _trains_new_weights(suites.loaded_from(recipe, search.overrides, search.topology).config):
        raise ConfigError(
            f"--method=pbt continues the weights of trials, but train.objective={first.values['train.objective']} "
            "trains new ones on a frozen model; use another method"
        )


def _trains_new_weights(config) -> bool:
    """Return whether a run trains only a part of the model that `train.init_from` does not initialize."""
    from flax import nnx  # these take seconds to import

    from core import assembly

    # Adapters are merged into the weights from which the next generation begins.
    return assembly.objective_of(config).trainable not in (nnx.Param, nnx.LoRAParam)


def parent_of(member: int, generation: list[FrozenTrial], rng: np.random.Generator) -> FrozenTrial:
    """Return the trial that a member continues: its own, or one of the best quarter if it is in the worst or failed.

    All trials of the generation have ended, and at least one is complete.
    """
    done = sorted((one for one in generation if one.state == TrialState.COMPLETE), key=lambda one: one.value)
    quarter = max(1, len(generation) // FRACTION)
    own = generation[member]
    if own in done[: max(1, len(generation) - quarter)]:
        return own
    return done[rng.integers(min(quarter, len(done)))]


def perturbed(point: dict, space: dict[str, BaseDistribution], rng: np.random.Generator) -> dict:
    """Return a point with every number times 0.8 or 1.2, within its range, and some other values drawn again."""
    found = {}
    for name, old in point.items():
        distribution = space[name]
        if isinstance(distribution, CategoricalDistribution):
            others = distribution.choices
            found[name] = others[rng.integers(len(others))] if rng.random() < RESAMPLED else old
        else:
            found[name] = samplers.scaled(distribution, old, FACTORS[rng.integers(2)])
    return found


def lineage(found: searches.Searched) -> list[tuple[str, ...]]:
    """Return rows of the best trial of the last generation and its ancestors: generation, value and parameters."""
    by_number = {one.number: one for one in found.in_state(TrialState.COMPLETE)}
    one = min(by_number.values(), key=lambda one: (-one.user_attrs["generation"], one.value), default=None)
    rows = []
    while one is not None:
        rows.append((str(one.user_attrs["generation"]), f"{one.value:.6g}", searches.point(one)))
        one = by_number.get(one.user_attrs["parent"])
    return [("generation", "value", "parameters of the best and of its ancestors"), *reversed(rows)]


def _generation(known: list[FrozenTrial], number: int) -> list[FrozenTrial]:
    """Return the trials of a generation by member; none for -1."""
    found = [one for one in known if one.user_attrs["generation"] == number]
    return sorted(found, key=lambda one: one.user_attrs["member"])


if __name__ == "__main__":
    main(lambda content: Population(Search(**content)))
