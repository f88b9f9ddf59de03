# SPDX-License-Identifier: Apache-2.0
"""Readers of pods/hosts.py to fuzz: shell text, with a curl that says the content."""

import os
import pathlib
import re
import subprocess
import tempfile

from pods import hosts
from tests.fuzz.harness import reader


class Refusal(Exception):
    """What was read is refused, in a line."""

    exit_status = 1


@reader("the number of a worker", lambda: [b"0", b"15", b"255"])
def read_worker_number(content: bytes, folder) -> None:
    program = pathlib.Path(tempfile.gettempdir(), f"curl-{os.getpid()}", "curl")
    program.parent.mkdir(exist_ok=True)
    if not program.exists():
        program.write_text("#!/bin/sh\nexec cat content\n")
        program.chmod(0o755)
    (folder / "content").write_bytes(content)
    variables = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(folder)}
    command = ["sh", "-c", f'{hosts.WORKER}; echo "$W" > "logs_$W.out"']
    done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True)
    made = {path.name for path in folder.iterdir()} - {"content"}
    if done.returncode:
        assert not made
        raise Refusal(done.stderr.splitlines()[-1])
    [name] = made
    assert re.fullmatch(r"logs_[0-9]{1,9}\.out", name)
