# SPDX-License-Identifier: Apache-2.0
"""Every recipe as it is resolved, written down: a change of a default or a recipe shows what it changes.

Where it is meant: .venv/bin/python train.py --config=configs/NAME.py --print_config > tests/configs/golden/NAME.txt
"""

import difflib

import pytest

from command_line import config_text
from configs import loading
from tests.support import RECIPES, ROOT


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_resolves_to_its_golden_text(recipe):
    file = ROOT / f"tests/configs/golden/{recipe}.txt"
    now = config_text(loading.load(f"configs/{recipe}.py", "", {})).splitlines()
    changes = difflib.unified_diff(file.read_text().splitlines(), now, "golden", "now", lineterm="", n=0)
    assert not (changes := list(changes)), "\n".join(changes)


def test_every_golden_text_has_its_recipe():
    folder = ROOT / "tests/configs/golden"
    assert {path.relative_to(folder).with_suffix("").as_posix() for path in folder.rglob("*.txt")} == set(RECIPES)
