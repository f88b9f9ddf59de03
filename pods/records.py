# SPDX-License-Identifier: Apache-2.0
"""What was launched, kept on this side, and the state of the code that it was launched from."""

import json
import subprocess

from pods.settings import ROOT
from pods.transports import Transport, usage_error


def read(transport: Transport) -> dict:
    """Return what was launched last; PodError (status 2) where nothing was.

    Keys: subcommand, words (the program and its arguments), environment (variables beside the hosts' own), log (prefix
    of its name), workdir (None where it is no run of train.py), switches (given, on, not_yet; or None), recipe,
    accelerator, commit, changed (files that differed from it), time (Unix seconds).
    """
    if not transport.record_path.exists():
        raise usage_error(f"nothing was launched from here ({transport.record_path} is missing); `launch` first")
    return json.loads(transport.record_path.read_text())


def write(transport: Transport, record: dict) -> None:
    """Keep what was launched; the file is whole or absent."""
    transport.record_path.parent.mkdir(parents=True, exist_ok=True)
    partial = transport.record_path.with_suffix(".partial")
    partial.write_text(json.dumps(record, indent=1))
    partial.replace(transport.record_path)


def code_state() -> tuple[str, list[str]]:
    """Return the commit of the code here, and the files that differ from it; "" outside a git checkout."""
    commit = _git("rev-parse", "HEAD").strip()
    return commit, [line[3:] for line in _git("status", "--porcelain").splitlines()] if commit else []


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True).stdout
