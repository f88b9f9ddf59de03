# SPDX-License-Identifier: Apache-2.0
"""Mutated foreign data is read right or refused in one line, in bounded time; benchmarks/fuzz.py tries more of it."""

import json
import os

import pytest

from tests import warm
from tests.fuzz.harness import READERS
from tests.fuzz.run import load_readers

CASES = 300


@pytest.mark.parametrize("name", load_readers())
def test_a_reader_withstands_mutated_contents(name):
    process = warm.start(["tests/fuzz/run.py", str(CASES), "0", name], dict(os.environ))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err[-2000:]
    found = json.loads(out.splitlines()[-1])
    assert found["failures"] == []
    assert found["accepted"] + found["refused"] == CASES and READERS[name]
