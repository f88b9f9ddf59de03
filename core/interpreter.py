# SPDX-License-Identifier: Apache-2.0
"""Restarts a command that another Python started with the Python of the workspace, which has the packages.

It imports nothing but the standard library, and runs in Python 3.10 too, which the images of TPU VMs have.
"""

import contextlib
import os
import pathlib
import shlex
import sys
from typing import NoReturn

ENVIRONMENT = pathlib.Path(__file__).resolve().parent.parent / ".venv"


def call_of(command: str) -> str:
    """Return how a shell calls a command of the workspace, such as generate.py, from the current folder."""
    workspace = ENVIRONMENT.parent
    with contextlib.suppress(FileNotFoundError):  # the current folder has been deleted
        if pathlib.Path.cwd() == workspace:
            return f".venv/bin/python {command}"
    return shlex.join([str(ENVIRONMENT / "bin" / "python"), str(workspace / command)])


def restart(missing: ModuleNotFoundError) -> NoReturn:
    """Replace this process by the same command in .venv's Python.

    Exit with one line if that is where it failed, or if the program came from standard input, which has been read.
    """
    python = ENVIRONMENT / "bin" / "python"
    is_there = sys.executable == str(python) or pathlib.Path(sys.prefix).resolve() == ENVIRONMENT.resolve()
    if is_there or not python.exists() or sys.argv[0] in ("", "-"):
        sys.exit(f"error: Python package {missing.name} is not installed here; run `make setup`, then .venv/bin/python")
    sys.stdout.flush()
    os.execv(python, [str(python), *sys.orig_argv[1:]])
