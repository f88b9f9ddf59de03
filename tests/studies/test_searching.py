# SPDX-License-Identifier: Apache-2.0
"""A search with real workers and a database on disk; a stand-in for train.py is the program of a trial."""

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

from configs.errors import ConfigError
from settings import loading
from tests.studies.conftest import ended, environment, needs_optuna, sweep
from tests.studies.test_kill import children
from tests.studies.test_queue import STAND_IN
from tests.support import ROOT

pytestmark = needs_optuna
TRIALS, STEPS = 8, 20
SPACE = """
from configs.space import Choice, Range
SPACE = {"optimizer.learning_rate": Range(1e-4, 1.0, log=True), "model.num_heads": Choice((3, 4, 8))}
"""
RUN = """
import json, sys
from studies import launch
from studies.search import searches, searching
asked = searching.Search(**json.loads(sys.argv[1]))
searching.begin(asked)
statuses = launch.work("studies.search.searching", json.loads(sys.argv[1]), [{}, {}])
try:
    searching.judge(searches.find(asked.storage, asked.study, ""), asked.count, statuses)
except launch.Unfinished as end:
    sys.exit(str(end))
"""


def asked(folder: pathlib.Path, **changes):
    """Return a search whose best learning rate is 0.01; 3 heads do not divide the width, so they are never trained."""
    from studies.search.searching import Search

    (folder / "space.py").write_text(SPACE)
    search = Search(
        storage=f"sqlite:///{folder}/studies.db", study="s", recipe="configs/tiny.py", space=str(folder / "space.py"),
        method="evolution", prune="none", count=TRIALS, seed=0, metric="eval_loss", root=str(folder / "runs"),
        topology="", overrides={"train.steps": str(STEPS), "model.num_kv_heads": "1"}, program=list(STAND_IN),
    )  # fmt: skip
    return dataclasses.replace(search, **changes)


def run(search) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", RUN, json.dumps(dataclasses.asdict(search))], cwd=ROOT, text=True,
        env=environment(pathlib.Path(search.root)), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def trials_of(folder: pathlib.Path) -> list:
    """Return the trials that were trained."""
    import optuna

    found = optuna.load_study(study_name="s", storage=f"sqlite:///{folder}/studies.db").trials
    return [trial for trial in found if "digest" in trial.user_attrs]


@pytest.mark.slow
def test_a_search_whose_workers_are_killed_goes_on_to_its_number_of_trials_each_ended_once(tmp_path):
    process = run(asked(tmp_path))
    while len(list(tmp_path.glob("runs/*/*/starts"))) < 3:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    for worker in children(process.pid):
        os.kill(worker, signal.SIGKILL)
    status, _, err = ended(process)
    assert status == 1 and "run the same command to continue" in err
    status, out, err = ended(run(asked(tmp_path)))
    assert status == 0 and f"s: {TRIALS} done, 0 pruned, 0 failed" in out, err
    found = trials_of(tmp_path)
    assert [trial.state.name for trial in found] == ["COMPLETE"] * TRIALS
    assert len({trial.user_attrs["digest"] for trial in found}) == TRIALS, "no configuration is trained twice"
    assert {trial.params["model.num_heads"] for trial in found} <= {4, 8}, "3 heads are not a valid configuration"
    for trial in found:
        assert trial.value == pytest.approx(abs(trial.params["optimizer.learning_rate"] - 0.01) + 1 / STEPS)


def test_a_look_at_a_running_trial_parses_the_lines_that_are_new(tmp_path, monkeypatch):
    """A worker looks twice a second, and a record of hours has tens of thousands of lines."""
    from studies import outcome

    parsed = []

    def counted(content, source):
        parsed.append(content.count(b"\n"))
        return original(content, source)

    original = outcome.parse_lines
    monkeypatch.setattr(outcome, "parse_lines", counted)
    path, curve = tmp_path / "metrics.jsonl", outcome.GrowingCurve(str(tmp_path), "eval_loss")
    lines = [f'{{"kind": "eval", "step": {step}, "eval_loss": {loss}}}\n' for step, loss in ((1, 3.0), (2, 2.0))]
    cut, back = lines[1][:20], '{"kind": "event", "event": "start", "step": 1}\n'
    looks = [
        ("", {}, 0), (lines[0], {1: 3.0}, 1), (lines[0] + cut, {1: 3.0}, 0), (lines[0], {1: 3.0}, 0),
        (lines[0] + lines[1], {1: 3.0, 2: 2.0}, 1), (lines[0] + lines[1] + back, {1: 3.0}, 1), (lines[1], {2: 2.0}, 1),
    ]  # fmt: skip
    assert curve.look() == {}, "there is no file yet"
    for content, found, count in looks:
        path.write_text(content)
        assert curve.look() == found and parsed[-1] == count


@pytest.mark.slow
def test_pruned_trials_save_end_early_and_keep_their_last_value(tmp_path):
    longer = {"train.steps": "60", "model.num_kv_heads": "1"}
    status, _, err = ended(run(asked(tmp_path, prune="asha", method="random", overrides=longer)))
    assert status == 0, err
    pruned = [trial for trial in trials_of(tmp_path) if trial.state.name == "PRUNED"]
    whole = [trial for trial in trials_of(tmp_path) if trial.state.name == "COMPLETE"]
    assert pruned and whole and len(pruned) + len(whole) == TRIALS
    assert min(trial.value for trial in pruned) > min(trial.value for trial in whole)
    assert min(max(trial.intermediate_values) for trial in pruned) < 60
    for trial in pruned:
        assert trial.value == trial.intermediate_values[max(trial.intermediate_values)]
        assert trial.user_attrs["reason"].startswith("pruned: others were better")


def test_a_search_that_differs_from_the_one_of_its_name_is_refused(tmp_path):
    from studies.search.searching import begin

    begin(asked(tmp_path))
    with pytest.raises(ConfigError, match="the search s has --method=evolution, not tpe; give this one another --name"):
        begin(asked(tmp_path, method="tpe"))


def test_a_search_whose_keys_are_all_typed_is_refused(tmp_path):
    """Typed keys win, so every trial would equal the first."""
    from studies.search import searching

    search = asked(tmp_path, overrides={"optimizer.learning_rate": "0.003", "model.num_heads": "4"})
    with pytest.raises(ConfigError, match=r"nothing to search, .* leave out --config.model.num_heads=4, --config.opt"):
        searching.begin(search)
    assert not (tmp_path / "studies.db").exists()


@pytest.mark.slow
def test_a_space_that_has_changed_and_a_name_of_a_suite_are_refused(tmp_path):
    from studies.search import searching

    status, _, err = ended(run(asked(tmp_path, count=1)))
    assert status == 0, err
    search = asked(tmp_path)
    (tmp_path / "space.py").write_text(SPACE.replace("8", "8, 16"))
    with pytest.raises(
        ConfigError, match=r"space\.py is not what it was when the search s began; restore the file, or"
    ):
        searching.begin(search)
    status, _, err = ended(sweep(tmp_path, "search", "--name=trm-mini"))
    assert status == 2 and "--name=trm-mini is a group or a suite of configs/experiments/; give the search" in err


def test_a_set_of_keys_that_was_edited_under_its_name_is_refused(tmp_path):
    """Else trials of two configurations would rank as one value."""
    from studies import suites, trials
    from studies.search import searching, spaces

    text = (
        'from configs.space import Choice\n\nSPACE = {"size": Choice({"small": {"model.mlp_dim": 64}, '
        '"large": {"model.mlp_dim": 96}})}\n'
    )
    search = asked(tmp_path)
    (tmp_path / "space.py").write_text(text)
    queue = searching.begin(search)
    point = {"size": "small"}
    member = search.member(loading.run_recipe(search.recipe), "0000", spaces.changes(search.searched(), point))
    order = trials.order_of(member, suites.folder(search.root, member), search.topology)
    queue.add(order, params=point, distributions=spaces.distributions(search.searched()))
    searching.begin(search)
    (tmp_path / "space.py").write_text(text.replace("64", "32"))
    with pytest.raises(ConfigError, match=r"space\.py is not what it was when the search s began"):
        searching.begin(search)


def test_a_typed_key_of_a_set_is_refused(tmp_path):
    """Else a trial would be named after the set, and be trained with the typed value."""
    (tmp_path / "sets.py").write_text(
        'from configs.space import Choice\n\nSPACE = {"shape": Choice({"a": {"model.mlp_dim": 64}, '
        '"b": {"model.mlp_dim": 96}})}\n'
    )
    space = f"--space={tmp_path}/sets.py"
    status, _, err = ended(sweep(tmp_path, "search", space, "--config.model.mlp_dim=64"))
    assert status == 2 and f"--config.model.mlp_dim is a key of the sets of shape in {space}; leave one" in err


def test_a_key_that_is_typed_is_not_sampled(tmp_path):
    """Its typed value would win, and the trial would be recorded with a value that it did not have."""
    search = asked(tmp_path, overrides={"optimizer.learning_rate": "0.01"})
    assert search.searched().keys() == {"model.num_heads"}


@pytest.mark.slow
def test_a_search_whose_trials_all_fail_says_so_and_finds_its_recipe_from_any_folder(tmp_path):
    (tmp_path / "own.py").write_text((ROOT / "configs" / "tiny.py").read_text().replace("4e-3", "4e-4"))
    command = ["search", "--config=own.py", "--space=spaces/lr.py", "--trials=1", "--config.data.path=none"]
    status, _, err = ended(sweep(tmp_path, *command))
    assert status == 1 and "error: no trial of 1 succeeded, first own-lr-tpe/0000: " in err
    assert "data path 'none': no such file or folder" in err and "is not a Python file" not in err


INTERRUPTED = """
import subprocess, sys
from studies import launch
worker = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
worker += "print('begun', flush=True); [time.sleep(0.1) for _ in range(600)]"
launch._start = lambda module, content, devices: subprocess.Popen([sys.executable, "-c", worker])
print(*launch.work("", {}, [{}]))
"""


def test_a_search_that_is_interrupted_between_two_trials_is_not_over(tmp_path):
    """Its workers end well, and no trial waits; else the caller would train the best of half a search."""
    from studies.launch import Unfinished
    from studies.search import searches, searching

    process = subprocess.Popen([sys.executable, "-c", INTERRUPTED], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "begun\n"
    process.send_signal(signal.SIGINT)
    statuses = list(map(int, process.communicate(timeout=30)[0].split()))
    searching.begin(search := asked(tmp_path, count=4))
    with pytest.raises(Unfinished, match="0 of 4 trials have ended; run the same command to continue"):
        searching.judge(searches.find(search.storage, search.study, ""), 4, statuses)
    assert statuses == [-signal.SIGTERM]


@pytest.mark.slow
def test_an_exhausted_space_is_not_asked_again_while_another_worker_trains(tmp_path):
    """Each look would add a hundred rows to the database, and an idle worker looks every two seconds."""
    from studies.search import searching

    space = tmp_path / "two.py"
    space.write_text('from configs.space import Choice\n\nSPACE = {"train.seed": Choice((1, 2))}\n')
    search = asked(tmp_path, space=str(space))
    searching.begin(search)
    worker = searching.Searcher(search)
    begun = [worker._begun() for _ in range(3)]
    rows = len(worker.study.get_trials())
    assert [one is not None for one in begun] == [True, True, False] and rows >= searching.TRIES
    assert worker._begun() is None and len(worker.study.get_trials()) == rows


@pytest.mark.slow
def test_a_trial_that_is_given_back_while_another_worker_begins_one_is_claimed(tmp_path, monkeypatch):
    """Optuna begins what waits before it makes a new trial."""
    from studies.search import searching

    search = asked(tmp_path, count=3)
    searching.begin(search)
    one, other = searching.Searcher(search), searching.Searcher(search)
    trial = one.next_trial()
    one.queue.give_back(trial)
    found = other._begun()  # after a look at a queue where nothing waited yet
    assert found.number == trial.number and found.state.name == "RUNNING"
    assert other.next_trial().number > trial.number


@pytest.mark.slow
def test_a_search_without_a_valid_point_fails_with_the_first_reason(tmp_path):
    (tmp_path / "heads.py").write_text(
        'from configs.space import Choice\n\nSPACE = {"model.num_heads": Choice([3, 5])}\n'
    )
    status, out, err = ended(sweep(tmp_path, "search", "--config=configs/tiny.py", "--space=heads.py", "--trials=1"))
    assert status == 1 and not list(tmp_path.glob("runs/*/*/*")), out
    assert "error: no point of the space can be trained, the first since " in err and "num_heads" in err


def test_a_search_that_cannot_go_on_says_why_points_were_left_out(tmp_path, capsys):
    from studies.search import searches, searching

    space = tmp_path / "layers.py"
    space.write_text(
        'from configs.space import Choice\n\nSPACE = {"model": Choice({"a": {"model.num_layers": "two"}, '
        '"b": {"model.num_layers": 1}})}\n'
    )
    search = asked(tmp_path, space=str(space), count=2)
    searching.begin(search)
    searching.Searcher(search).run()
    searching.judge(searches.find(search.storage, search.study, ""), 2, [0])
    assert (
        "1 of 2 trials have ended, and no point is left; others cannot be trained, the first since "
        "--config.model.num_layers=two is not a whole number"
    ) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--space=none.py"], "--space=none.py is not a Python file"),
        (["--method=tpes"], "should be one of"),
        (
            ["--method=cmaes", "--config.optimizer.warmup_steps=5", "--config.optimizer.weight_decay=0.1"],
            "--method=cmaes models two or more ranges of numbers",
        ),
        (["--name=../up"], "--name=../up is not the name of a folder in --root"),
        (["again"], "stray argument 'again'; search takes no name; --name names its study"),
        (["--seeds=3"], "--seeds is not read by search; omit it"),
        (["--config.train.stepz=3"], "train.stepz is not a configuration key"),
        (["--root=/dev/null/x"], "--root=/dev/null/x: Not a directory; name a folder that can be written"),
    ],
)
def test_mistakes_are_one_line(tmp_path, arguments, message):
    words = [word for word in arguments if not word.startswith("-")]
    status, _, err = ended(sweep(tmp_path, "search", *words, *[word for word in arguments if word not in words]))
    assert status == 2 and message in err and not (tmp_path / "studies.db").exists()


def test_a_search_that_prunes_evaluates_its_trials_where_the_pruner_looks(tmp_path):
    from studies.search.searching import evaluated_often

    search = asked(tmp_path, prune="asha", overrides={"train.steps": "90", "train.eval_every": "30"})
    with pytest.raises(ConfigError, match=r"train.eval_every=30 is not a number from 1 to 10: --prune=asha"):
        evaluated_often(search)
    default = dataclasses.replace(search, overrides={"train.steps": "90"})
    assert evaluated_often(default).overrides == {"train.steps": "90", "train.eval_every": "10"}
    often = dataclasses.replace(search, overrides={"train.steps": "90", "train.eval_every": "5"})
    assert evaluated_often(often) is often
    epochs = dataclasses.replace(search, overrides={"train.epochs": "1"})
    with pytest.raises(ConfigError, match=r"--prune=asha looks after a ninth of the steps; type --config.train.steps"):
        evaluated_often(epochs)
    counted = {"train.steps": "90", "evaluation.every_epochs": "2"}
    with pytest.raises(ConfigError, match=r"type --config.train.eval_every instead of evaluation.every_epochs"):
        evaluated_often(dataclasses.replace(search, overrides=counted))
    never = dataclasses.replace(search, prune="none")
    assert evaluated_often(never) is never


def test_the_best_has_the_searched_keys_alone_and_a_dead_worker_no_trial_needed_changes_nothing(tmp_path):
    """A final run must not be as short as the trials."""
    from studies.search import training
    from studies.search.searching import Searcher

    search = asked(tmp_path, count=1)

    def start(search, devices) -> list[int]:
        Searcher(search).run()
        return [0, -9]

    training.train(search, [{}, {}], start)
    best = json.loads((tmp_path / "runs" / "s" / "best.json").read_text())
    assert best["changes"].keys() == {"optimizer.learning_rate", "model.num_heads"}


@pytest.mark.parametrize(("step", "is_pruned"), [(5, True), (10, False)])
def test_a_trial_that_has_taken_its_last_step_is_not_pruned(monkeypatch, step, is_pruned):
    """It is complete, and its value is not that of a trial that ended early."""
    from studies.search import samplers, searching
    from studies.worker import Worker

    monkeypatch.setattr(Worker, "reason_to_end", lambda self, trial: "")
    monkeypatch.setitem(samplers.PRUNERS, "all", lambda steps: types.SimpleNamespace(prune=lambda *trial: True))
    monkeypatch.setattr(searching.planning, "steps_of", lambda config: 10)
    one = searching.Searcher.__new__(searching.Searcher)
    stored = types.SimpleNamespace(intermediate_values={})
    one.queue = types.SimpleNamespace(
        id_of=lambda trial: 0, report=lambda *figures: None,
        storage=types.SimpleNamespace(get_trial=lambda number: stored),
    )  # fmt: skip
    one._curve, one.study = types.SimpleNamespace(look=lambda: {step: 3.0}), None
    one.search, one.task = types.SimpleNamespace(prune="all"), types.SimpleNamespace(metric="eval_loss")
    reason = one.reason_to_end(types.SimpleNamespace(user_attrs={"config": {}}))
    assert reason.startswith(searching.PRUNED) is is_pruned
