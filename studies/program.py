# SPDX-License-Identifier: Apache-2.0
"""The process of a trial: train.py with the trial's flags. It needs no database."""

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import BinaryIO

from settings.loading import ROOT

TRAIN = (sys.executable, str(ROOT / "train.py"))
END_WITH_PARENT = (sys.executable, "-I", "-S", str(ROOT / "cluster" / "parent.py"))


def command_of(attributes: Mapping[str, object], program: Sequence[str]) -> list[str]:
    """Return the command that runs or resumes the trial with these user attributes."""
    topology = [f"--topology={attributes['topology']}"] if attributes["topology"] else []
    keys = [f"--config.{key}={value}" for key, value in attributes["changes"].items()]
    return [*program, f"--config={ROOT / attributes['recipe']}", f"--workdir={attributes['workdir']}", *topology, *keys]


def start(command: Sequence[str], output: BinaryIO | None = None) -> subprocess.Popen:
    """Start a command that ends with this process; the thread that calls this must live as long as the command.

    Args:
      output: file for what it prints; None: where this process prints.
    """
    return subprocess.Popen(
        [*END_WITH_PARENT, str(os.getpid()), *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
        start_new_session=True,
    )  # fmt: skip
