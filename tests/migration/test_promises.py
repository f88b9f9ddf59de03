# SPDX-License-Identifier: Apache-2.0
"""The table of promises: whole, shown as a page, and every check that it names is run."""

import os
import subprocess
import sys

from migration import promises
from tests.support import ROOT

ITEMS = {"A": 30, "B": 23, "C": 23, "D": 34}  # of the list of what the earlier systems promised


def test_the_page_is_what_the_table_gives():
    assert promises.PAGE.read_text() == promises.page(), "make it anew: .venv/bin/python -m migration.promises"


def test_every_item_has_one_row():
    wanted = [f"{letter}{number}" for letter, last in ITEMS.items() for number in range(1, last + 1)]
    assert [row.item for row in promises.ROWS] == wanted


def test_a_row_has_what_its_state_asks_for():
    for row in promises.ROWS:
        assert row.what and row.state in promises.STATES, row
        assert row.state != "runs" or (row.ours and row.checks), row
        assert row.state != "answered" or (row.ours and row.note), row
        assert row.state != "not yet" or not row.checks, row
        assert not set("|\n") & set(row.what + row.ours + row.note), row
        assert all(check.startswith("tests/") and "::test_" in check for check in row.checks), row


def test_the_table_and_the_adapters_load_without_jax():
    program = "import migration.promises, migration.valkyrie, sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"jax", "tensorflow", "flax"} & set(eval(done.stdout))


def test_every_check_is_run(request):
    """In this session, where the whole suite is run; else those that are missing, in a process of their own."""
    here = {item.nodeid for item in request.session.items}
    here |= {name.partition("[")[0] for name in here}
    checks = sorted({check for row in promises.ROWS for check in row.checks} - here)
    if checks:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal"]
        done = subprocess.run([*command, *checks], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
        assert " skipped" not in done.stdout.splitlines()[-1], "a check that is skipped shows nothing"
