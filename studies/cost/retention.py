# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints of trials that are done stay on disk: all, the last of each trial or of each group's best, or none.

Metrics, configuration and logs always stay. A trial that is not done keeps everything: it resumes from there.
"""

from collections.abc import Iterable

from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState

from checkpointing.folder import CheckpointFolder
from studies.cost.limits import Limits
from studies.trials import Queue, title


def enforce(queue: Queue, digests: Iterable[str], limits: Limits) -> list[str]:
    """Delete the checkpoints that `limits.keep` does not keep; return a line for each trial where that failed.

    Only checkpoints of trials in `digests` are deleted. A trial's attribute `checkpoint` becomes "" after its last
    checkpoint is deleted. A deletion that was cut short leaves no folder that looks like a checkpoint, and the next
    call completes it.
    """
    if limits.keep == "all":
        return []
    errors = []
    with queue.locked("retention"):
        done = {digest: one for digest, one in queue.latest().items() if one.state == TrialState.COMPLETE}
        stay = kept(done, limits, maximize=queue.direction == StudyDirection.MAXIMIZE)
        for digest in digests:
            trial = done.get(digest)
            if trial is None or not trial.user_attrs["checkpoint"]:
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


def affected(digest: str, limits: Limits) -> set[str]:
    """Return the trials whose checkpoints may have to go when one has ended."""
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
