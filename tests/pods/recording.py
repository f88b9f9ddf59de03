# SPDX-License-Identifier: Apache-2.0
"""pod.py with a fake gcloud that records its calls: tests/pods/fake_gcloud."""

import contextlib
import dataclasses
import io
import json
import os
import pathlib
import re
import subprocess
import sys
from unittest import mock

import pod
from tests.support import ROOT

HERE = pathlib.Path(__file__).parent
FLAGS = json.loads((HERE / "gcloud_flags.json").read_text())
WORKERS = re.compile(r"all|\d+(-\d+)?(,\d+)*")
POD, BASE, OPTIMIZED = "pod.py", "scripts/gcloud_tpu_multihost.sh", "scripts/gcloud_tpu_multihost_optimized.sh"


@dataclasses.dataclass
class Done:
    """How a call of pod.py ended, and what gcloud was asked meanwhile."""

    status: int
    stdout: str
    stderr: str
    calls: list[dict]

    @property
    def argvs(self) -> list[list[str]]:
        return [call["argv"] for call in self.calls]

    @property
    def last_line(self) -> str:
        return self.stderr.splitlines()[-1] if self.stderr else ""


class Recorder:
    """A fake gcloud first in PATH; each call of pod.py is checked against the flags that gcloud knows."""

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        (folder / "bin").mkdir()
        (folder / "bin" / "gcloud").symlink_to(HERE / "fake_gcloud")
        (folder / "bin" / "curl").write_text('#!/bin/sh\nprintf %s "$FAKE_AGENT_WORKER_NUMBER"\n')  # of a host
        (folder / "bin" / "curl").chmod(0o755)
        self.log = folder / "calls.jsonl"
        self.environment = {
            "PATH": os.pathsep.join(
                [str(folder / "bin"), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]]
            ),
            "HOME": str(folder / "home"),
            "FAKE_GCLOUD": str(folder),
            "ZONE": "us-central2-b",
            "PROJECT": "my-project",
            "POD_ROOT": str(folder / "pods"),
            "RETRY_SECONDS": "0.01",
            "POLL_SECONDS": "0.01",
        }

    def run(self, *words: str, entry: str = POD, **environment: str) -> Done:
        """Type a command line; variables set to "-" are unset."""
        variables = {name: value for name, value in (self.environment | environment).items() if value != "-"}
        self.log.unlink(missing_ok=True)
        ended = self._here(list(words), variables) if entry == POD else self._process(entry, words, variables)
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        calls = [json.loads(line) for line in lines]
        for call in calls:
            check_flags(call["argv"])
        return Done(*ended, calls)

    def _here(self, words: list[str], variables: dict[str, str]) -> tuple[int, str, str]:
        """Run pod.py in this process, which is quicker."""
        stdout, stderr = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, variables, clear=True),
            contextlib.chdir(ROOT),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            return pod.run(words), stdout.getvalue(), stderr.getvalue()

    def _process(self, entry: str, words: tuple[str, ...], variables: dict[str, str]) -> tuple[int, str, str]:
        done = subprocess.run([ROOT / entry, *words], env=variables, capture_output=True, text=True, cwd=ROOT)
        return done.returncode, done.stdout, done.stderr


def check_flags(argv: list[str]) -> None:
    """Assert that gcloud knows the verb and each of its flags, written as it takes them."""
    verb = next((verb for verb in FLAGS["verbs"] if argv[: len(verb.split())] == verb.split()), None)
    assert verb, f"gcloud has no {argv[:4]}"
    known = [FLAGS["everywhere"], FLAGS["verbs"][verb]]
    values = {flag for table in known for flag in table["values"].split()}
    switches = {flag for table in known for flag in table["switches"].split()}
    for word in argv:
        flag, equals, value = word.partition("=")
        if flag.startswith("-"):
            assert flag in (values if equals else switches), f"{word} is not a flag of {verb}"
        if flag == "--worker":
            assert WORKERS.fullmatch(value), word
