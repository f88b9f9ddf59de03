# SPDX-License-Identifier: Apache-2.0
"""sweep.py as its users meet it: one real trial of train.py, its status and page, and what is mistyped."""

import contextlib
import json
import pathlib
import sqlite3
import subprocess
import sys

import pytest

from configs.errors import ConfigError
from studies import suites
from tests.browser import Browser
from tests.studies.conftest import TINY, ended, needs_optuna, sweep
from tests.support import ROOT

ONE = TINY | {
    "model.vocab_size": 6, "model.max_length": 16, "model.puzzle_dim": 0, "model.dtype": "float32",
    "train.sequence_length": 16, "data.puzzle_size": 4, "data.puzzle_clues": 6,
}  # fmt: skip
STUDY = ["baseline", *[f"--config.{key}={value}" for key, value in ONE.items()]]


@pytest.mark.slow
@needs_optuna
def test_a_study_of_one_trial_runs_train_py_and_is_shown(tmp_path):
    status, out, err = ended(sweep(tmp_path, "run", *STUDY, "--budget=5", "--keep=best", "--price=2"))
    assert status == 0, err
    assert "baseline/baseline: done, eval_exact_accuracy " in out and "trm: 1 done, 0 failed, 0 left" in out
    folder = tmp_path / "runs" / "trm" / "baseline" / "baseline"
    assert "held-out exact" in (folder / "output.txt").read_text()
    queue = queue_in(tmp_path)
    (trial,) = queue.latest().values()
    about = trial.user_attrs
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert trial.value == [line for line in lines if line["kind"] == "eval"][-1]["eval_exact_accuracy"]
    assert about["checkpoint"] == f"{folder}/checkpoints/60" and about["status"] == 0
    assert about["config"]["train.steps"] == 60 and about["changes"]["train.steps"] == "60"
    assert 0 < about["goodput"] < 1 and 0 < about["chip_hours"] * 3600 == pytest.approx(about["wall_seconds"])
    assert len(about["code"]) == 12 and about["cost"] == pytest.approx(2 * about["chip_hours"])
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["60"] and about["checkpoint_bytes"] > 0
    assert "baseline/baseline: its chip-hours are not known; it runs alone to measure them" in out


def queue_in(folder: pathlib.Path, name: str = "trm"):
    """Return the queue of the study in a folder; begin it if there is none."""
    from studies.storage import open_storage
    from studies.trials import Queue

    return Queue(open_storage(f"sqlite:///{folder}/studies.db", create=True), name, "maximize", create=True)


def finished(folder: pathlib.Path, *, seeds: int) -> tuple:
    """Return (study, members, latest trials) of the group of averages, done without training; one failed."""
    from studies import trials

    study, names = suites.find("exp08-ema")
    members = suites.members(study, names, seeds=seeds)
    queue = queue_in(folder)
    queue.enqueue([trials.order_of(member, str(folder), "") for member in members])
    for member in members:
        trial = queue.claim_next({member.digest})
        decay, curve = member.values["optimizer.ema_decay"], {}
        if decay == 0.995:
            queue.finish(trial, None, {"reason": "the loss <is> nan", "status": 3}, {})
            continue
        for step in (100, 200):
            curve[step] = decay * step / 200 + 0.001 * member.seed
        queue.finish(trial, curve[200], {"chip_hours": 0.5, "cost": 1.5, "wall_seconds": 9.0}, curve)
    return study, members, queue


@needs_optuna
def test_the_page_answers_first_with_figures_and_errors_over_seeds(tmp_path):
    from studies.report import answers, page, summary

    study, members, queue = finished(tmp_path, seeds=3)
    (answer,) = answers.of_study(study, members, queue.latest())
    assert answer.sentence == (
        "e-0.9995 has the best exact accuracy, 1.0005 ± 0.0006, and a-off the worst, 0.0010 ± 0.0006, "
        "0.9995 apart; the spread over seeds alone explains up to 0.0026; d-0.999, 1.0000 ± 0.0006, is within the "
        "error of the best; 1 configuration failed, cancelled or refused."
    )
    shown = page.page(study, [answer])
    assert shown == page.page(study, [answer])
    assert shown.index(answer.sentence) < shown.index("<table>") < shown.index("<svg")
    assert "c-0.995: status 3: the loss &lt;is&gt; nan" in shown and "<script" not in shown
    lines = summary.lines(study, members, queue.latest(), queue.running())
    assert lines[2].split() == ["exp08-ema", "0", "0", "12", "3", "0", "0", "6.00", "$18.00"]
    file = tmp_path / "page.html"
    file.write_text(shown)
    browser = Browser(tmp_path / "profile")
    try:
        browser.call("Page.navigate", url=file.as_uri())
        browser.wait("document.querySelectorAll('svg').length == 1 && document.querySelector('.answer')")
        assert browser.errors == []
    finally:
        browser.close()


@needs_optuna
def test_one_seed_concludes_nothing(tmp_path):
    from studies.report import answers

    study, members, queue = finished(tmp_path, seeds=0)
    (answer,) = answers.of_study(study, members, queue.latest())
    assert "no conclusion from one seed" in answer.sentence


@needs_optuna
@pytest.mark.parametrize("url, says", [
    ("studies.db", "--storage=studies.db is not the URL of a database; use sqlite:///studies.db or postgresql://"),
    ("mysql://me:secret@host/x", "--storage: studies are kept in SQLite or PostgreSQL, not in mysql; use "),
    ("sqlite://", "--storage=sqlite:// names no file, which several processes could share; use "),
    ("sqlite:////none/x.db", "--storage=sqlite:////none/x.db: the folder /none does not exist; create it, or name"),
    ("postgresql://me:secret@127.0.0.1:1/x", "--storage=postgresql://me:***@127.0.0.1:1/x cannot be used: "),
])  # fmt: skip
def test_a_database_that_cannot_be_used_is_one_line_without_its_password(url, says):
    from studies.storage import open_storage

    with pytest.raises(ConfigError) as error:
        open_storage(url, create=True)
    assert str(error.value).startswith(says) and "\n" not in str(error.value) and "secret" not in str(error.value)


@needs_optuna
def test_a_damaged_file_is_to_be_restored(tmp_path):
    from studies.storage import open_storage

    (tmp_path / "studies.db").write_text("no database " * 100)
    url = f"sqlite:///{tmp_path}/studies.db"
    with pytest.raises(ConfigError) as error:
        open_storage(url, create=True)
    reason = "file is not a database; restore the file, or name another"
    assert str(error.value) == f"--storage={url} cannot be used: {reason}"


@needs_optuna
def test_a_storage_without_a_study_is_one_line_and_is_not_begun(tmp_path):
    status, out, err = ended(sweep(tmp_path, "status", "trm"))
    assert (status, out) == (2, "") and not list(tmp_path.iterdir())
    assert err == "error: --storage=sqlite:///studies.db: there is no such file; `sweep.py run NAME` begins one\n"


@pytest.mark.slow
@needs_optuna
def test_status_without_a_name_is_that_of_the_only_study(tmp_path):
    queue_in(tmp_path, "trm-mini")
    status, out, err = ended(sweep(tmp_path, "status"))
    assert status == 0 and out.startswith("study trm-mini\n"), err
    status, out, err = ended(sweep(tmp_path, "cancel", "exp08-ema"))
    assert err == "error: the storage has no study trm (all: trm-mini); `sweep.py run trm` begins it\n"
    queue_in(tmp_path, "trm-paper")
    status, out, err = ended(sweep(tmp_path, "status"))
    assert (status, out) == (2, "")
    assert err == "error: --storage has several studies; name one (all: trm-mini, trm-paper)\n"


@needs_optuna
def test_the_status_of_a_damaged_database_is_one_line(tmp_path):
    finished(tmp_path, seeds=1)
    with contextlib.closing(sqlite3.connect(tmp_path / "studies.db")) as database:
        ((page,),) = database.execute("SELECT rootpage FROM sqlite_master WHERE name = 'trials'")
        ((size,),) = database.execute("PRAGMA page_size")
    with (tmp_path / "studies.db").open("r+b") as file:
        file.seek((page - 1) * size)
        file.write(bytes(size))
    said = "error: --storage is damaged: database disk image is malformed; restore the file, or name another\n"
    assert ended(sweep(tmp_path, "status", "exp08-ema")) == (2, "", said)


def test_a_missing_package_is_one_line_with_the_command_that_installs_it():
    program = "import runpy, sys; sys.modules['optuna'] = None; sys.argv = ['sweep.py', 'status']; "
    program += "runpy.run_path('sweep.py', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr == "error: studies need the package optuna: run `make setup EXTRAS=studies`\n"


def test_a_plan_and_a_dry_run_need_no_database_and_write_nothing(tmp_path):
    status, out, err = ended(sweep(tmp_path, "run", "exp08-ema", "--dry-run", "--topology=v4-64"))
    assert status == 0, err
    assert "exp08-ema/b-0.99    8,138  0.26       $26.43" in out and "dry run: nothing was queued" in out
    assert not list(tmp_path.iterdir())


def test_a_plan_says_why_hours_are_unknown_and_a_group_without_configurations_is_refused(tmp_path):
    status, out, err = ended(sweep(tmp_path, "plan", "extra-beyond", "--topology=v4-64"))
    assert status == 0 and "1 trial: not known: only the data say how many steps their epochs have" in out, err
    status, _, err = ended(sweep(tmp_path, "run", "baseline", "--base=mini", "--dry-run"))
    assert status == 2 and err == "error: baseline has no configurations for --base=mini\n"


@pytest.mark.slow
@needs_optuna
def test_trials_with_other_seeds_are_mentioned_by_commands_that_do_not_mean_them(tmp_path):
    finished(tmp_path, seeds=2)
    plain = sweep(tmp_path, "status", "exp08-ema")
    same = sweep(tmp_path, "status", "exp08-ema", "--seeds=2")
    line = "5 more trials were started with other keys or --seeds; give what `run` was given"
    assert line in ended(plain)[1] and "more trials" not in ended(same)[1]
