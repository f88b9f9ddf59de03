# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints of trials that are done stay on disk: all, the last of each trial or of each group's best, or none.

Metrics, configuration and logs always stay. A trial that is not done keeps everything: it resumes from there.
"""

from collections.abc import Iterable

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from checkpointing.folder import CheckpointFolder
from studies.cost.limits import Limits
from studies.suites import folder_of
from studies.trials import Queue, title


def enforce(queue: Queue, digests: Iterable[str], limits: Limits, root: str) -> list[str]:
    """Delete the checkpoints that `limits.keep` does not keep; return a line for each trial where that failed.

    Only checkpoints of trials in `digests` are deleted, and only of those that `elsewhere` does not name. A trial's
    attribute `checkpoint` becomes "" after its last checkpoint is deleted. A deletion that was cut short leaves no
    folder that looks like a checkpoint, and the next call completes it.
    """
    if limits.keep == "all":
        return []
    errors = []
    with queue.locked("retention"):
        done = {digest: one for digest, one in queue.latest().items() if one.state == TrialState.COMPLETE}
        stay = kept(done, limits, maximize=queue.direction == StudyDirection.MAXIMIZE)
        for digest in digests:
            trial = done.get(digest)
            if trial is None or not trial.user_attrs["checkpoint"] or not _is_of(root, trial):
                continue
            folder = CheckpointFolder(trial.user_attrs["workdir"])
            try:
                delete(folder, all_but_newest=digest in stay)
            except folder.failures as error:
                errors.append(f"checkpoints of {title(trial)} are not deleted: {error}; the next run tries again")
                continue
            if digest not in stay:
                queue.forget_checkpoint(trial)
    return errors


def elsewhere(queue: Queue, digests: set[str], limits: Limits, root: str) -> list[str]:
    """Return a line about trials whose folders are not below the `root` of this command; [] if there are none.

    Their checkpoints stay: the database may be a copy, and the folders may belong to the original.
    """
    if limits.keep == "all":
        return []
    found = [one for digest, one in queue.latest().items() if digest in digests and not _is_of(root, one)]
    found = [one for one in found if one.state.is_finished() and one.user_attrs.get("checkpoint") != ""]
    if not found:
        return []
    first, whose = found[0], "trial whose folder is" if len(found) == 1 else "trials whose folders are"
    return [
        f"--keep={limits.keep} deletes no checkpoints of {len(found)} {whose} not below --root={root}, first "
        f"{title(first)} in {first.user_attrs['workdir']}; give the --root that it was queued with"
    ]


def _is_of(root: str, trial: FrozenTrial) -> bool:
    about = trial.user_attrs
    return about["workdir"] == folder_of(root, about["group"], about["configuration"])


def affected(digest: str, limits: Limits) -> set[str]:
    """Return the trials whose checkpoints may have to go when the trial of a digest has ended."""
    groups = limits.groups.values() if limits.keep == "best" else ()
    return {digest}.union(*(group for group in groups if digest in group))


def kept(done: dict[str, FrozenTrial], limits: Limits, *, maximize: bool) -> set[str]:
    """Return the digests of the trials whose newest checkpoint stays; of equal values, the earlier trial is the best.

    `done` has the trials that are done, by digest.
    """
    if limits.keep == "last":
        return set(done)
    if limits.keep == "none":
        return set()
    sign = 1 if maximize else -1
    found = set()
    for group in limits.groups.values():
        if ended := [digest for digest in group if digest in done]:
            found.add(max(ended, key=lambda digest: (sign * done[digest].value, -done[digest].number)))
    return found


def delete(folder: CheckpointFolder, *, all_but_newest: bool) -> None:
    """Delete checkpoints, and what an unfinished save or deletion left."""
    steps = folder.steps()
    for step in steps[:-1] if all_but_newest else steps:
        folder.remove(step)
    folder.remove_unfinished()
