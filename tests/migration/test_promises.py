# SPDX-License-Identifier: Apache-2.0
"""PROMISES.md: whole, its rows counted, and every check that it names is run."""

import collections
import os
import re
import subprocess
import sys

from tests.support import LEFT_OUT, ROOT

ITEMS = {"A": 30, "B": 23, "C": 23, "D": 34}  # of the list of what the earlier systems promised
STATES = ("runs", "answered", "not yet")
PAGE = (ROOT / "PROMISES.md").read_text().splitlines()
TABLE = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE if line.startswith("| ")]
ROWS = [row for row in TABLE if re.fullmatch(r"[A-D]\d+", row[0])]  # item, promised, here, state, shown by


def checks_of(row: list[str]) -> list[str]:
    """Return node ids of pytest."""
    return [f"tests/{name.strip('`')}" for name in row[4].split("<br>") if name]


def test_every_item_has_one_row():
    wanted = [f"{letter}{number}" for letter, last in ITEMS.items() for number in range(1, last + 1)]
    assert [row[0] for row in ROWS] == wanted


def test_a_row_has_what_its_state_asks_for():
    for row in ROWS:
        assert len(row) == 5 and row[1] and row[3] in STATES, row
        assert row[3] == "not yet" or row[2], row
        assert row[3] != "runs" or checks_of(row), row
        assert row[3] != "not yet" or not checks_of(row), row
        assert all("::test_" in check for check in checks_of(row)), row


def test_rows_are_counted():
    titles = [line.removeprefix("## ") for line in PAGE if line.startswith("## ")]
    wanted = []
    for name, letters in [*zip(titles, ITEMS, strict=True), ("all", "".join(ITEMS))]:
        found = collections.Counter(row[3] for row in ROWS if row[0][0] in letters)
        wanted.append([name, *(str(found[state]) for state in STATES), str(found.total())])
    assert [row for row in TABLE if row[0] in [*titles, "all"]] == wanted


def test_the_adapters_load_without_jax():
    program = "import migration.valkyrie, sys; print(sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"jax", "tensorflow", "flax"} & set(eval(done.stdout))


def test_every_check_is_run(request):
    """In this session, or by `make test-all` if they are slow; the rest in a process of its own."""
    here = {item.nodeid for item in request.session.items} | request.config.stash.get(LEFT_OUT, set())
    here |= {name.partition("[")[0] for name in here}
    checks = sorted({check for row in ROWS for check in checks_of(row)} - here)
    if checks:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=auto", "--maxprocesses=8", "--dist=worksteal"]
        done = subprocess.run([*command, *checks], cwd=ROOT, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr
        assert " skipped" not in done.stdout.splitlines()[-1], "a check that is skipped shows nothing"
