# SPDX-License-Identifier: Apache-2.0
"""Pods of real processes on this machine, in a folder of the test's own, asked through pod.py."""

import contextlib
import dataclasses
import importlib.metadata
import io
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
from unittest import mock

import pod
from tests.support import ROOT

SECONDS = 120  # for anything that is waited for
SMALL = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 48,
    "model.vocab_size": 300, "model.max_length": 32, "train.sequence_length": 32, "train.global_batch": 8,
    "train.log_every": 1, "train.eval_every": 0, "evaluation.sample_tokens": 0,
    "optimizer.name": "sgd", "optimizer.schedule": "constant", "optimizer.warmup_steps": 2, "optimizer.clip_norm": 0.0,
    "data.tokenizer": "byte", "data.holdout_fraction": 0.2, "logging.tensorboard": "false", "logging.report": "false",
}  # fmt: skip
LAUNCH = {  # a record of pods/records.py
    "subcommand": "launch", "words": ["true"], "environment": {}, "log": "train_worker", "workdir": None,
    "switches": None, "recipe": "configs/tiny.py", "accelerator": "v4-8", "commit": "", "changed": [], "time": 0.0,
}  # fmt: skip


@dataclasses.dataclass
class Done:
    """How a call of pod.py ended and what it said."""

    status: int
    stdout: str
    stderr: str

    @property
    def last_line(self) -> str:
        return self.stderr.splitlines()[-1] if self.stderr else ""


class LocalPod:
    """A pod below `folder`; `code` is the clone whose pod.py is run, by default this one, in this process."""

    def __init__(self, folder: pathlib.Path, *, code: pathlib.Path = ROOT, **variables: str):
        self.folder, self.code = folder / "pods" / "mine", code
        self.variables = {"TRANSPORT": "local", "POD_ROOT": str(folder / "pods"), "NAME": "mine"} | variables
        kept = {name: os.environ[name] for name in os.environ if not name.startswith("ENABLE_")}
        self.environment = kept | self.variables | {"XDG_CACHE_HOME": str(folder / "cache")}

    def run(self, *words: str, **variables: str) -> Done:
        """Type a command line."""
        environment = self.environment | variables
        if self.code != ROOT:
            command = [sys.executable, "pod.py", *words]
            done = subprocess.run(command, cwd=self.code, env=environment, capture_output=True, text=True)
            return Done(done.returncode, done.stdout, done.stderr)
        stdout, stderr = io.StringIO(), io.StringIO()
        with (
            mock.patch.dict(os.environ, environment, clear=True),
            contextlib.chdir(ROOT),
            contextlib.redirect_stdout(stdout),
            contextlib.redirect_stderr(stderr),
        ):
            return Done(pod.run(list(words)), stdout.getvalue(), stderr.getvalue())

    def start(self, *words: str) -> subprocess.Popen:
        """Type a command line that goes on for a while."""
        return subprocess.Popen(
            [sys.executable, "pod.py", *words], cwd=self.code, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def code_of(self, worker: int) -> pathlib.Path:
        return self.folder / f"worker-{worker}" / "torus"

    def log(self, worker: int, name: str = "train_worker") -> str:
        return (self.code_of(worker) / "logs" / f"{name}_{worker}.out").read_text()

    def groups(self) -> list[int]:
        """Return the process groups that were launched, of the workers that have one."""
        files = sorted(self.folder.glob("worker-*/torus/run.pid"))
        return [int(text) for file in files if (text := file.read_text())]  # a shell makes a file before it writes

    def status(self) -> dict:
        return json.loads(self.run("status", "--json").stdout)

    def metrics(self, run: str = "tiny") -> list[dict]:
        file = self.folder / "shared" / run / "metrics.jsonl"
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def steps(self) -> list[int]:
        return [line["step"] for line in self.metrics() if line["kind"] == "train"]

    def end(self) -> None:
        """End what is left, by the numbers of the groups that this pod launched."""
        for group in self.groups():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(group, signal.SIGKILL)


def alive(group: int) -> bool:
    """Whether a process group has a process that is not a zombie."""
    listing = subprocess.run(["ps", "-A", "-o", "pgid=,stat="], capture_output=True, text=True).stdout
    return any(line.split()[0] == str(group) and line.split()[1][0] != "Z" for line in listing.splitlines())


def wait_until(condition, what: str, seconds: float = SECONDS) -> None:
    """Poll until condition() holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"waited {seconds} s in vain for {what}"
        time.sleep(0.1)


def small_run(folder: pathlib.Path, **changes) -> list[str]:
    """Return flags of pod.py for a run of seconds, on a text below `folder`."""
    (folder / "texts").mkdir(exist_ok=True)
    for index in range(12):
        words = " ".join(f"{number * (index + 3)} is {number} times {index + 3};" for number in range(60))
        (folder / "texts" / f"{index}.txt").write_text(words)
    values = SMALL | {"data.path": f"{folder}/texts/*.txt"} | {k.replace("__", "."): v for k, v in changes.items()}
    return ["--config=configs/tiny.py", *[f"--config.{key}={value}" for key, value in values.items()]]


def committed_clone(folder: pathlib.Path) -> pathlib.Path:
    """Return a clone of this code whose present state, with what is not committed yet, is a commit.

    Its locks name the versions that are installed, whichever these are.
    """
    code = folder / "code"
    git = ["git", "-C", str(code), "-c", "user.name=test", "-c", "user.email=test@localhost"]
    subprocess.run(["git", "clone", "--quiet", "--local", str(ROOT), str(code)], check=True)
    names = subprocess.run(
        ["git", "ls-files", "-z", "-m", "-o", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    ).stdout
    for name in filter(None, names.split("\0")):
        (code / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_file():
            (code / name).write_bytes((ROOT / name).read_bytes())
    installed = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    for lock in code.glob("requirements*.lock"):
        lock.write_text(
            re.sub(r"(?m)^([\w.-]+)==([^\s;]+)", lambda at: f"{at[1]}=={installed.get(at[1], at[2])}", lock.read_text())
        )
    (code / ".git" / "info" / "exclude").write_text(".venv\n")
    subprocess.run([*git, "add", "--all"], check=True)
    subprocess.run([*git, "commit", "--quiet", "--allow-empty", "--message=as it stands"], check=True)
    return code
