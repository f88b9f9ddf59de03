# SPDX-License-Identifier: Apache-2.0
"""What a message advises can be typed as it stands: keys have their --config. in front."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from configs import base
from settings.keys import flat

ROOT = Path(__file__).parents[2]
OTHERS = "tests", "benchmarks"  # their strings are not advice for users
KEYS = "|".join(re.escape(key) for key in flat(base.get_config()))
BARE = re.compile(rf"\b(?:use|try|set) (?:{KEYS})=")


def texts_of(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, text) for each string of a file except docstrings, with "{}" in place of inserted values."""
    tree = ast.parse(path.read_text())
    parts = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(part.value if isinstance(part, ast.Constant) else "{}" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in parts | docstrings:
            yield node.lineno, node.value


def test_advice_names_keys_as_they_are_typed():
    rooms = [folder for folder in ROOT.iterdir() if folder.is_dir() and folder.name not in OTHERS]
    files = [*ROOT.glob("*.py"), *(file for room in rooms if room.name[0] != "." for file in room.rglob("*.py"))]
    assert len(files) > 100
    bare = [f"{path.name}:{line}: {text}" for path in files for line, text in texts_of(path) if BARE.search(text)]
    assert not bare, "\n".join(bare)
