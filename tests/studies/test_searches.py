# SPDX-License-Identifier: Apache-2.0
"""What status and report say of a search, and the second objective: known without training, stored with each trial."""

import contextlib
import dataclasses
import datetime
import json
import math
import shutil
import sqlite3
import statistics
import time
import types

import pytest

from configs.errors import ConfigError
from pods.studies import COUNTS
from tests.browser import Browser
from tests.studies.conftest import ended, needs_optuna, sweep
from tests.studies.test_searching import asked, run, trials_of
from tests.support import drawn

pytestmark = needs_optuna
COUNT = 12
SPACE = """
from configs.space import Choice, Range
SPACE = {"optimizer.learning_rate": Range(1e-4, 1.0, log=True), "model.mlp_dim": Choice((64, 128, 256))}
"""


def filled(folder, *, also: str = "", prune: str = "none"):
    """Return a search whose trials have ended without training: most are done, trial 3 failed, one point is left out.

    The loss is the distance of the learning rate from 0.01 in decades, and in pruned searches trial 5 is pruned.
    """
    import optuna
    from optuna.trial import TrialState

    from settings import loading
    from studies import suites, trials
    from studies.search import searches, searching, spaces

    search = dataclasses.replace(asked(folder), also=also, prune=prune, method="random")
    (folder / "space.py").write_text(SPACE)
    queue, recipe, space = searching.begin(search), loading.run_recipe(search.recipe), spaces.read(search.space)
    study = optuna.load_study(study_name="s", storage=queue.storage, sampler=optuna.samplers.RandomSampler(0))
    for number in range(COUNT):
        trial = study.ask(spaces.distributions(space))
        member = search.member(recipe, f"{number:04d}", spaces.changes(space, trial.params))
        begun = queue.adopt(trial, trials.order_of(member, suites.folder(search.root, member), ""))
        loss = abs(math.log10(trial.params["optimizer.learning_rate"]) + 2)
        if also:
            trial.set_user_attr(trials.SECOND, float(trial.params["model.mlp_dim"]))
        if number == 3:
            queue.finish(begun, None, {"reason": "the loss <is> nan", "status": 3}, {})
        else:
            why = {"reason": "pruned: others were better"} if prune != "none" and number == 5 else {}
            queue.finish(begun, loss, {"chip_hours": 0.5, **why}, {}, pruned=bool(why))
    left_out = study.ask(spaces.distributions(space))
    left_out.set_user_attr("left_out", "equals trial 0")
    study.tell(left_out, state=TrialState.FAIL)
    return searches.find(search.storage, "s", "?")


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """A pruned search, which is only read."""
    return filled(tmp_path_factory.mktemp("pruned"), prune="asha")


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """The folder of a search that is not pruned, which is only read."""
    filled(folder := tmp_path_factory.mktemp("plain"))
    return folder


def test_the_answer_is_the_best_trial_and_by_how_much_with_its_warning(pruned):
    import optuna

    from studies.search import searches

    found = pruned
    best, second, *_ = sorted(found.done, key=lambda one: one.value)
    said = searches.answer(found)
    assert said.startswith(f"Trial {best.number} has the lowest loss, {best.value:.6g}: optimizer.learning_rate=")
    assert f"{second.value - best.value:.4g} below trial {second.number}, the second" in said
    below = statistics.median(one.value for one in found.done) - best.value
    assert f"{below:.4g} below the median of 10 complete trials" in said and "trained once" in said
    assert searches.counts(found) == ("0", "0", "10", "1", "1", "1", "5.50", "not known")
    begun = types.SimpleNamespace(user_attrs={"topology": "v4-8", "ran_seconds": 7200.0, "ran_before": 3600.0})
    begun.number, begun.state = 99, optuna.trial.TrialState.RUNNING
    alone = dataclasses.replace(found, trials=[begun], running={99})
    assert searches.counts(alone)[-2:] == ("12.00", "$38.64"), "those of a trial that runs count"
    assert searches.answer(alone) == "No answer: none of 1 trial is done."


def test_of_a_search_the_pruned_trials_are_not_those_that_are_done(pruned, tmp_path):
    """In study.json, which `pod.py status` shows."""
    from studies import progress

    progress.write(str(tmp_path), pruned.trials, None, COUNT + 2)
    shown = json.loads((tmp_path / "study.json").read_text())
    assert {name: shown[name] for name in COUNTS} == {
        "done": 10, "pruned": 1, "failed": 1, "cancelled": 0, "left": 2
    }  # fmt: skip


def test_a_failed_trial_is_named_with_its_folder(pruned):
    """Its number differs from that of the trial where points were left out before it."""
    from optuna.trial import TrialState

    from studies.search import page as search_page
    from studies.search import searches

    [failed] = pruned.in_state(TrialState.FAIL)
    folder = failed.user_attrs["workdir"]
    assert searches.failures(pruned)[0] == f"failed: trial 3 in {folder}: status 3: the loss <is> nan"
    assert f"<td>{folder}</td><td>status 3: the loss &lt;is&gt; nan</td>" in search_page.document(pruned)


def test_the_page_of_a_search_is_the_same_each_time_and_needs_no_network(pruned, tmp_path):
    from studies.search import page as search_page

    shown = search_page.document(pruned)
    assert shown == search_page.document(pruned)
    assert "status 3: the loss &lt;is&gt; nan" in shown and "pruned: others were better" in shown
    assert "1 point left out" in shown and "equals trial 0" in shown
    assert "<script" not in shown and "http" not in shown.replace("http://www.w3.org", "") and "Pareto" not in shown
    (tmp_path / "page.html").write_text(shown)
    browser = Browser(tmp_path / "profile")
    try:
        browser.open((tmp_path / "page.html").as_uri(), width=400, dark=True)
        browser.wait("document.querySelectorAll('svg').length == 2")
        assert browser.value("document.documentElement.scrollWidth") == 400 and browser.errors == []
    finally:
        browser.close()


@pytest.mark.slow
def test_status_and_report_take_the_name_of_a_search(tmp_path):
    filled(tmp_path, also="parameters")
    status, out, err = ended(sweep(tmp_path, "status", "s"))
    assert status == 0, err
    assert "search s: random over" in out and "the Pareto front:" in out and "number of parameters" in out
    assert "failed: trial 3 in " in out and "/0003: status 3: the loss <is> nan" in out
    assert "left out: 1 point: equals trial 0" in out
    status, out, err = ended(sweep(tmp_path, "report", "s", "--html=page.html"))
    assert (status, out) == (0, "wrote page.html\n"), err
    assert "The Pareto front" in (tmp_path / "page.html").read_text()
    status, _, err = ended(sweep(tmp_path, "status", "s", "--seeds=2"))
    assert status == 2 and "--seeds is not read for the search s" in err


def test_a_search_is_not_cancelled_by_its_name_but_by_an_interruption(plain):
    status, out, err = ended(sweep(plain, "cancel", "s"))
    assert (status, out) == (2, "") and err.startswith("error: s is a search, and cancel is for groups and suites; ")


@pytest.mark.slow
def test_a_failed_trial_of_a_search_is_trained_again_at_the_same_point(tmp_path):
    failed = filled(tmp_path).trials[3]
    search = dataclasses.replace(asked(tmp_path), method="random", count=COUNT)
    (tmp_path / "space.py").write_text(SPACE)
    status, out, err = ended(run(search))
    assert status == 0 and "1 failed; `sweep.py retry s` queues failed ones again" in out, err
    status, out, err = ended(sweep(tmp_path, "retry", "s"))
    assert (status, out) == (0, "queued again: 1 trial; the same `sweep.py search` starts them\n"), err
    status, out, err = ended(run(search))
    assert status == 0 and f"s: {COUNT} done, 0 pruned, 0 failed\n" in out, err
    again = trials_of(tmp_path)[-1]
    assert again.state.name == "COMPLETE" and again.params == failed.params
    assert again.user_attrs["workdir"] == failed.user_attrs["workdir"]


def test_a_failed_member_of_a_population_is_not_queued_again(tmp_path):
    from studies.search import searching

    searching.begin(dataclasses.replace(asked(tmp_path), method="pbt", population=2))
    status, out, err = ended(sweep(tmp_path, "retry", "s"))
    assert (status, out) == (2, "") and "a failed member goes on with the weights of another" in err


def test_a_name_that_is_neither_a_group_nor_a_search_is_one_line(plain, tmp_path):
    from studies.search import searches

    with pytest.raises(ConfigError, match=r"t is not a group; searches cannot be read: .* there is no such file"):
        searches.find(f"sqlite:///{tmp_path}/studies.db", "t", "t is not a group")
    with pytest.raises(ConfigError, match=r"t is not a group; nor is it a search in --storage \(all: s\)"):
        searches.find(f"sqlite:///{plain}/studies.db", "t", "t is not a group")


@pytest.mark.slow
def test_a_search_with_two_objectives_stores_both_and_goes_on_only_with_both(tmp_path):
    from studies.report import sizes
    from studies.search import searching

    search = asked(tmp_path, also="parameters", count=4)
    (tmp_path / "space.py").write_text(SPACE)
    status, _, err = ended(run(search))
    assert status == 0, err
    found = trials_of(tmp_path)
    assert len(found) == 4
    for trial in found:
        loss, parameters = trial.values
        assert loss == pytest.approx(abs(trial.params["optimizer.learning_rate"] - 0.01) + 1 / 20)
        assert parameters == sizes.num_parameters(trial.user_attrs["config"])
    with pytest.raises(ConfigError, match="the search s has --also=parameters, not ; give this one another --name"):
        searching.begin(dataclasses.replace(search, also=""))


def test_a_configuration_without_a_second_objective_has_failed_with_the_reason(tmp_path, monkeypatch):
    from studies.search import searching, second_objective

    searching.begin(search := asked(tmp_path, also="step_seconds", topology="v4-8", overrides={}, count=1))
    (tmp_path / "space.py").write_text(SPACE)
    compiled = types.SimpleNamespace(fits=False)
    monkeypatch.setattr(second_objective.Compiler, "compile", lambda *_, **how: how["waiting"](9.0) or compiled)
    searching.Searcher(search).run()
    (trial,) = trials_of(tmp_path)
    assert trial.state.name == "FAIL"
    why = "its step_seconds is not known: the step does not fit in the memory of a chip of v4-8"
    assert trial.user_attrs["reason"] == why
    assert trial.user_attrs["chip_hours"] == 0.0, "no process ran"


def test_a_rehearsal_ends_when_another_worker_takes_the_trial_over(tmp_path, monkeypatch):
    from studies import claims, trials
    from studies.search import searching, second_objective

    searching.begin(search := asked(tmp_path, also="step_seconds", topology="v4-8", overrides={}, count=1))
    (tmp_path / "space.py").write_text(SPACE)
    monkeypatch.setattr(claims, "BEAT_SECONDS", 0.05)
    searcher = searching.Searcher(search)

    def compile(*_, waiting):
        searcher.queue.claims.worker = "a machine 1 2"  # so that the claim is another's
        for _ in range(500):
            waiting(9.0)
            time.sleep(0.02)
        pytest.fail("the rehearsal went on")

    monkeypatch.setattr(second_objective.Compiler, "compile", compile)
    with pytest.raises(trials.LostClaim, match="another worker runs"):
        searcher.run_trial(searcher.next_trial())


def test_step_seconds_are_those_of_the_recorded_rehearsal():
    from configs.group import Base
    from settings import loading
    from studies import suites
    from studies.cost import rehearsals
    from studies.search import second_objective

    recipe = loading.run_recipe("configs/tiny.py")
    member = suites.member_of(Base("configs/tiny.py"), recipe, "s", "0", {}, "v4-8", {})
    seconds = second_objective.value_of("step_seconds", member, "v4-8", lambda _: None)
    assert seconds == rehearsals.step_seconds(member.values, "v4-8") and 1e-4 < seconds < 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            ("parameters", "cmaes", "none", ""),
            "--method=cmaes minimizes one value; with --also use evolution",
        ),
        (("parameters", "tpe", "asha", ""), "--prune=asha compares one value; with --also leave it out"),
        (
            ("step_seconds", "tpe", "none", ""),
            "--also=step_seconds is the rehearsed time on a slice: name one",
        ),
    ],
)
def test_what_cannot_have_a_second_objective_is_refused(given, message):
    from studies.search import second_objective

    with pytest.raises(ConfigError, match=message):
        second_objective.check(*given)
    second_objective.check("parameters", "tpe", "none", "")


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        ('{"method": "tpe"}', "the search s: recipe is missing; restore the database of --storage, or name another"),
        ("7", "the search s: should be "),
        (json.dumps(dict.fromkeys(("recipe", "space", "method", "prune"), "") | {"seed": "3"}), "s: seed: should be "),
        ("{", "search s: is not valid JSON (Expecting property name"),
    ],
)
def test_a_definition_that_was_edited_is_refused_in_one_line(tmp_path, stored, says):
    from studies.search import searching

    searching.begin(asked(tmp_path))
    edit(tmp_path, "study_user_attributes", "search", stored)
    status, _, err = ended(sweep(tmp_path, "status", "s"))
    assert status == 2 and len(err.splitlines()) == 1 and says.removeprefix("search s") in err
    with pytest.raises(ConfigError) as error:
        searching.begin(asked(tmp_path))
    assert says in str(error.value)


def test_a_definition_of_an_earlier_version_goes_on_and_keeps_what_a_later_one_added(tmp_path):
    from studies.search import searching

    search = asked(tmp_path)
    searching.begin(search)
    earlier = {key: value for key, value in search.definition().items() if key not in ("population", "also")}
    edit(tmp_path, "study_user_attributes", "search", json.dumps(earlier | {"later": 1}))
    searching.begin(search)
    with contextlib.closing(sqlite3.connect(tmp_path / "studies.db")) as database:
        [[kept]] = database.execute("select value_json from study_user_attributes where key = 'search'")
    assert json.loads(kept) == search.definition() | {"later": 1}


@pytest.mark.parametrize(
    ("key", "stored", "says"),
    [
        ("seed", '"one"', "trial 0 of s: seed: should be a valid integer, but is 'one'; restore the database of --st"),
        ("config", "{", "a trial of s: is not valid JSON (Expecting property name"),
    ],
)
def test_a_trial_that_was_edited_is_refused_in_one_line(plain, tmp_path, key, stored, says):
    shutil.copy(plain / "studies.db", tmp_path)
    edit(tmp_path, "trial_user_attributes", key, stored)
    status, _, err = ended(sweep(tmp_path, "status", "s"))
    assert status == 2 and len(err.splitlines()) == 1 and says in err


def edit(folder, table: str, key: str, stored: str) -> None:
    """Replace the JSON of an attribute in the database."""
    with contextlib.closing(sqlite3.connect(folder / "studies.db")) as database, database:
        database.execute(f"update {table} set value_json = ? where key = ?", (stored, key))


def test_close_and_large_values_have_ticks_that_differ_inside_the_figure(pruned):
    """A parameter of whole numbers has ticks at whole numbers."""
    from optuna.distributions import FloatDistribution, IntDistribution
    from optuna.trial import create_trial

    from studies.report.plots import HEIGHT
    from studies.search import plots

    distributions = {"beta2": FloatDistribution(0.9985, 0.9995), "num_layers": IntDistribution(2, 3)}
    done = []
    for number in range(9):
        point = {"beta2": 0.9985 + 1e-4 * number, "num_layers": 2 + number % 2}
        values = [-12_345_000.0 + 5 * number, 1_234_567.0 - 100 * number]
        done.append(create_trial(params=point, distributions=distributions, values=values))
        done[-1].datetime_complete = datetime.datetime(2026, 1, 1)
    found = types.SimpleNamespace(
        done=done, trials=done, front=done, objectives=["loss", "seconds"], in_state=lambda state: []
    )
    for draw in (plots.draw_best, plots.draw_parameters, plots.draw_front):
        figure = drawn(draw, found, HEIGHT)
        for axis in [axis for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]:
            labels = [tick.get_text() for tick in axis.get_ticklabels() if tick.get_visible()]
            assert len(set(labels)) == len(labels) and not axis.get_offset_text().get_text(), labels
        if draw is plots.draw_parameters:
            assert {tick.get_text() for tick in figure.axes[1].get_xticklabels()} <= {"1", "2", "3", "4"}
