# SPDX-License-Identifier: Apache-2.0
"""What the stored trials of a search say: the best configuration, and how every trial has ended."""

import collections
import dataclasses
import statistics
from typing import Literal, NotRequired

import optuna
from optuna.trial import FrozenTrial, TrialState

from configs.errors import ConfigError
from files.json_reader import Object, check_parsed
from reporting.display import aligned, counted
from studies import trials
from studies.cost.budget import cost_of, taken_by
from studies.report import pareto
from studies.report.answers import words
from studies.storage import open_storage, understood

ALSO = {"parameters": "number of parameters", "step_seconds": "seconds of a step"}
MOST = 10  # best trials that are shown
ONCE = "Each configuration was trained once: a difference within the spread over seeds means nothing"


class Definition(Object):
    """What is searched and how, as it is stored; searching.Search describes the keys."""

    recipe: str
    space: str
    method: str
    prune: str
    seed: int
    metric: str
    root: str
    topology: str
    overrides: dict[str, str]
    population: NotRequired[int]  # earlier versions had neither of these two
    also: NotRequired[Literal["", "parameters", "step_seconds"]]  # of ALSO


@dataclasses.dataclass(frozen=True)
class Searched:
    """The trials of a search."""

    name: str  # of the study
    definition: Definition
    trials: list[FrozenTrial]  # that were trained or will be, in the order of their numbers
    left_out: dict[str, int]  # for each reason, how many points of the space were not trained
    running: set[int]  # numbers of the trials that a worker holds

    @property
    def objectives(self) -> list[str]:
        """The names of what is minimized: the metric, and the second objective if there is one."""
        also = self.definition.get("also")
        return [words(self.definition["metric"]), *([ALSO[also]] if also else [])]

    @property
    def done(self) -> list[FrozenTrial]:
        """The complete trials, the best metric first."""
        return sorted(self.in_state(TrialState.COMPLETE), key=lambda one: one.values[0])

    @property
    def front(self) -> list[FrozenTrial]:
        """The complete trials on the Pareto front, by rising metric; without a second objective the best ones."""
        done = self.done
        return [done[index] for index in pareto.front([tuple(one.values) for one in done])]

    def in_state(self, state: TrialState) -> list[FrozenTrial]:
        """Return the trials that are in a state, in the order of their numbers."""
        return [one for one in self.trials if one.state == state]


def find(url: str, name: str, unknown: str) -> Searched:
    """Return the search with a name in the storage at a URL.

    Raises ConfigError if there is none, or if the storage cannot be opened. The message begins with `unknown`.
    """
    try:
        storage = open_storage(url, create=False)
    except ConfigError as error:
        raise ConfigError(f"{unknown}; searches cannot be read: {error}") from None
    with understood("a study"):
        every = storage.get_all_studies()
    known = {one.study_name: one.user_attrs["search"] for one in every if "search" in one.user_attrs}
    if name not in known:
        raise ConfigError(f"{unknown}; nor is it a search in --storage (all: {', '.join(sorted(known)) or 'none'})")
    queue, definition = trials.Queue(storage, name, create=False), checked(known[name], name)
    trained = sorted(queue.latest().values(), key=lambda trial: trial.number)
    everything = optuna.load_study(study_name=name, storage=storage).get_trials(deepcopy=False)
    left_out = collections.Counter(one.user_attrs["left_out"] for one in everything if "left_out" in one.user_attrs)
    return Searched(name, definition, trained, dict(left_out), queue.running())


def checked(definition: object, name: str) -> Definition:
    """Return the stored definition of a search; ConfigError if it does not match the schema."""
    with understood("a search"):
        return check_parsed(definition, Definition, f"the search {name}")


def answer(found: Searched) -> str:
    """Return which configuration is best, and by how much, in one sentence and a warning."""
    done, metric = found.done, found.objectives[0]
    if not done:
        return f"No answer: none of {counted(len(found.trials), 'trial')} is done."
    best = done[0]
    said = f"Trial {best.number} has the lowest {metric}, {best.values[0]:.6g}: {point(best)}."
    if len(done) > 1:
        middle, second = statistics.median(one.values[0] for one in done), done[1]
        said += f" That is {second.values[0] - best.values[0]:.4g} below trial {second.number}, the second, and "
        said += f"{middle - best.values[0]:.4g} below the median of {len(done)} complete trials. {ONCE}."
    return said


def best(found: Searched) -> list[str]:
    """Return the table of the best trials, and that of the Pareto front if there is a second objective."""
    front = ["the Pareto front:", *aligned(table(found, front=True))] if len(found.objectives) > 1 else []
    return [*aligned(table(found)), *front]


def lines(found: Searched) -> list[str]:
    """Return the status of a search: counts, hours, the best trials, and why others failed."""
    about = found.definition
    heading = ("queued", "running", "done", "pruned", "failed", "left out", "chip-hours", "cost")
    return [
        f"search {found.name}: {about['method']} over {about['space']}, {about['recipe']}",
        *aligned([heading, counts(found)]), *best(found), *failures(found),
    ]  # fmt: skip


def counts(found: Searched) -> tuple[str, ...]:
    """Return the numbers of trials in each state, the points that were left out, chip-hours and cost."""
    left = [one for one in found.trials if not one.state.is_finished()]
    alive = sum(one.number in found.running for one in left)
    ended = (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL)
    hours, cost = sum(map(taken_by, found.trials)), cost_of(found.trials)
    numbers = (len(left) - alive, alive, *(len(found.in_state(state)) for state in ended), sum(found.left_out.values()))
    return (*map(str, numbers), f"{hours:.2f}", "not known" if cost is None else f"${cost:,.2f}")


def table(found: Searched, *, front: bool = False) -> list[tuple[str, ...]]:
    """Return a heading and the rows of the best trials, or of those on the Pareto front; `value` is the metric."""
    rows = [("trial", "value", *found.objectives[1:], "parameters", "folder")]
    for one in found.front if front else found.done[:MOST]:
        rows.append((str(one.number), *map(_figure, one.values), point(one), one.user_attrs["workdir"]))
    return rows


def failures(found: Searched) -> list[str]:
    """Return a line for each failed trial, with its folder, and for each reason why points were left out."""
    failed = [
        f"failed: trial {one.number} in {one.user_attrs['workdir']}: {reason(one)}"
        for one in found.in_state(TrialState.FAIL)
    ]  # fmt: skip
    return failed + [f"left out: {counted(count, 'point')}: {reason}" for reason, count in found.left_out.items()]


def reason(trial: FrozenTrial) -> str:
    """Return why a trial has failed, with the exit status of its process."""
    return f"status {trial.user_attrs.get('status', '-')}: {trial.user_attrs.get('reason', 'not known')}"


def point(trial: FrozenTrial) -> str:
    """Return the parameters of a trial in words."""
    return ", ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}" for name, value in trial.params.items()
    )


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.6g}"
