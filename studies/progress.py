# SPDX-License-Identifier: Apache-2.0
"""The file study.json in the root of a study: which trial runs and how many have ended, for `pod.py`."""

import collections
import contextlib
import json
import pathlib
import time
from collections.abc import Sequence

from optuna.trial import FrozenTrial

from checkpointing.bucket import failures_of, path_of
from files.atomic import write_atomically
from studies.trials import standing, title

FILE = "study.json"  # pods/studies.py reads it


def write(root: str, known: Sequence[FrozenTrial], running: FrozenTrial | None, count: int) -> None:
    """Write the progress of a study; a full disk or a bucket out of reach does not end the study.

    `known` has the last trial of each configuration that has one, and `count` is the number of all configurations.
    `running` is the trial that begins now; None if none does.
    """
    found = collections.Counter(map(standing, known))
    content = {
        "trial": title(running) if running else "", "workdir": running.user_attrs["workdir"] if running else "",
        "time": time.time(), **{name: found[name] for name in ("done", "pruned", "failed", "cancelled")},
        "left": count - len(known) + found["left"],
    }  # fmt: skip
    with contextlib.suppress(*failures_of(root)):
        write_json(root, FILE, content)


def write_json(folder: str, name: str, content: dict) -> None:
    """Write a file of a folder, which may be in a bucket, as a whole; `failures_of` has the errors."""
    text = json.dumps(content).encode()
    if "://" in folder:
        path_of(f"{folder}/{name}").write_bytes(text)  # an object of a bucket is replaced as a whole
    else:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(pathlib.Path(folder) / name, text)
