# SPDX-License-Identifier: Apache-2.0
"""The transport for a pod on this machine: real processes in place of hosts, with the same shell commands.

A worker is the folder POD_ROOT/NAME/worker-I, which serves as the host's home folder. The processes that one call
starts on several workers form one JAX process group (JAX_COORDINATOR_ADDRESS). Workers share this machine's caches.
"""

import contextlib
import dataclasses
import os
import pathlib
import random
import re
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Annotated, NotRequired

import pydantic

from configs import topologies
from files.json_reader import Object
from pods import hosts, records
from pods.calls import kill_groups, no_answer
from pods.errors import PodError, usage_error
from pods.settings import LARGEST, Settings, worker_numbers
from pods.transports import Deletion, Result, expect_success
from reporting.display import counted
from settings.loading import ROOT

INHERITED = (  # variables that workers inherit; a real host would not see the others either
    r"PATH|LANG|LC_\w+|TERM|TZ|USER|LOGNAME|SHELL|TMPDIR|\w+_proxy|\w+_PROXY|SSL_\w+|HF_\w+|XLA_FLAGS"
    r"|JAX_PLATFORMS|JAX_COMPILATION_CACHE_DIR|JAX_PERSISTENT_\w+|TF_\w+"
)
PORTS = range(20000, 32000)  # below the system's ephemeral ports
DELETE_GRACE_SECONDS = 20
DEVICE_FLAG = "--xla_force_host_platform_device_count"
UNREACHABLE = 'echo "its folder is missing"; exit 255'  # the status of ssh for an unreachable host


class Description(Object):
    """The content of pod.json."""

    state: str
    acceleratorType: str
    workers: Annotated[int, pydantic.Field(ge=1, le=LARGEST["workers"])]
    health: NotRequired[str]


class Local:
    """The transport `local`; `folder` holds everything of the pod, and `shared` serves as its bucket."""

    def __init__(self, settings: Settings):
        self.settings, self.name = settings, settings.name
        self.folder = settings.pod_folder.absolute()
        self.description, self.shared = self.folder / "pod.json", self.folder / "shared"
        self.code = settings.repo_dir.removeprefix("~/")
        if self.code.startswith(("/", "~")) or ".." in pathlib.Path(self.code).parts:
            raise usage_error(f"REPO_DIR={settings.repo_dir} is outside a local worker's home; use ~/torus")

    @property
    def num_workers(self) -> int:
        """The number of workers of the existing pod, else of the one that `create` would make."""
        if pod := self.describe():
            return pod["workers"]
        topology = topologies.get(self.settings.accel, "ACCEL")
        workers = self.settings.workers or topology.hosts
        if workers < 1 or topology.chips % workers:
            raise usage_error(f"--workers={workers} does not divide the {topology.chips} chips of {topology.name}")
        return workers

    def describe(self) -> dict | None:
        return records.read_kept(self.description, Description) if self.description.exists() else None

    def found(self) -> dict:
        if (pod := self.describe()) is None:
            raise PodError(f"there is no pod {self.name} in {self.folder}; `create` it first")
        return pod

    def versions(self) -> None:
        """Print the accelerators that this machine can simulate."""
        print(f"accelerators that this machine can simulate: {', '.join(topologies.SLICES)}")

    def create(self) -> str:
        """Create the workers' folders with the current code; the remains of an interrupted create are removed.

        Raises PodError if the workers cannot share the chips evenly, their folder cannot be made, or git fails.
        """
        if self.describe():
            return f"{self.name} exists already"
        workers = self.num_workers
        if self.settings.dry_run:
            return f"dry run: would create {workers} workers in {self.folder}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise usage_error(f"POD_ROOT: {self.folder}: {error.strerror}; name a folder that can be written") from None
        for index in range(workers):
            if self._home(index).exists():
                shutil.rmtree(self._home(index))
            self._put_code(index)
        self.shared.mkdir(exist_ok=True)
        pod = {"name": self.name, "state": "READY", "health": "HEALTHY", "acceleratorType": self.settings.accel}
        records.write_json(self.description, pod | {"workers": workers, "transport": "local"})
        return f"{self.name}: created, {counted(workers, 'worker')} in {self.folder}"

    def wait(self) -> str:
        self.found()
        return f"{self.name} is READY"

    def delete(self) -> Deletion:
        """Stop all programs and remove the workers; `shared`, with checkpoints, remains, as a bucket would.

        It finds the workers by their folders, because an interrupted create leaves no pod.json.
        """
        found = ((re.fullmatch(r"worker-(\d+)", path.name), path) for path in self.folder.glob("worker-*"))
        homes = {int(name[1]): path for name, path in found if name}
        if not homes and not self.description.exists():
            return Deletion(f"{self.name} does not exist; nothing to delete", existed=False)
        if self.settings.dry_run:
            return Deletion(f"dry run: would stop all programs in {self.folder} and remove the workers")
        grace = min(self.settings.grace_seconds, DELETE_GRACE_SECONDS)
        self._run_on(sorted(homes), hosts.stop(dataclasses.replace(self.settings, grace_seconds=grace)), show=False)
        self.description.unlink(missing_ok=True)
        for home in homes.values():
            shutil.rmtree(home, ignore_errors=True)
        for folder in (self.shared, self.folder):
            with contextlib.suppress(OSError):  # it is not empty
                folder.rmdir()
        kept = f"; {self.shared} remains" if self.shared.exists() else ""
        return Deletion(f"{self.name}: deleted{kept}")

    def put_code(self) -> None:
        """Copy the current commit and changed files to every worker's code, and link the .venv of this process."""
        for index in range(self.found()["workers"] if not self.settings.dry_run else 0):
            self._put_code(index)

    def run(
        self, command: str, *, worker: str = "all", show: bool = True, output_directory: str = "",
        together: bool = True, limit_s: float | None = None,
    ) -> list[Result]:  # fmt: skip
        """Run a command as one process group; a worker without a folder has status 255, as with ssh."""
        workers = worker_numbers(worker, self.num_workers)
        if self.settings.dry_run:
            print(shlex.join(["bash", "-c", command]))
            return [Result(index, 0) for index in workers]
        self.found()
        results = self._run_on(workers, command, show, limit_s)
        for result in results if output_directory else ():
            pathlib.Path(output_directory, f"{result.worker}.log").write_text(result.output)
        return results

    def run_each(self, command: str, *, together: bool = False, limit_s: float | None = None) -> list[Result]:
        return self.run(command, show=False, limit_s=limit_s)

    def copy(self, source: str, target: str, *, worker: str = "all", recurse: bool = True) -> None:
        """Copy with `cp`; an absolute path of a worker is below worker-I/root."""
        workers, cp = worker_numbers(worker, self.num_workers), ["cp", *(["-r"] if recurse else [])]
        if self.settings.dry_run:
            print(shlex.join([*cp, source, target]))
            return
        self.found()
        if self._is_remote(source) and len(workers) > 1:
            raise PodError(f"{source} is on {len(workers)} workers, but {target} is one place; give --worker=0")
        for index in workers:
            places = [self._place(text, index) for text in (source, target)]
            if self._is_remote(target):
                pathlib.Path(places[1]).parent.mkdir(parents=True, exist_ok=True)
            done = subprocess.run([*cp, "--", *places], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            expect_success([Result(index, done.returncode, done.stdout)], f"copy {source} to {target}")

    def _run_on(self, workers: list[int], command: str, show: bool, limit_s: float | None = None) -> list[Result]:
        """Run a command on workers as one process group; Ctrl-C ends its processes too."""
        group = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{free_port()}", "JAX_PROCESS_COUNT": str(len(workers))}
        group |= {"TORUS_RUN_SECRET": secrets.token_hex(32)}
        started: dict[int, subprocess.Popen] = {}

        def read(index: int) -> Result:
            """Read the output line by line and show it, with the worker's number if there are several."""
            process, prefix, lines = started[index], f"worker {index}: ", []
            if limit_s is not None:
                return _answer(index, process, limit_s)
            with process.stdout:
                for line in process.stdout:
                    lines.append(line)
                    if show:
                        print(prefix + line.removeprefix(prefix) if len(workers) > 1 else line, end="", flush=True)
            return Result(index, process.wait(), "".join(lines))

        with ThreadPoolExecutor(max(1, len(workers))) as pool:
            try:
                for rank, index in enumerate(workers):
                    started[index] = self._start(index, command, group | {"JAX_PROCESS_INDEX": str(rank)})
                return list(pool.map(read, workers))
            finally:
                kill_groups(started.values())

    def _start(self, index: int, command: str, variables: dict[str, str]) -> subprocess.Popen:
        home = self._home(index)
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        variables = variables | {"POD_WORKER": str(index), "HOME": str(home), "XDG_CACHE_HOME": cache}
        exists = home.is_dir()
        return subprocess.Popen(
            ["bash", "-c", command if exists else UNREACHABLE], cwd=home if exists else None, text=True,
            errors="replace",
            env=host_environment() | variables, start_new_session=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _home(self, index: int) -> pathlib.Path:
        return self.folder / f"worker-{index}"

    def _put_code(self, index: int) -> None:
        code, commit = self._home(index) / self.code, _git("rev-parse", "HEAD").strip()
        if not (code / ".venv").exists():
            code.parent.mkdir(parents=True, exist_ok=True)
            _git("clone", "--quiet", "--local", "--no-checkout", str(ROOT), str(code))
            (code / ".git" / "info" / "exclude").write_text("\n".join(hosts.OURS) + "\n")
            (code / ".venv").symlink_to(sys.prefix)
        _git("-C", str(code), "fetch", "--quiet", "origin", commit)
        _git("-C", str(code), "checkout", "--quiet", "--force", "--detach", commit)
        new = _git("ls-files", "-z", "--others", "--exclude-standard")
        for name in (_git("diff", "-z", "--name-only", "--no-renames", "HEAD") + new).split("\0"):
            source, target = ROOT / name, code / name
            if name and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
            elif name and not source.exists():
                target.unlink(missing_ok=True)

    def _is_remote(self, text: str) -> bool:
        return text.startswith(f"{self.name}:")

    def _place(self, text: str, index: int) -> str:
        """Return the path on this machine for a path of `copy`."""
        if not self._is_remote(text):
            return text
        path, home = text.partition(":")[2], self._home(index)
        if path.startswith("/"):
            return str(home / "root" / path.lstrip("/"))
        return os.path.join(home, path.removeprefix("~").lstrip("/"))


def host_environment() -> dict[str, str]:
    """Return this machine's variables that a worker inherits, without a number of devices to simulate."""
    environment = {name: value for name, value in os.environ.items() if re.fullmatch(INHERITED, name)}
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICE_FLAG)]
    return environment | {"XLA_FLAGS": " ".join(flags)}


def free_port() -> int:
    """Return a free port of this machine whose next two ports, of the hubs of a run and of a study, are free too."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), contextlib.ExitStack() as probes:
            for number in range(port, port + 3):
                probes.enter_context(socket.socket()).bind(("127.0.0.1", number))
            return port


def _answer(index: int, process: subprocess.Popen, limit_s: float) -> Result:
    """Return the output of a worker's process, which is killed after `limit_s` seconds."""
    try:
        output, _ = process.communicate(timeout=limit_s)
        return Result(index, process.returncode, output)
    except subprocess.TimeoutExpired:
        kill_groups([process])
        process.communicate()
        return no_answer(index, limit_s)


def _git(*words: str) -> str:
    """Return git's output for this checkout; PodError with its last line if it fails."""
    done = records.git(*words)
    if done.returncode:
        raise PodError(f"git {words[0]}: {Result(None, done.returncode, done.stderr).message}")
    return done.stdout
