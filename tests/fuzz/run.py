# SPDX-License-Identifier: Apache-2.0
"""Fuzz readers: python tests/fuzz/run.py CASES [SEED [READER ...]]. Prints a JSON line for each."""

import importlib
import json
import os
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # readers need no accelerator
os.fsync = lambda descriptor: None  # a case writes dozens of small files, and no disk loses its power here

from tests.fuzz import harness  # noqa: E402


def load_readers() -> list[str]:
    """Import every file of readers; return the names of the readers."""
    for path in sorted(pathlib.Path(__file__).parent.glob("readers_*.py")):
        importlib.import_module(f"tests.fuzz.{path.stem}")
    return sorted(harness.READERS)


if __name__ == "__main__":
    names = load_readers()
    cases, seed = int(sys.argv[1]), int(sys.argv[2]) if sys.argv[2:] else 0
    for name in sys.argv[3:] or names:
        print(json.dumps(harness.fuzz(name, cases, seed)), flush=True)
