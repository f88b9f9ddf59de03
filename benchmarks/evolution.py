# SPDX-License-Identifier: Apache-2.0
"""Which method of a search finds good configurations soonest? All of them on recorded runs of this trainer.

benchmarks/search_grid.json has the held-out losses of every point of a grid (benchmarks/search_grid.py trained them).
A search of EVALUATIONS distinct points with each method and SEEDS seeds is run on this table by the samplers of
`sweep.py search`. Regret: the best loss found, minus the best of the grid, in nats per token, mean of the seeds.

ASHA sees CONFIGURATIONS random points of the grid, one after the other, with the pruner of `sweep.py search`. Gap: the
loss of the best point that it trained to the end, over the best of these points, minus 1. Step share: the steps that it
trained, over those of all points trained to the end. Both are means of the seeds.

Gate: the regret of evolution is at most half of that of random points and not above that of local search; ASHA has a
gap of at most 2 % with at most 40 % of the steps. Otherwise the exit status is 1. `--quick` has too few seeds to judge.
"""

import json
import math
import statistics

import support

import optuna
import search_grid
from optuna.distributions import BaseDistribution
from optuna.trial import TrialState

from studies.search import samplers, spaces

SEEDS = 10 if support.QUICK else 200
EVALUATIONS, CONFIGURATIONS = 40, 27
METHODS = "random", "evolution", "local_search", "tpe"  # CMA-ES needs numbers, and four of these keys have none


Losses = dict[str, list[float]]  # of a point by its name: after each of search_grid.STEPS, infinite if it diverged


def recorded() -> Losses:
    """Return the recorded losses."""
    losses = json.loads(search_grid.FILE.read_text(), parse_constant=lambda name: math.inf)
    if left := sum(search_grid.name_of(point) not in losses for point in search_grid.points()):
        support.usage_error(f"{search_grid.FILE.name} lacks {left} points; run benchmarks/search_grid.py")
    return losses


def asked(study: optuna.Study, space: dict[str, BaseDistribution], method: str, seed: int) -> optuna.Trial:
    """Return a trial with a new point, as `Searcher` asks for one: points that were tried are left out."""
    known = [trial.params for trial in study.get_trials(deepcopy=False) if trial.state != TrialState.FAIL]
    while True:
        count = len(study.get_trials(deepcopy=False))
        study.sampler = samplers.METHODS[method](space, hash((seed, count)) % 2**32)
        trial = study.ask(space)
        if trial.params not in known:
            return trial
        study.tell(trial, state=TrialState.FAIL)


def regret(losses: Losses, method: str, seed: int) -> float:
    """Return the regret of one search."""
    space, study = spaces.distributions(search_grid.SPACE), optuna.create_study()
    for _ in range(EVALUATIONS):
        trial = asked(study, space, method, seed)
        study.tell(trial, losses[search_grid.name_of(trial.params)][-1])
    return study.best_value - min(curve[-1] for curve in losses.values())


def asha(losses: Losses, seed: int) -> tuple[float, float]:
    """Return (gap, step share) of one search."""
    space, steps = spaces.distributions(search_grid.SPACE), search_grid.STEPS
    study = optuna.create_study(pruner=samplers.PRUNERS["asha"](steps[-1]))
    trained, exhaustive = 0, []
    for _ in range(CONFIGURATIONS):
        trial = asked(study, space, "random", seed)
        curve = losses[search_grid.name_of(trial.params)]
        exhaustive.append(curve[-1])
        for step, loss in zip(steps, curve, strict=True):
            trial.report(loss, step)
            if step < steps[-1] and trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, loss)
        trained += step
    return study.best_value / min(exhaustive) - 1, trained / (CONFIGURATIONS * steps[-1])


def main() -> None:
    """Measure every method and ASHA."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    losses, figures = recorded(), {"grid_points": len(search_grid.points()), "searches": SEEDS}
    for method in METHODS:
        found = [regret(losses, method, seed) for seed in range(SEEDS)]
        error = statistics.stdev(found) / len(found) ** 0.5
        figures[f"{method}_regret"], figures[f"{method}_regret_error"] = statistics.fmean(found), error
        print(f"{method}: regret {figures[f'{method}_regret']:.4f} ± {error:.4f}", flush=True)
    gaps, shares = zip(*(asha(losses, seed) for seed in range(SEEDS)), strict=True)
    figures |= {"asha_gap": statistics.fmean(gaps), "asha_step_share": statistics.fmean(shares)}
    evolution = figures["evolution_regret"]
    searches = evolution <= 0.5 * figures["random_regret"] and evolution <= figures["local_search_regret"]
    prunes = figures["asha_gap"] <= 0.02 and figures["asha_step_share"] <= 0.4
    missed = "the gate fails: evolution has too much regret, or ASHA is too far or takes too many steps"
    rounded = {name: round(value, 4) for name, value in figures.items()}
    support.judge("evolution", rounded, "" if searches and prunes else missed)


if __name__ == "__main__":
    main()
