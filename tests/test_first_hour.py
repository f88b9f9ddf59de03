# SPDX-License-Identifier: Apache-2.0
"""The times in docs/first_hour.md are those that benchmarks/first_hour.py measured."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIST = "import first_hour as f; [print(f.name_of(n, c), t, sep='\\t') for n, (c, t) in enumerate(f.commands(), 1)]"


def test_each_time_on_the_page_is_the_one_that_was_measured():
    listed = subprocess.check_output([sys.executable, "-c", LIST], cwd=ROOT / "benchmarks", text=True)
    on_page = dict(line.split("\t") for line in listed.splitlines())
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text().split("## first_hour\n")[1].split("\n## ")[0]
    measured = dict(re.findall(r"^\| (\d+\. .*) \| (\d+) \|$", results, re.MULTILINE))
    assert on_page == {command: f"{seconds} s" for command, seconds in measured.items()}
    assert len(on_page) > 10
