# SPDX-License-Identifier: Apache-2.0
"""What `sweep.py run` asks before it first launches a recipe on a slice of several hosts: an earlier small run."""

import shlex

import optuna
from optuna.trial import TrialState

from checkpointing.bucket import path_of
from configs import topologies
from configs.errors import ConfigError
from settings import stored_config
from settings.keys import LENGTHS
from studies.cost import rehearsals
from studies.storage import open_storage
from studies.suites import Member

SMALL = "small"  # folder of the small run, in the root of the study
SMALL_STEPS = 20


def check_small_run(members: list[Member], topology: str, root: str, storage: str) -> None:
    """Raise ConfigError if a recipe is about to run on a slice of several hosts, and has run nowhere before.

    One of these is enough: a trial of the recipe that is done, in any study of the storage; a run in ROOT/small that
    has finished; or a rehearsal by this user of one of the configurations on this slice. The records of the repository
    do not count: they say nothing of this machine, this data or these keys.
    """
    if not members or not topology or topologies.get(topology).hosts == 1:
        return
    recipe = members[0].recipe
    if has_done_trial(recipe, storage) or has_finished(f"{root}/{SMALL}", recipe):
        return
    if any(rehearsals.cached(member.values, topology) for member in members):
        return
    raise ConfigError(
        f"{recipe} has not run yet, and {topology} has {topologies.get(topology).hosts} hosts; "
        f"run it on a smaller slice or in simulation: .venv/bin/python {small_run(members[0], topology, root)}; "
        "or --skip_small"
    )


def has_done_trial(recipe: str, url: str) -> bool:
    """Return whether the storage at a URL has a trial of a recipe that is done."""
    try:
        storage = open_storage(url, create=False)
    except ConfigError:  # there is none yet; one that cannot be used is reported when it is opened to write
        return False
    done = (TrialState.COMPLETE,)
    return any(
        trial.user_attrs.get("recipe") == recipe
        for name in optuna.get_all_study_names(storage)
        for trial in storage.get_all_trials(storage.get_study_id_from_name(name), deepcopy=False, states=done)
    )


def has_finished(workdir: str, recipe: str) -> bool:
    """Return whether a folder has a run of a recipe that has finished."""
    folder = path_of(workdir)
    origin = stored_config.read_origin(folder) if (folder / stored_config.SUMMARY).exists() else {}
    return str(origin.get("recipe", "")).endswith(recipe)


def small_run(member: Member, topology: str, root: str) -> str:
    """Return the command of a short run on the smallest slice of the same chip, simulated where none is attached."""
    typed = {key: value for key, value in member.changes.items() if key not in LENGTHS}
    keys = [f"--config.{key}={value}" for key, value in ({"train.steps": SMALL_STEPS} | typed).items()]
    where = [f"--topology={_smallest(topology)}", f"--workdir={root}/{SMALL}"]
    return shlex.join(["train.py", f"--config={member.recipe}", *where, *keys])


def _smallest(topology: str) -> str:
    chip = topologies.get(topology).chip
    return next(name for name, (kind, *_) in topologies.SLICES.items() if kind == chip)
