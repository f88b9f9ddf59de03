# SPDX-License-Identifier: Apache-2.0
"""Mutated foreign data is read right or refused in one line, in bounded time; benchmarks/fuzz.py tries more of it."""

import json
import os

import pytest

from tests import warm
from tests.fuzz.harness import READERS
from tests.fuzz.run import load_readers

CASES = 10
FILES = sorted({READERS[name].read.__module__ for name in load_readers()})  # a process for the readers of each


@pytest.mark.parametrize("file", FILES)
def test_readers_withstand_mutated_contents(file):
    names = [name for name, reader in READERS.items() if reader.read.__module__ == file]
    process = warm.start(["tests/fuzz/run.py", str(CASES), "0", *names], dict(os.environ))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-2000:]
    found = [json.loads(line) for line in out.splitlines() if line.startswith("{")]
    assert [each["reader"] for each in found] == names
    for each in found:
        assert each["failures"] == [], each["reader"]
        assert each["accepted"] + each["refused"] == each["cases"] > 0, each["reader"]
