# SPDX-License-Identifier: Apache-2.0
"""Finds trials whose process would not train the configuration that the database has of them."""

from optuna.trial import FrozenTrial

from checkpointing.bucket import path_of
from configs.errors import ConfigError
from configs.group import Base
from files.json_reader import JsonError, Scalar, read_json
from settings import loading, stored_config
from settings.loading import ROOT
from studies import suites, trials

DECIDING = ("train.global_batch", "train.steps", "data.mixture")  # may change on resume, and make it another trial
TRIAL = "trial.json"  # the configuration of the trial that began the run in a folder, there
TO_CONTINUE = "move that folder away and run `sweep.py retry`, or give a search another --name"


def other_run_in_folder(trial: FrozenTrial) -> str:
    """Return why a trial cannot continue the run in its folder, which another trial began; "" if it can.

    train.py would continue it, or show what came of it, since some keys may change when a run is resumed. If it is not
    known which trial began the run, the keys of DECIDING that this one changes are compared, except a length of 0,
    which another key replaces.
    """
    about = trial.user_attrs
    folder, config = path_of(about["workdir"]), about["config"]
    try:
        before = read_json(folder / TRIAL, dict[str, Scalar])
    except JsonError as error:
        return f"{error}; {TO_CONTINUE}"
    except FileNotFoundError:
        try:
            before = stored_config.read_config(folder)
        except ConfigError:  # which train.py reports
            return ""
        before = {key: before[key] for key in DECIDING if key in about["changes"] and config[key]}
    changes = stored_config.changes(before, config)
    if not changes:
        return ""
    return f"{about['workdir']} has the run of another trial ({changes[0]}); {TO_CONTINUE}"


def edited_recipe(trial: FrozenTrial) -> str:
    """Return which value a trial's recipe has changed since the trial was queued; "" if none.

    The process of the trial reads the recipe again, and would train what the database and the report do not know. Paths
    may differ between machines, and are not compared.
    """
    about = trial.user_attrs
    path = str(ROOT / about["recipe"])
    try:
        recipe = loading.run_recipe(path)
    except ConfigError:  # which train.py reports
        return ""
    member = suites.member_of(Base(path), recipe, "", "", about["changes"], about["topology"], {})
    values = {key: value for key, value in member.values.items() if "/" not in f"{value}{about['config'].get(key)}"}
    changes = stored_config.changes(about["config"], values)
    if not changes:
        return ""
    return f"{about['recipe']} is not what it was when {trials.title(trial)} was queued ({changes[0]})"
