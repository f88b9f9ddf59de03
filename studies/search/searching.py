# SPDX-License-Identifier: Apache-2.0
"""A search: workers ask a sampler for the next configuration, train it, and end it early if a pruner says so.

`sweep.py search` starts the workers with a Search as JSON on standard input. A search has no state but its trials in
the storage: a worker that died leaves a trial that the next one continues, and the sampler goes on from all trials.
"""

import collections
import dataclasses
import threading

import optuna
from optuna.trial import FrozenTrial, TrialState

from configs.errors import ConfigError
from configs.group import Base
from configs.space import Space
from rehearsal.compiler import CompileError
from settings import loading
from settings.keys import LENGTHS
from studies import outcome, suites, trials
from studies.cost import planning
from studies.launch import Failed, Unfinished
from studies.search import samplers, searches, second_objective, spaces
from studies.search.searches import Searched
from studies.storage import open_storage, understood
from studies.worker import USAGE, Task, Worker, main

TRIES = 100  # points that are drawn until one is valid and new
LOOK_SECONDS = 0.5  # between two looks at the evaluations of a running trial
PRUNED = "pruned: others were better at this step"
EQUAL = "equals trial"


class Stopped(Exception):
    """The worker was asked to stop while a step was rehearsed."""


@dataclasses.dataclass(frozen=True)
class Search:
    """What is searched and how. All but the storage, the program and the number of trials is stored with the study."""

    storage: str  # URL of the database
    study: str  # name
    recipe: str  # file
    space: str  # file
    method: str  # key of samplers.METHODS, or pbt (studies/search/population.py)
    prune: str  # key of samplers.PRUNERS
    count: int  # trials in all
    seed: int  # of the sampler
    metric: str  # figure of an evaluation that is minimized
    root: str  # folder of the trials' folders
    topology: str
    overrides: dict[str, str]  # typed text by dotted key, for every trial
    program: list[str]  # the command of a trial, before its flags
    population: int = 0  # members of pbt; other methods have none
    also: str = ""  # second objective, one of second_objective.NAMES; "": none

    def definition(self) -> dict[str, object]:
        """Return what must be equal when a search goes on."""
        may_differ = ("storage", "study", "count", "program")
        return {name: value for name, value in vars(self).items() if name not in may_differ}

    def searched(self) -> Space:
        """Return the entries of the space that are not typed: a typed value holds for every trial."""
        return {key: entry for key, entry in spaces.read(self.space).items() if key not in self.overrides}

    def member(self, recipe: tuple, name: str, changes: dict) -> suites.Member:
        """Return a resolved configuration; `recipe` is that of loading.run_recipe."""
        return suites.member_of(Base(self.recipe), recipe, self.study, name, changes, self.topology, self.overrides)


class Searcher(Worker):
    """Runs the trials of a search."""

    beat_seconds = LOOK_SECONDS

    def __init__(self, search: Search):
        super().__init__(Task(search.storage, search.study, [], search.metric, search.program, root=search.root))
        self.search, self.space, self.recipe = search, search.searched(), loading.run_recipe(search.recipe)
        self.study = optuna.load_study(study_name=search.study, storage=self.queue.storage)
        self._curve: outcome.GrowingCurve | None = None  # of the trial that runs
        self._exhausted: int | None = None  # number of ended trials when no new point was found

    def run_trial(self, trial: FrozenTrial) -> None:
        """Find the second objective of a trial, if the search has one, and run it. Raises LostClaim."""
        if self.search.also and trials.SECOND not in trial.user_attrs:
            self._began = None  # no process runs yet
            member = self.search.member(self.recipe, trial.user_attrs["configuration"], trial.user_attrs["changes"])
            try:
                with self.queue.kept(trial) as lost:
                    second = second_objective.value_of(
                        self.search.also, member, self.search.topology, lambda _: self._go_on(trial, lost)
                    )
                self.queue.keep(trial)  # another worker may have taken it over, if this machine slept
            except Stopped:
                return self.queue.give_back(trial)
            except (ConfigError, CompileError) as error:
                return self.end(trial, None, {"reason": f"its {self.search.also} is not known: {error}"})
            self.queue.set_attribute(trial, trials.SECOND, second)
        self._curve = outcome.GrowingCurve(trial.user_attrs["workdir"], self.task.metric)
        return super().run_trial(trial)

    def next_trial(self) -> FrozenTrial | None:
        """Claim a trial that a dead or interrupted worker left, or begin one; None if all have begun."""
        return self.queue.claim_next(set(self.queue.latest())) or self._begun()

    @property
    def count(self) -> int:
        """The number of trials in all."""
        return self.search.count

    def own_trials(self) -> list[FrozenTrial]:
        """Return all trials that have begun."""
        return list(self.queue.latest().values())

    def reason_to_end(self, trial: FrozenTrial) -> str:
        """Report new evaluations; return why the trial should end now, "" if it should go on."""
        if reason := super().reason_to_end(trial):
            return reason
        number, found = self.queue.id_of(trial), self._curve.look()
        known = self.queue.storage.get_trial(number).intermediate_values
        for step in sorted(found.keys() - known.keys()):
            self.queue.report(trial, step, found[step])
            steps = planning.steps_of(trial.user_attrs["config"]) or step
            pruner = samplers.PRUNERS[self.search.prune](steps)
            if step < steps and pruner.prune(self.study, self.queue.storage.get_trial(number)):
                return f"{PRUNED} ({self.task.metric} {found[step]:.6g} at {step:,})"
        return ""

    def end_early(self, trial: FrozenTrial, how: dict) -> None:
        """Record a pruned trial with its last value; others that end early have failed."""
        if not how["reason"].startswith(PRUNED):
            return super().end_early(trial, how)
        found = self._outcome(trial)
        curve = found.curve(self.task.metric)
        if not curve:  # the file that it was pruned by is gone
            return super().end_early(trial, how)
        self.end(trial, curve[max(curve)], how, found, pruned=True)

    def _go_on(self, trial: FrozenTrial, lost: threading.Event) -> None:
        """Raise Stopped after `stop`, and LostClaim once the claim is `lost`; a rehearsal calls it often."""
        if self.asked_to_stop:
            raise Stopped
        if lost.is_set():
            self.queue.keep(trial)

    def _begun(self) -> FrozenTrial | None:
        """Begin a trial with the sampler's next point that is valid and new; None if there are enough trials."""
        with self.queue.locked():
            everything = self.study.get_trials(deepcopy=False)
            known = {one.user_attrs["digest"]: one for one in everything if "digest" in one.user_attrs}
            num_ended = sum(one.state.is_finished() for one in known.values())
            if num_ended == self._exhausted:
                return None  # another look would add as many rows again, and the sampler knows nothing new
            for orphan in everything:  # its worker died before it was adopted
                if "digest" not in orphan.user_attrs and not orphan.state.is_finished():
                    self.study.tell(orphan.number, state=TrialState.FAIL)
            distributions = spaces.distributions(self.space)
            for attempt in range(TRIES if len(known) < self.search.count else 0):
                seed = hash((self.search.seed, len(everything) + attempt)) % 2**32  # a sampler has no other state
                self.study.sampler = samplers.METHODS[self.search.method](distributions, seed)
                trial = self.study.ask(distributions)
                if "digest" in trial.user_attrs:  # a worker has just given it back, and `ask` begins what waits
                    return self.queue.claim_next({trial.user_attrs["digest"]})
                name = f"{len(known):04d}"
                member = self.search.member(self.recipe, name, spaces.changes(self.space, trial.params))
                if not member.refusal and member.digest not in known:
                    folder = suites.folder(self.search.root, member)
                    return self.queue.adopt(trial, trials.order_of(member, folder, self.search.topology))
                left_out = member.refusal or f"{EQUAL} {known[member.digest].number}"
                trial.set_user_attr("left_out", left_out)
                self.study.tell(trial, state=TrialState.FAIL)
        self._exhausted = num_ended
        return None


def evaluated_often(search: Search) -> Search:
    """Return a search whose trials are evaluated early enough for its pruner, which looks after a ninth of the steps.

    Raises ConfigError if `train.eval_every` is typed and 0 or larger than that, `evaluation.every_epochs` is typed, or
    only the data know the number of steps.
    """
    key, of_epochs = "train.eval_every", "evaluation.every_epochs"
    values = search.member(loading.run_recipe(search.recipe), "0000", {}).values
    if not values or search.prune == "none":
        return search
    steps = planning.steps_of(values)
    if not steps and not {*LENGTHS}.isdisjoint(spaces.searched_keys(search.searched())):
        return search  # each trial knows its own
    if not steps:
        raise ConfigError(f"--prune={search.prune} looks after a ninth of the steps; type --config.train.steps")
    most = max(1, steps // samplers.RUNGS[0])
    if values[of_epochs] and of_epochs in search.overrides:
        raise ConfigError(
            f"--prune={search.prune} looks after a ninth of {steps:,} steps; type --config.{key} instead of {of_epochs}"
        )
    if 0 < values[key] <= most and not values[of_epochs]:
        return search
    if key in search.overrides:
        raise ConfigError(
            f"--config.{key}={values[key]} is not a number from 1 to {most}: --prune={search.prune} looks after a "
            f"ninth of {steps:,} steps"
        )
    return dataclasses.replace(search, overrides=search.overrides | {key: str(most)})


def begin(search: Search) -> trials.Queue:
    """Create the study of a search, or open it to go on.

    Raises ConfigError if the study is of another search or space, or if every key of the space is typed.
    """
    space = search.searched()
    if not space:
        typed = ", ".join(f"--config.{key}={search.overrides[key]}" for key in sorted(spaces.read(search.space)))
        raise ConfigError(f"--space={search.space} leaves nothing to search, since typed keys win; leave out {typed}")
    storage = open_storage(search.storage, create=True)
    directions = ["minimize"] * (2 if search.also else 1)
    study = optuna.create_study(storage=storage, study_name=search.study, directions=directions, load_if_exists=True)
    queue = trials.Queue(storage, search.study, create=False)
    with understood(f"the search {search.study}"):
        stored = searches.checked(study.user_attrs.get("search", search.definition()), search.study)
    kept = {"also": "", "population": 0} | stored  # earlier versions had neither
    differs = [name for name, value in search.definition().items() if kept[name] != value]
    if differs:
        name, now = differs[0], search.definition()[differs[0]]
        had = kept[name]
        if name == "overrides":
            name = min(key for key in had.keys() | now.keys() if had.get(key) != now.get(key))
            had, now, name = had.get(name, "the recipe's"), now.get(name, "the recipe's"), f"config.{name}"
        flag = {"recipe": "config", "seed": "search_seed"}.get(name, name)
        raise ConfigError(f"the search {search.study} has --{flag}={had}, not {now}; give this one another --name")
    distributions = spaces.distributions(space)
    if any(one.distributions != distributions or not _has_sets_of(space, one) for one in queue.everything()):
        raise ConfigError(
            f"--space={search.space} is not what it was when the search {search.study} began; "
            "restore the file, or give this search another --name"
        )
    study.set_user_attr("search", kept)
    return queue


def _has_sets_of(space: spaces.Space, trial: FrozenTrial) -> bool:
    """Return whether a trial has the values of the space: a distribution has the name of a set, and not its keys."""
    changes = trial.user_attrs["changes"]
    return all(changes.get(key) == str(value) for key, value in spaces.changes(space, trial.params).items())


def judge(search: Searched, count: int, statuses: list[int]) -> None:
    """Print how many trials of a search ended in which way.

    Raises:
      Unfinished: fewer than `count` have ended, by an interruption or the death of workers.
      Failed: all have failed, no point of the space can be trained, or a worker met a mistake in the command.
    """
    found = search.trials
    standings = collections.Counter(map(trials.standing, found))
    ended = len(found) - standings["left"]
    counts = ", ".join(f"{standings[word]} {word}" for word in ("done", "pruned", "failed"))
    may_retry = standings["failed"] and not search.definition.get("population")
    again = f"; `sweep.py retry {search.name}` queues failed ones again" if may_retry else ""
    print(f"{search.name}: {counts}{again}", flush=True)
    if USAGE in statuses and ended < count:  # the same command would meet the same mistake
        raise Failed(f"a worker ended by the error above; {ended} of {count} trials have ended")
    if (any(statuses) and ended < count) or standings["left"]:
        raise Unfinished(f"{ended} of {count} trials have ended; run the same command to continue")
    if found and standings["failed"] == len(found):
        raise Failed(f"no trial of {ended} succeeded, first {trials.title(found[0])}: {found[0].user_attrs['reason']}")
    if ended >= count:
        return
    reason = next((reason for reason in search.left_out if not reason.startswith(EQUAL)), "")
    if not found and reason:
        raise Failed(f"no point of the space can be trained, the first since {reason}")
    if not found:
        raise Unfinished(f"0 of {count} trials have ended; run the same command to continue")
    why = f"; others cannot be trained, the first since {reason}" if reason else ""
    print(f"the search cannot go on: {ended} of {count} trials have ended, and no point is left{why}", flush=True)


if __name__ == "__main__":
    main(lambda content: Searcher(Search(**content)))
