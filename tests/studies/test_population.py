# SPDX-License-Identifier: Apache-2.0
"""Population-based training: who continues whose weights, and a population whose workers are killed."""

import dataclasses
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
import types

import pytest
from flax import nnx

from configs.errors import ConfigError
from settings import loading
from tests.studies.conftest import ended, environment, needs_optuna
from tests.studies.test_kill import children
from tests.studies.test_searching import asked
from tests.support import ROOT

pytestmark = needs_optuna
MEMBERS, GENERATIONS = 4, 3
SPACE = """
from configs.space import Choice, Range
SPACE = {"optimizer.learning_rate": Range(1e-4, 1.0, log=True), "optimizer.name": Choice(("adamw", "lion"))}
"""
SETS = """
from configs.space import Choice
SPACE = {"sets": Choice({"a": {"optimizer.name": "lion"}, "b": {"model.mlp_dim": 64}})}
"""
RUN = """
import json, sys
from studies import launch
from studies.search import population, searching
asked = searching.Search(**json.loads(sys.argv[1]))
population.check(asked)
queue = searching.begin(asked)
statuses = launch.work("studies.search.population", json.loads(sys.argv[1]), [{}] * int(sys.argv[2]))
sys.exit(any(statuses))
"""


def search(folder: pathlib.Path, **changes):
    """Return a population of four whose best learning rate is 0.01."""
    folder.mkdir(exist_ok=True)
    found = asked(folder, method="pbt", count=MEMBERS * GENERATIONS, population=MEMBERS, overrides={"train.steps": "6"})
    (folder / "space.py").write_text(SPACE)
    return dataclasses.replace(found, **changes)


def run(asked_for, workers: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(dataclasses.asdict(asked_for)), str(workers)], cwd=ROOT, text=True,
        env=environment(pathlib.Path(asked_for.root)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def trials_of(folder: pathlib.Path) -> dict[tuple[int, int], object]:
    """Return the trials by generation and member."""
    import optuna

    found = optuna.load_study(study_name="s", storage=f"sqlite:///{folder}/studies.db").trials
    assert len(found) == MEMBERS * GENERATIONS and all(one.state.name == "COMPLETE" for one in found)
    return {(one.user_attrs["generation"], one.user_attrs["member"]): one for one in found}


@pytest.mark.slow
def test_the_worst_members_continue_the_best_whatever_the_number_of_workers_and_kills(tmp_path):
    process = run(search(hit := tmp_path / "hit"), 2)
    while len(list(hit.glob("runs/*/*/starts"))) < MEMBERS + 1:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    for worker in children(process.pid):
        os.kill(worker, signal.SIGKILL)
    assert ended(process)[0] == 1
    for folder, workers in ((hit, 2), (tmp_path / "calm", 1)):
        status, _, err = ended(run(search(folder), workers))
        assert status == 0, err
    found, calm = trials_of(hit), trials_of(tmp_path / "calm")
    assert {key: one.params for key, one in found.items()} == {key: one.params for key, one in calm.items()}
    assert {key: one.value for key, one in found.items()} == {key: one.value for key, one in calm.items()}
    folders = {one.number: one.user_attrs["workdir"] for one in found.values()}
    for generation in range(1, GENERATIONS):
        before = sorted((found[generation - 1, member] for member in range(MEMBERS)), key=lambda one: one.value)
        for member in range(MEMBERS):
            one = found[generation, member]
            expected = before[0] if found[generation - 1, member] == before[-1] else found[generation - 1, member]
            assert one.user_attrs["parent"] == expected.number
            assert one.user_attrs["changes"]["train.init_from"] == folders[expected.number]
            same = one.params == expected.params
            assert same is (expected.user_attrs["member"] == member), "only one that continues another is changed"


def test_numbers_change_by_a_fifth_and_stay_in_their_ranges():
    import numpy as np

    from configs.space import Choice, Range
    from studies.search.population import perturbed
    from studies.search.spaces import distributions

    space = distributions(
        {
            "optimizer.learning_rate": Range(1e-4, 1e-1, log=True),
            "optimizer.warmup_steps": Range(0, 100, step=10),
            "train.global_batch": Choice((4, 8)),
        }
    )
    rng = np.random.default_rng(0)
    old = {"optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 50, "train.global_batch": 4}
    found = [perturbed(old, space, rng) for _ in range(50)]
    assert {round(one["optimizer.learning_rate"], 6) for one in found} == {8e-3, 1.2e-2}
    assert {one["optimizer.warmup_steps"] for one in found} == {40, 60}
    assert {one["train.global_batch"] for one in found} == {4, 8}
    most = {"optimizer.learning_rate": 1e-1, "optimizer.warmup_steps": 100, "train.global_batch": 4}
    for one in (perturbed(most, space, rng) for _ in range(50)):
        assert one["optimizer.learning_rate"] <= 1e-1 and one["optimizer.warmup_steps"] <= 100


def test_a_member_that_failed_takes_one_of_the_places_of_the_worst_quarter():
    """Else two of four would begin anew with the weights of the best, and the population would lose half of itself."""
    import numpy as np
    import optuna

    from studies.search.population import parent_of

    states, values = [optuna.trial.TrialState.COMPLETE] * 3 + [optuna.trial.TrialState.FAIL], (0.3, 0.1, 0.2, None)
    found = [optuna.trial.create_trial(state=state, value=value) for state, value in zip(states, values, strict=True)]
    parents = [found.index(parent_of(member, found, np.random.default_rng(0))) for member in range(4)]
    assert parents == [0, 1, 2, 1]


def test_the_lineage_is_that_of_the_best_trial_of_the_last_generation():
    """An earlier trial may be better by chance, and has taken fewer steps."""
    import optuna

    from studies.search import population

    family = [(0, 0.1, None), (0, 0.3, None), (1, 0.2, 1), (1, 0.4, 0)]  # generation, value, parent
    found = [
        types.SimpleNamespace(number=number, value=value, params={}, user_attrs={"generation": of, "parent": parent})
        for number, (of, value, parent) in enumerate(family)
    ]
    searched = types.SimpleNamespace(in_state=lambda state: found if state == optuna.trial.TrialState.COMPLETE else [])
    _, *rows = population.lineage(searched)
    assert rows == [("0", "0.3", ""), ("1", "0.2", "")]


def test_fewer_trials_than_have_begun_begin_no_more(tmp_path):
    from studies.search import population, searching

    found = search(tmp_path)
    searching.begin(found)
    workers = [population.Population(dataclasses.replace(found, count=count)) for count in (4, 2)]
    assert all(workers[0]._begun() for _ in range(3))
    assert workers[1]._begun() is None and workers[0]._begun() and workers[0]._begun() is None


@pytest.mark.parametrize(
    ("changes", "space", "message"),
    [
        ({"prune": "asha"}, SPACE, "--prune=asha is not for --method=pbt"),
        ({"overrides": {"train.seed": "3"}}, SPACE, "--method=pbt gives each trial a seed of its own"),
        ({"overrides": {"train.init_from": "x"}}, SPACE, "for the first, set it in the recipe"),
        ({"count": 10}, SPACE, "--trials=10 is not a number of generations times --population=4"),
        ({}, SPACE.replace("optimizer.name", "train.seed").replace('"adamw", "lion"', "1, 2"), "omit train.seed"),
        ({}, SPACE.replace("optimizer.name", "model.mlp_dim").replace('"adamw", "lion"', "64, 128"), "model.mlp_dim"),
        ({}, SETS, "model.mlp_dim may not differ"),
        ({"recipe": "configs/countdown_value_head.py"}, SPACE, "value_head trains new ones on a frozen model"),
        ({"recipe": "configs/error_correction.py"}, SPACE, "error_correction trains new ones on a frozen model"),
        ({"recipe": "configs/trm/sudoku_mini.py"}, SPACE, r"refused here: train.init_from=.* needs model.name="),
    ],
)
def test_mistakes(tmp_path, changes, space, message):
    from studies.search.population import check

    wrong = search(tmp_path, **changes)
    (tmp_path / "space.py").write_text(space)
    with pytest.raises(ConfigError, match=message):
        check(wrong)


@pytest.mark.parametrize("overrides", [{}, {"lora.rank": "2", "train.init_from": "x"}])
def test_adapters_are_continued_but_not_a_part_of_the_weights(tmp_path, monkeypatch, overrides):
    """Whatever the name of the objective: such a part would be random in each generation."""
    from objectives.language_modeling import LanguageModeling
    from studies import suites
    from studies.search.population import _trains_new_weights, check

    config = suites.loaded_from(loading.run_recipe("configs/tiny.py"), overrides, "").config
    assert not _trains_new_weights(config)
    monkeypatch.setattr(LanguageModeling, "trainable", nnx.PathContains("head"))
    assert _trains_new_weights(config)
    (tmp_path / "space.py").write_text(SPACE)
    with pytest.raises(ConfigError, match="language_modeling trains new ones on a frozen model"):
        check(search(tmp_path))
