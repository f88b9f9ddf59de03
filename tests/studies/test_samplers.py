# SPDX-License-Identifier: Apache-2.0
"""The methods of a search find better points than random ones, and a search that is interrupted goes on the same."""

import importlib.util
import itertools

import numpy as np
import pytest

from tests.studies.conftest import needs_optuna

# Collected without Optuna too, and skipped, since PROMISES.md names a test of this file.
if importlib.util.find_spec("optuna"):
    import optuna
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    from studies.search import samplers

pytestmark = needs_optuna
GENES, VALUES, TRIALS = 5, 4, 40


def space_of_every_type():
    return {
        "rate": FloatDistribution(1e-4, 1e-1, log=True),
        "share": FloatDistribution(0.0, 1.0),
        "depth": IntDistribution(1, 9, step=2),
        "kind": CategoricalDistribution(["a", "b", "c"]),
    }


class Landscape:
    """A sum of effects of single genes and of neighbours, as in a table of recorded runs."""

    def __init__(self):
        rng = np.random.default_rng(0)
        self.alone, self.pairs = rng.normal(size=(GENES, VALUES)), rng.normal(0, 0.5, size=(GENES, VALUES, VALUES))
        self.space = {str(gene): CategoricalDistribution(list(range(VALUES))) for gene in range(GENES)}
        self.best = min(map(self.loss, itertools.product(range(VALUES), repeat=GENES)))

    def loss(self, genes) -> float:
        places = range(GENES)
        return float(
            self.alone[places, genes].sum() + self.pairs[places, genes, np.roll(genes, -1)].sum()
        )  # fmt: skip

    def regret(self, method: str, seed: int) -> float:
        study = optuna.create_study(sampler=samplers.METHODS[method](self.space, seed))
        ask_and_tell(study, self.space, self.loss, TRIALS)
        return study.best_value - self.best


def ask_and_tell(study, space, loss, count: int) -> None:
    for _ in range(count):
        trial = study.ask(space)
        study.tell(trial, loss([trial.params[name] for name in space]))


def test_evolution_and_local_search_have_less_than_half_of_the_regret_of_random_points():
    landscape = Landscape()
    regret = {
        method: np.mean([landscape.regret(method, seed) for seed in range(10)])
        for method in ("random", "evolution", "local_search")
    }
    assert regret["evolution"] < regret["random"] / 2 and regret["local_search"] < regret["random"] / 2


@pytest.mark.parametrize("method", ["evolution", "local_search"])
def test_a_search_goes_elsewhere_when_all_points_near_its_parent_were_tried(method):
    space = {name: CategoricalDistribution([0, 1, 2]) for name in "abc"}  # 6 of 27 points are near the best one
    study = optuna.create_study(sampler=samplers.METHODS[method](space, 0))
    ask_and_tell(study, space, sum, 20)
    assert len({tuple(trial.params.values()) for trial in study.get_trials()}) > 18


def test_a_larger_value_is_better_if_the_study_says_so():
    landscape = Landscape()
    study = optuna.create_study(direction="maximize", sampler=samplers.Evolution(landscape.space, 0))
    ask_and_tell(study, landscape.space, lambda genes: -landscape.loss(genes), TRIALS)
    assert -study.best_value - landscape.best < landscape.regret("random", 0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["evolution", "local_search"])
def test_a_search_that_is_opened_again_goes_on_as_if_it_had_not_been_closed(method, tmp_path):
    landscape, storage = Landscape(), f"sqlite:///{tmp_path}/search.db"

    def search(name: str, counts: tuple[int, ...]) -> list[dict]:
        for count in counts:
            study = optuna.create_study(
                storage=storage, study_name=name, load_if_exists=True,
                sampler=samplers.METHODS[method](landscape.space, 3),
            )  # fmt: skip
            ask_and_tell(study, landscape.space, landscape.loss, count)
        return [trial.params for trial in study.get_trials()]

    assert search("whole", (20,)) == search("interrupted", (7, 1, 12))


@pytest.mark.parametrize("method", ["random", "tpe", "cmaes", "evolution", "local_search"])
def test_every_method_draws_values_of_every_type_from_their_ranges(method):
    space = space_of_every_type()
    study = optuna.create_study(sampler=samplers.METHODS[method](space, 1))
    ask_and_tell(study, space, lambda point: point[0] + point[1], 25)
    for trial in study.get_trials():
        assert all(distribution._contains(distribution.to_internal_repr(trial.params[name]))
                   for name, distribution in space.items())  # fmt: skip
    assert {trial.params["depth"] for trial in study.get_trials()} <= {1, 3, 5, 7, 9}


def test_a_number_that_is_scaled_by_less_than_a_step_moves_to_the_next_one():
    steps, counts = optuna.distributions.IntDistribution(0, 60, step=10), optuna.distributions.IntDistribution(1, 9)
    assert [samplers.scaled(steps, value, 1.2) for value in (0, 10, 20, 50, 60)] == [10, 20, 30, 60, 60]
    assert [samplers.scaled(steps, value, 0.8) for value in (0, 10, 20, 50)] == [0, 0, 10, 40]
    assert [samplers.scaled(counts, value, 1.2) for value in (1, 2, 8)] == [2, 3, 9]
    assert [samplers.scaled(counts, value, 0.8) for value in (1, 2, 8)] == [1, 1, 6]
    rates = optuna.distributions.FloatDistribution(1e-4, 1.0, log=True)
    assert samplers.scaled(rates, 0.1, 1.2) == pytest.approx(0.12) and samplers.scaled(rates, 1.0, 1.2) == 1.0


def test_a_mutation_changes_one_parameter_and_numbers_to_values_nearby():
    rng, space = np.random.default_rng(0), space_of_every_type()
    point = {"rate": 1e-2, "share": 0.5, "depth": 5, "kind": "a"}
    changed = [samplers.mutated(point, space, rng) for _ in range(400)]
    assert all(sum(new[name] != point[name] for name in point) == 1 for new in changed)
    shares = [new["share"] for new in changed if new["share"] != 0.5]
    assert np.std(shares) < 0.25 and {new["kind"] for new in changed} == {"a", "b", "c"}


@pytest.mark.parametrize("method", ["evolution", "local_search", "tpe"])
def test_two_objectives_are_both_minimized(method):
    """The objectives are genes' loss and how many genes are not 0, whose best points differ."""
    landscape = Landscape()

    def volume(method: str) -> float:
        """Return the area below a corner that the front dominates, the mean of some seeds."""
        found = []
        for seed in range(4):
            study = optuna.create_study(
                directions=["minimize"] * 2, sampler=samplers.METHODS[method](landscape.space, seed)
            )
            for _ in range(60):
                trial = study.ask(landscape.space)
                genes = [trial.params[name] for name in landscape.space]
                study.tell(trial, [landscape.loss(genes), float(sum(gene > 0 for gene in genes))])
            front = sorted({tuple(one.values) for one in study.best_trials})
            steps = itertools.pairwise([(0.0, GENES + 1.0), *front])
            found.append(sum((5.0 - loss) * (above - second) for (_, above), (loss, second) in steps))
        return np.mean(found)

    assert volume(method) > volume("random")


def test_the_last_step_of_a_range_is_not_exceeded_by_rounding():
    """0.1 * 3 is 0.30000000000000004, which Optuna refuses as a value of the range."""
    stepped, plain = FloatDistribution(0.0, 0.3, step=0.1), FloatDistribution(0.03, 0.3)
    rng = np.random.default_rng(0)
    values = [samplers.drawn({"x": stepped}, rng)["x"] for _ in range(50)]
    values += [samplers.nearest(stepped, 0.36), samplers.nearest(plain, 0.36)]
    assert max(values) == 0.3
    for distribution, value in ((stepped, max(values)), (plain, values[-1])):
        optuna.trial.create_trial(value=0.0, params={"x": value}, distributions={"x": distribution})


def test_whole_numbers_of_a_logarithmic_range_are_drawn_as_often_as_optuna_draws_them():
    """The last one is not an exception: it was drawn half as often as its share of the range."""
    counts, rng = IntDistribution(1, 4, log=True), np.random.default_rng(0)
    values = [samplers.drawn({"x": counts}, rng)["x"] for _ in range(4000)]
    shares = np.bincount(values, minlength=5)[1:] / len(values)
    assert shares == pytest.approx(np.diff(np.log([0.5, 1.5, 2.5, 3.5, 4.5])) / np.log(9), abs=0.03)
    assert [samplers.nearest(counts, value) for value in (0.2, 1, 2, 3, 4, 9)] == [1, 1, 2, 3, 4, 4]


@pytest.mark.parametrize("steps", [17, 40, 900])
def test_asha_looks_after_a_ninth_and_a_third_of_the_steps_alone(steps):
    study, pruner = optuna.create_study(), samplers.PRUNERS["asha"](steps)
    first = steps // 9
    pruned_at = set()
    for number in range(30):
        trial = study.ask()
        for step in range(first, steps, first):
            trial.report(-(number % 7) - step, step)
            if pruner.prune(study, study.get_trials(deepcopy=False)[-1]):
                pruned_at.add(step)
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
                break
        else:
            study.tell(trial, 0.0)
    assert pruned_at == {first, 3 * first}


def test_the_median_prunes_from_a_ninth_of_the_steps_on():
    """So often is a trial evaluated whose pruner is this one."""
    study = optuna.create_study(pruner=samplers.PRUNERS["median"](90))
    for value in (1.0, 2.0, 3.0, 4.0, 9.0):
        trial = study.ask()
        pruned = {}
        for step in (9, 10):
            trial.report(value, step)
            pruned[step] = trial.should_prune()
        study.tell(trial, value)
    assert pruned == {9: False, 10: True}, "the last one is worse than the median of the others"


def test_asha_prunes_no_trial_after_its_second_look():
    """Though another one was better there, by chance or not."""
    study, pruner, pruned = optuna.create_study(), samplers.PRUNERS["asha"](95), []
    for last in (1.0, 2.0):
        trial = study.ask()
        for step, value in ((10, 1.0), (30, 1.0), (90, last)):
            trial.report(value, step)
            pruned.append(pruner.prune(study, study.get_trials(deepcopy=False)[-1]))
        study.tell(trial, last)
    assert not any(pruned)
