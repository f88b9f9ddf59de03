# SPDX-License-Identifier: Apache-2.0
"""The file study.json in the root of a study: which trial runs and how many have ended, for `pod.py`."""

import contextlib
import json
import pathlib
import time
from collections.abc import Iterable

from optuna.trial import FrozenTrial, TrialState

from checkpointing.bucket import path_of
from files.atomic import write_atomically
from studies.trials import title

FILE = "study.json"  # pods/studies.py reads it


def write(root: str, known: Iterable[FrozenTrial], running: FrozenTrial | None) -> None:
    """Write the progress of a study; a full disk or a bucket out of reach does not end the study.

    Args:
      known: the last trial of each configuration.
      running: the trial that begins now; None if none does.
    """
    states = [trial.state for trial in known]
    failed, ended = states.count(TrialState.FAIL), sum(state.is_finished() for state in states)
    content = {
        "trial": title(running) if running else "", "workdir": running.user_attrs["workdir"] if running else "",
        "time": time.time(), "done": ended - failed, "failed": failed, "left": len(states) - ended,
    }  # fmt: skip
    text = json.dumps(content).encode()
    with contextlib.suppress(OSError):
        if "://" in root:
            path_of(f"{root}/{FILE}").write_bytes(text)  # an object of a bucket is replaced as a whole
        else:
            pathlib.Path(root).mkdir(parents=True, exist_ok=True)
            write_atomically(pathlib.Path(root) / FILE, text)
