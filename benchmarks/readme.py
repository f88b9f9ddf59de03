# SPDX-License-Identifier: Apache-2.0
"""Does every command of README.md work, in this order, in a fresh copy of the tree?

The commands are read from the page and run as it shows them. Runs are shortened by the keys in SHORT. `make test` is
left out, since .ci/run runs it. Status 1: a command failed.
"""

import pathlib
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time

import support

FENCED = re.compile(r"^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
SHORT = {  # what a command gets in addition
    "train": "--config.train.steps=3 --config.train.eval_every=0 --config.evaluation.batches=1 "
    "--config.model.num_layers=1 --config.model.embed_dim=64 --config.model.mlp_dim=128 "
    "--config.train.sequence_length=64 --config.train.global_batch=16",
    "rehearse": "--advice_seconds=0",
    "generate": "",
}
NOT_COPIED = shutil.ignore_patterns(".git", ".venv", "__pycache__", "runs")


def commands() -> list[list[str]]:
    """Return the words of each command in the fenced blocks of the page."""
    lines = "".join(FENCED.findall((support.ROOT / "README.md").read_text())).splitlines()
    found = [shlex.split(line, comments=True) for line in lines if line.startswith(("make ", ".venv/bin/python "))]
    return [words for words in found if words != ["make", "test"]]


def shortened(words: list[str]) -> list[str]:
    """Return a command with the keys of SHORT."""
    if words[0] == "make":
        return [*words, f"ARGS={SHORT[words[1]]}"]
    return [*words, *shlex.split(SHORT[pathlib.Path(words[1]).stem])]


def main() -> None:
    """Run each command in a copy of the tree that has texts of its own."""
    found = commands()[:1] if support.QUICK else commands()
    figures = {"commands": len(found), "failed": 0}
    with tempfile.TemporaryDirectory() as name:
        tree = pathlib.Path(name) / "torus"
        shutil.copytree(support.ROOT, tree, ignore=NOT_COPIED)
        (tree / ".venv").symlink_to(support.ROOT / ".venv")
        for folder in ("my_texts", "new_texts"):
            (tree / folder).mkdir()
            for number in range(20):
                (tree / folder / f"{number}.txt").write_text(f"{folder} {number} has some words.\n" * 200)
        for words in found:
            began = time.monotonic()
            done = subprocess.run(shortened(words), cwd=tree, capture_output=True, text=True)
            verdict = "works" if done.returncode == 0 else f"status {done.returncode}"
            print(f"{shlex.join(words)}: {verdict} ({time.monotonic() - began:.0f} s)", flush=True)
            if done.returncode:
                figures["failed"] += 1
                print(done.stdout[-2000:], done.stderr[-2000:], sep="\n")
    support.finish("readme", figures)
    sys.exit(figures["failed"] > 0)


if __name__ == "__main__":
    main()
