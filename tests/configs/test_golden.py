# SPDX-License-Identifier: Apache-2.0
"""Recipes as they are resolved, written down: a change of a default or a recipe shows what it changes.

Where it is meant: .venv/bin/python train.py --config=configs/NAME.py --print_config > tests/configs/golden/NAME.txt
A recipe has its text from when README.md or a page of docs/ names it; until then it is one file, and nothing else.
"""

import difflib
import re

import pytest

from core.command_line import config_text
from settings import loading
from tests.support import RECIPES, ROOT

FOLDER = ROOT / "tests/configs/golden"
WRITTEN_DOWN = sorted(path.relative_to(FOLDER).with_suffix("").as_posix() for path in FOLDER.rglob("*.txt"))


@pytest.mark.parametrize("recipe", WRITTEN_DOWN)
def test_a_recipe_resolves_to_its_golden_text(recipe):
    file = FOLDER / f"{recipe}.txt"
    now = config_text(loading.load(f"configs/{recipe}.py", "", {})).splitlines()
    changes = difflib.unified_diff(file.read_text().splitlines(), now, "golden", "now", lineterm="", n=0)
    assert not (changes := list(changes)), "\n".join(changes)


def test_what_is_written_down_is_there_and_what_the_pages_name_is_written_down():
    pages = "".join(path.read_text() for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")))
    named = {recipe for recipe in RECIPES if re.search(rf"`{recipe}`|configs/{recipe}\.py", pages)}
    assert len(named) > 15 and named <= set(WRITTEN_DOWN) <= set(RECIPES)
