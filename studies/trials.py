# SPDX-License-Identifier: Apache-2.0
"""The queue of a study: each different configuration is an Optuna trial, which ends exactly once.

A trial waits, is claimed by one worker, and ends as complete or failed. A worker that dies leaves its trial claimed;
the next worker takes the claim over, and train.py resumes from the checkpoint in the trial's folder.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterable

import optuna
import sqlalchemy
from optuna.trial import FrozenTrial, TrialState

from configs.base import keys_of
from configs.errors import ConfigError
from configs.key import MACHINE
from files.json_reader import Object, check_parsed
from studies import suites
from studies.claims import Claims
from studies.storage import understood

RETRIES = 2  # of a trial whose process failed, before its reason is shown
ENQUEUE_SECONDS = 0.2  # between two looks at another process that enqueues
RAN_SECONDS = "ran_seconds"  # user attribute: time in which processes of the trial ran
RAN_BEFORE = "ran_before"  # user attribute of a trial of `retry`: that time of the trials before it, in the same folder
SECOND = "second_objective"  # user attribute of a trial: its value, in a search that has one
CANCELLED = "cancelled by sweep.py cancel"
ATTRIBUTES = sqlalchemy.table(  # of Optuna, whose functions change none of an ended trial
    "trial_user_attributes", *map(sqlalchemy.column, ("trial_id", "key", "value_json"))
)


class LostClaim(RuntimeError):
    """Another worker has taken the trial over."""


class Order(Object):
    """The user attributes that every trial has; others are results."""

    group: str
    configuration: str
    seed: int
    workdir: str
    topology: str
    recipe: str
    changes: dict[str, str]
    config: dict
    failures: list[dict]
    cancelled: bool
    digest: str


def order_of(member: suites.Member, workdir: str, topology: str) -> Order:
    """Return what a trial runs, its user attributes while it waits: a configuration, its folder, the hardware preset.

    The digest is last: `adopt` writes one after the other, and a trial without a digest is never run.
    """
    return {
        "group": member.group, "configuration": member.name, "seed": member.seed,
        "workdir": workdir, "topology": topology, "recipe": member.recipe, "changes": member.changes,
        "config": member.values, "failures": [], "cancelled": False, "digest": member.digest,
    }  # fmt: skip


class Queue:
    """The trials of a study in a storage; `claims` are those of this process."""

    def __init__(self, storage: optuna.storages.RDBStorage, name: str, direction: str = "", *, create: bool):
        """Open a study; begin it if there is none and `create`, else raise ConfigError."""
        self.storage, self.name, self.claims = storage, name, Claims(storage.engine)
        if create:
            optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
        try:
            self.study_id = storage.get_study_id_from_name(name)
        except KeyError:
            all_of_them = ", ".join(sorted(optuna.get_all_study_names(storage))) or "none"
            raise ConfigError(
                f"the storage has no study {name} (all: {all_of_them}); `sweep.py run {name}` begins it"
            ) from None
        self._study = optuna.load_study(storage=storage, study_name=name)  # which reads an ended trial once

    def enqueue(self, orders: Iterable[dict]) -> int:
        """Add a trial for each order whose configuration has none yet; return the number of added trials.

        Raises ConfigError if the folder of an order has the run of another configuration.
        """
        with self.locked():
            known = self.latest()
            new = [order for order in orders if order["digest"] not in known]
            check_folders(new, known.values())
            for order in new:
                self.add(order)
            return len(new)

    @contextlib.contextmanager
    def locked(self, what: str = "enqueue"):
        """Hold the study's lock for one kind of work, by default adding trials; wait while another process has it."""
        lock = f"{self.name}: {what}"
        while not self.claims.take(lock):
            time.sleep(ENQUEUE_SECONDS)
        try:
            with self.claims.kept(lock):
                yield
        finally:
            self.claims.drop(lock)

    def adopt(self, trial: optuna.Trial, order: dict) -> FrozenTrial:
        """Claim a trial that Optuna has begun, and store what it runs."""
        self.claims.take(self._claim(trial))
        for name, content in order.items():
            trial.set_user_attr(name, content)
        return self._fresh(trial)

    def latest(self) -> dict[str, FrozenTrial]:
        """Return the last trial of each configuration by its digest; earlier ones were tried before a `retry`."""
        return {trial.user_attrs["digest"]: trial for trial in self.everything()}

    def everything(self) -> list[FrozenTrial]:
        """Return all trials that have a configuration, in the order of their numbers.

        Those that have ended are read once, and are the same objects each time. Raises ConfigError if an attribute is
        missing or of another type.
        """
        with understood(f"a trial of {self.name}"):
            found = [trial for trial in self._study.get_trials(deepcopy=False) if "digest" in trial.user_attrs]
            for trial in found:
                check_parsed(trial.user_attrs, Order, f"trial {trial.number} of {self.name}")
        return found

    @property
    def direction(self) -> optuna.study.StudyDirection:
        """Whether larger values are better."""
        return self.storage.get_study_directions(self.study_id)[0]

    def claim_next(
        self, digests: set[str], allows: Callable[[FrozenTrial], bool] = lambda trial: True
    ) -> FrozenTrial | None:
        """Return a trial of these configurations that this worker holds from now on; None if there is none now.

        `allows` says whether a trial that has not ended may be claimed.
        """
        for digest, trial in self.latest().items():
            if digest not in digests or trial.state.is_finished() or not allows(trial):
                continue
            if not self.claims.take(self._claim(trial)):
                continue
            trial = self._fresh(trial)  # it may have ended between the look and the claim
            if trial.state.is_finished():
                self.claims.drop(self._claim(trial))
                continue
            if trial.state == TrialState.WAITING:
                self.storage.set_trial_state_values(self.id_of(trial), TrialState.RUNNING)
            return trial
        return None

    def keep(self, trial: FrozenTrial) -> bool:
        """Count the claim up; return whether the trial was cancelled. Raises LostClaim."""
        if not self.claims.keep(self._claim(trial)):
            raise LostClaim(f"another worker runs {title(trial)}")
        return self._fresh(trial).user_attrs["cancelled"]

    def kept(self, trial: FrozenTrial) -> contextlib.AbstractContextManager[threading.Event]:
        """Count the claim up in a thread, while this process works on something else for long; see `Claims.kept`."""
        return self.claims.kept(self._claim(trial))

    def finish(
        self, trial: FrozenTrial, value: float | None, results: dict, curve: dict[int, float], *, pruned: bool = False
    ) -> None:
        """End a trial: complete with its value, or `pruned` with it, or failed for None. Raises LostClaim.

        `results` are further user attributes, JSON values; `curve` is the metric by step.
        """
        self.keep(trial)
        for name, content in results.items():
            self.set_attribute(trial, name, content)
        known = self._fresh(trial)
        for step, metric in curve.items():
            if known.intermediate_values.get(step) != metric:
                self.report(trial, step, metric)
        self.keep(trial)  # a long curve takes minutes
        state = TrialState.FAIL if value is None else TrialState.PRUNED if pruned else TrialState.COMPLETE
        also = [known.user_attrs[SECOND]] if SECOND in known.user_attrs else []
        with self._unless_ended(trial):
            self.storage.set_trial_state_values(self.id_of(trial), state, None if value is None else [value, *also])
        self.claims.drop(self._claim(trial))

    def give_back(self, trial: FrozenTrial, failure: dict | None = None) -> None:
        """Return a trial to the queue, with the failure of this attempt if it failed. Raises LostClaim."""
        self.keep(trial)
        if failure:
            self.set_attribute(trial, "failures", [*self._fresh(trial).user_attrs["failures"], failure])
        with self._unless_ended(trial):
            self.storage.set_trial_state_values(self.id_of(trial), TrialState.WAITING)
        self.claims.drop(self._claim(trial))

    def set_attribute(self, trial: FrozenTrial, name: str, content: object) -> None:
        """Store a user attribute, a JSON value, of a trial that has not ended. Raises LostClaim if it has."""
        with self._unless_ended(trial):
            self.storage.set_trial_user_attr(self.id_of(trial), name, content)

    def report(self, trial: FrozenTrial, step: int, metric: float) -> None:
        """Store the metric after a step of a trial that has not ended. Raises LostClaim if it has."""
        with self._unless_ended(trial):
            self.storage.set_trial_intermediate_value(self.id_of(trial), step, metric)

    def forget_checkpoint(self, trial: FrozenTrial) -> None:
        """Record that an ended trial of `everything` has no checkpoint any more.

        Processes that read the trial earlier do not see this; deleting its checkpoints again does nothing.
        """
        row = (ATTRIBUTES.c.trial_id == self.id_of(trial)) & (ATTRIBUTES.c.key == "checkpoint")
        with self.storage.engine.begin() as connection:
            connection.execute(ATTRIBUTES.update().where(row).values(value_json=json.dumps("")))
        trial.user_attrs["checkpoint"] = ""

    def cancel(self, digests: set[str]) -> tuple[int, int]:
        """End waiting trials as failed, and ask workers to end running ones; return the number of both."""
        ended = asked = 0
        for digest, trial in self.latest().items():
            if digest not in digests or trial.state.is_finished():
                continue
            try:
                self.storage.set_trial_user_attr(self.id_of(trial), "cancelled", True)
            except optuna.exceptions.UpdateFinishedTrialError:  # it has ended meanwhile
                continue
            if self.claims.take(self._claim(trial)):
                if self._fresh(trial).state.is_finished():
                    self.claims.drop(self._claim(trial))
                else:
                    self.finish(trial, None, {"reason": CANCELLED}, {})
                    ended += 1
            else:
                asked += 1
        return ended, asked

    def retry(self, digests: set[str]) -> int:
        """Add a new trial, in the same folder, for each failed one; return their number."""
        with self.locked():
            failed = [t for d, t in self.latest().items() if d in digests and t.state == TrialState.FAIL]
            for trial in failed:
                about = trial.user_attrs
                kept = {name: about[name] for name in KEPT_BY_RETRY}
                ran = about.get(RAN_BEFORE, 0.0) + about.get(RAN_SECONDS, 0.0)
                point = {"params": trial.params, "distributions": trial.distributions}  # of a search
                self.add(kept | {"failures": [], "cancelled": False, RAN_BEFORE: ran}, **point)
            return len(failed)

    def running(self) -> set[int]:
        """Return the numbers of claimed trials whose worker is not known to have ended."""
        prefix, holders = f"{self.name}: trial ", self.claims.holders()
        return {
            int(name.removeprefix(prefix)) for name, holder in holders.items()
            if name.startswith(prefix) and not self.claims.is_gone(name, holder)
        }  # fmt: skip

    @contextlib.contextmanager
    def _unless_ended(self, trial: FrozenTrial):
        """Raise LostClaim where a write finds that the trial has ended: another worker took it over, and ended it."""
        try:
            yield
        except optuna.exceptions.UpdateFinishedTrialError:
            raise LostClaim(f"another worker has ended {title(trial)}") from None

    def add(self, attributes: dict[str, object], **point: dict) -> None:
        """Queue a trial with these attributes; `point` is its place in a search, if it has one."""
        waiting = optuna.trial.create_trial(state=TrialState.WAITING, user_attrs=attributes, **point)
        self.storage.create_new_trial(self.study_id, waiting)

    def _fresh(self, trial: FrozenTrial) -> FrozenTrial:
        return self.storage.get_trial(self.id_of(trial))

    def id_of(self, trial: FrozenTrial | optuna.Trial) -> int:
        """Return the storage's number of a trial."""
        return self.storage.get_trial_id_from_study_id_trial_number(self.study_id, trial.number)

    def _claim(self, trial: FrozenTrial | optuna.Trial) -> str:
        return f"{self.name}: trial {trial.number}"


KEPT_BY_RETRY = ("digest", "group", "configuration", "seed", "workdir", "topology", "recipe", "changes", "config")


def queued_elsewhere(orders: Iterable[dict], known: dict[str, FrozenTrial]) -> list[str]:
    """Return a line for each trial that has not ended and was queued below another root or for another slice.

    It goes on there. The trial of an equal configuration of another group has another folder below the same root.
    """
    lines = []
    for order in orders:
        trial = known.get(order["digest"])
        if not trial or trial.state.is_finished():
            continue
        attributes = trial.user_attrs, order
        roots = [about["workdir"].removesuffix(f"/{about['group']}/{about['configuration']}") for about in attributes]
        places = {"--root": roots, "--topology": [about["topology"] for about in attributes]}
        differing = [f"{flag}={was}, not {now or 'none'}" for flag, (was, now) in places.items() if was != now]
        if differing:
            lines.append(f"{title(trial)} goes on as it was queued, with {' and '.join(differing)}")
    return lines


def check_folders(orders: Iterable[dict], known: Iterable[FrozenTrial]) -> None:
    """Raise ConfigError if the folder of an order has, or will have, the run of an earlier trial with other keys."""
    taken = {
        trial.user_attrs["workdir"]: trial for trial in known
        if trial.state != TrialState.FAIL or trial.user_attrs.get("checkpoint")
    }  # fmt: skip
    for order in orders:
        if earlier := taken.get(order["workdir"]):
            was, now = earlier.user_attrs["config"], order["config"]
            differing = [key for key in {**was, **now} if was.get(key) != now.get(key)]
            if not differing:  # a default has changed since, which makes another digest
                raise ConfigError(f"{order['workdir']} has a trial of an earlier version; give another --root")
            key = min(differing, key=lambda key: key in keys_of(MACHINE))  # which do not make it another trial
            raise ConfigError(
                f"{order['workdir']} is the folder of an earlier trial with {key}={was.get(key)}, not {now.get(key)}; "
                "type the keys of that trial, or give another --root"
            )


def title(trial: FrozenTrial) -> str:
    """Return the name that users read, GROUP/CONFIGURATION."""
    return f"{trial.user_attrs['group']}/{trial.user_attrs['configuration']}"


def standing(trial: FrozenTrial) -> str:
    """Return whether a trial is left, done, pruned, failed, or cancelled, which has the state of failed trials."""
    if trial.state == TrialState.FAIL and trial.user_attrs.get("reason") == CANCELLED:
        return "cancelled"
    ended = {TrialState.COMPLETE: "done", TrialState.PRUNED: "pruned", TrialState.FAIL: "failed"}
    return ended.get(trial.state, "left")
