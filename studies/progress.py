# SPDX-License-Identifier: Apache-2.0
"""The file study.json in the root of a study: which trial runs and how many have ended, for `pod.py`."""

import contextlib
import json
import pathlib
import time
from collections.abc import Sequence

from optuna.trial import FrozenTrial, TrialState

from checkpointing.bucket import path_of
from files.atomic import write_atomically
from studies.trials import has_failed, title, was_cancelled

FILE = "study.json"  # pods/studies.py reads it


def write(root: str, known: Sequence[FrozenTrial], running: FrozenTrial | None, count: int) -> None:
    """Write the progress of a study; a full disk or a bucket out of reach does not end the study.

    Args:
      known: the last trial of each configuration that has one.
      running: the trial that begins now; None if none does.
      count: number of configurations in all.
    """
    ended = sum(trial.state.is_finished() for trial in known)
    done, pruned = (sum(one.state == state for one in known) for state in (TrialState.COMPLETE, TrialState.PRUNED))
    failed, cancelled = sum(map(has_failed, known)), sum(map(was_cancelled, known))
    content = {
        "trial": title(running) if running else "", "workdir": running.user_attrs["workdir"] if running else "",
        "time": time.time(), "done": done, "pruned": pruned, "failed": failed, "cancelled": cancelled,
        "left": count - ended,
    }  # fmt: skip
    with contextlib.suppress(OSError):
        write_json(root, FILE, content)


def write_json(folder: str, name: str, content: dict) -> None:
    """Write a file of a folder, which may be in a bucket, as a whole; OSError if that fails."""
    text = json.dumps(content).encode()
    if "://" in folder:
        path_of(f"{folder}/{name}").write_bytes(text)  # an object of a bucket is replaced as a whole
    else:
        pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
        write_atomically(pathlib.Path(folder) / name, text)
