# SPDX-License-Identifier: Apache-2.0
"""What is asked before trials are launched on several hosts: a durable root, and an earlier small run."""

import dataclasses
import shlex

import pytest

from configs.errors import ConfigError
from files.atomic import write_atomically
from studies import running, suites
from tests.studies.conftest import ended, needs_optuna, sweep
from tests.studies.test_queue import orders, queue_of

pytestmark = needs_optuna
GROUP = {"TPU_COORDINATOR_ADDRESS": "here:1234", "TPU_WORKER_ID": "0", "TPU_WORKER_COUNT": "2"}


@pytest.mark.parametrize("topology, environment, several", [
    ("", {}, False), ("v4-8", {}, False), ("v4-16", {}, True), ("2xv4-8", {}, True), ("", GROUP, True),
])  # fmt: skip
def test_several_hosts_need_a_root_that_they_share(monkeypatch, topology, environment, several):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    group = running.group_of_hosts(5.0)
    running.check_root("gs://mine/runs", topology, group)
    if not several:
        running.check_root("/tmp/runs", topology, group)
        return
    with pytest.raises(ConfigError, match=r"^--root=/tmp/runs is a local folder, which .*; use --root=gs://"):
        running.check_root("/tmp/runs", topology, group)


def test_a_first_launch_names_the_small_run_and_begins_nothing(tmp_path):
    status, out, err = ended(sweep(tmp_path, "run", "exp08-ema", "--base=mini", "--topology=v4-64", "--allow_local"))
    assert (status, out) == (2, "") and not list(tmp_path.iterdir())
    assert err.startswith(
        "error: configs/trm/sudoku_mini.py has not run yet, and v4-64 has 8 hosts; run it on a smaller slice or in "
        f"simulation: .venv/bin/python train.py --config=configs/trm/sudoku_mini.py --topology=v4-8 "
        f"--workdir={tmp_path}/runs/trm-mini/small --config."
    )
    assert " --config.train.steps=20 " in err and err.endswith("; or --skip_small\n")


def asked(folder) -> tuple:
    """Return the arguments of the check for a study in a folder."""
    study, names = suites.find("exp08-ema", "mini")
    members = suites.members(study, names, topology="v4-64")
    return members, "v4-64", str(folder / "runs"), f"sqlite:///{folder}/studies.db"


def test_the_small_run_says_once_how_long_it_trains_and_its_values_are_words_of_a_shell():
    from studies.cost import guards

    study, names = suites.find("exp08-ema", "mini")
    member = suites.members(study, names, topology="v4-64")[0]
    typed = {"train.epochs": "3", "layout.changes": "100: fsdp 4"}
    words = shlex.split(guards.small_run(dataclasses.replace(member, changes=typed), "v4-64", "/runs"))
    assert words[-2:] == ["--config.train.steps=20", "--config.layout.changes=100: fsdp 4"]
    assert not any("epochs" in word for word in words)


def test_a_trial_that_is_done_is_enough_and_one_that_failed_is_not(tmp_path):
    from studies.cost import guards

    queue = queue_of(tmp_path)
    queue.enqueue(orders(tmp_path))
    first, second = queue.latest()
    queue.finish(queue.claim_next({first}), None, {"reason": "failed"}, {})
    with pytest.raises(ConfigError, match="has not run yet"):
        guards.check_small_run(*asked(tmp_path))
    queue.finish(queue.claim_next({second}), 1.0, {}, {})
    guards.check_small_run(*asked(tmp_path))


def test_the_small_run_that_the_line_names_is_enough_when_it_has_finished(tmp_path):
    from studies.cost import guards

    small = tmp_path / "runs" / "small"
    small.mkdir(parents=True)
    write_atomically(small / "run.json", b'{"recipe": "configs/trm/sudoku_mini.py"}')
    with pytest.raises(ConfigError, match="has not run yet"):
        guards.check_small_run(*asked(tmp_path))
    (small / "summary.txt").write_text("finished")
    guards.check_small_run(*asked(tmp_path))
    write_atomically(small / "run.json", b'{"recipe": "configs/tiny.py"}')
    with pytest.raises(ConfigError, match="has not run yet"):
        guards.check_small_run(*asked(tmp_path))


def test_a_rehearsal_by_the_user_is_enough(tmp_path, monkeypatch):
    from studies.cost import guards, rehearsals

    monkeypatch.setattr(rehearsals, "cached", lambda values, topology: topology == "v4-64")
    guards.check_small_run(*asked(tmp_path))
