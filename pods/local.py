# SPDX-License-Identifier: Apache-2.0
"""A pod on this machine: real processes in place of hosts, behind the same shell commands.

A worker is the folder POD_ROOT/NAME/worker-I, which plays the host's home folder. What one call runs on several
workers is a process group of its own, found through JAX_COORDINATOR_ADDRESS. Caches are this machine's.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading

from configs import topologies
from configs.loading import ROOT
from pods import hosts, records
from pods.transports import PodError, Result, selected, usage_error

KEPT = (  # of the environment; a host would not see the rest either
    r"PATH|LANG|LC_\w+|TERM|TZ|USER|LOGNAME|SHELL|TMPDIR|\w+_proxy|\w+_PROXY|SSL_\w+|HF_\w+|XLA_FLAGS"
    r"|JAX_PLATFORMS|JAX_COMPILATION_CACHE_DIR|JAX_PERSISTENT_\w+|TF_\w+"
)
PORTS = range(20000, 32000)  # below those that the system hands out by itself
DELETE_GRACE_SECONDS = 20
DEVICE_FLAG = "--xla_force_host_platform_device_count"


class Local:
    """The transport `local`; `folder` holds everything of the pod."""

    def __init__(self, settings):
        self.name, self.accelerator = settings.name, settings.accel
        self.repo_dir, self.wanted_workers = settings.repo_dir, settings.workers
        self.folder, self.settings = settings.pod_folder.absolute(), settings
        self._code(0)

    @property
    def num_workers(self) -> int:
        """Workers of the pod that is there, else of the one that `create` would make."""
        pod = self.describe()
        return pod["workers"] if pod else self._workers_to_make()

    @property
    def shared(self) -> pathlib.Path:
        """The folder that all workers see, in place of a bucket."""
        return self.folder / "shared"

    @property
    def record_path(self) -> pathlib.Path:
        """Where this side keeps what it launched."""
        return self.folder / "launch.json"

    def describe(self) -> dict | None:
        """Return state, health and accelerator type, as gcloud does; None where no such pod is."""
        path = self.folder / "pod.json"
        return records.read_json(path, {"state", "acceleratorType", "workers"}) if path.exists() else None

    def create(self) -> str:
        """Make the workers' folders with the code as it stands here; what a broken create left goes.

        Raises:
          PodError: the workers cannot share the chips evenly, there can be no folder for them, or git fails.
        """
        if self.describe():
            return f"{self.name} exists already"
        workers = self._workers_to_make()
        if self.settings.dry_run:
            return f"# dry run: would make {workers} workers in {self.folder}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise usage_error(f"POD_ROOT: {self.folder}: {error.strerror}; name a folder that can be written") from None
        for index in range(workers):
            if self._home(index).exists():
                shutil.rmtree(self._home(index))
            self._put_code(index)
        self.shared.mkdir(exist_ok=True)
        pod = {"name": self.name, "state": "READY", "health": "HEALTHY", "acceleratorType": self.accelerator}
        partial = self.folder / "pod.json.partial"
        partial.write_text(json.dumps(pod | {"workers": workers, "transport": "local"}, indent=1))
        partial.replace(self.folder / "pod.json")
        return f"{self.name}: created, {workers} workers in {self.folder}"

    def wait(self) -> str:
        """A folder is there at once."""
        self._present()
        return f"{self.name} is READY"

    def delete(self) -> str:
        """End what runs and remove the workers; `shared`, with checkpoints, stays, as a bucket would.

        The workers are those that are there, whatever pod.json says: a create that was cut short left none.
        """
        homes = {int(path.name.removeprefix("worker-")): path for path in self.folder.glob("worker-[0-9]*")}
        if not homes and not (self.folder / "pod.json").exists():
            return f"{self.name} does not exist; nothing to delete"
        if self.settings.dry_run:
            return f"# dry run: would end what runs in {self.folder} and remove the workers"
        grace = min(self.settings.grace_seconds, DELETE_GRACE_SECONDS)
        self._run_on(hosts.stop(dataclasses.replace(self.settings, grace_seconds=grace)), sorted(homes), show=False)
        for name in ("pod.json", "pod.json.partial"):
            (self.folder / name).unlink(missing_ok=True)
        for home in homes.values():
            shutil.rmtree(home, ignore_errors=True)
        for folder in (self.shared, self.folder):
            with contextlib.suppress(OSError):  # holds something
                folder.rmdir()
        kept = f"; {self.shared} stays" if self.shared.exists() else ""
        return f"{self.name}: deleted{kept}"

    def put_code(self) -> None:
        """Lay the present commit and changed files over every worker's code, and link the .venv that runs this."""
        for index in range(self._present()["workers"] if not self.settings.dry_run else 0):
            self._put_code(index)

    def run(self, command: str, *, worker: str = "all", show: bool = True, output_directory: str = "") -> list[Result]:
        """Run a shell command in the home folder of each worker, as one process group; return how each ended.

        A worker whose folder is gone has status 255, as by ssh. With `output_directory` what each said is left in a
        file WORKER.log there.
        """
        if self.settings.dry_run:
            return [Result(index, 0, "") for index in self._say(command, worker)]
        self._present()
        results = self._run_on(command, selected(worker, self.num_workers), show)
        for result in results if output_directory else ():
            pathlib.Path(output_directory).mkdir(parents=True, exist_ok=True)
            pathlib.Path(output_directory, f"{result.worker}.log").write_text(result.output)
        return results

    def _run_on(self, command: str, workers: list[int], show: bool) -> list[Result]:
        calls = [_Call(index, self._start(command, index, group)) for index, group in self._group(workers)]
        readers = [threading.Thread(target=call.read, args=(show, len(calls) > 1), daemon=True) for call in calls]
        for reader in readers:
            reader.start()
        try:
            for reader in readers:
                reader.join()
            return [call.result() for call in calls]
        finally:  # after Ctrl-C, what was started in the foreground goes with us
            for call in calls:
                call.kill()

    def run_each(self, command: str) -> list[Result]:
        """Run a command on every worker, showing nothing."""
        return self.run(command, show=False)

    def copy(self, source: str, target: str, *, worker: str = "all", recurse: bool = True) -> Result:
        """Copy by `cp` where one of the two begins with NAME:, an absolute path lying under worker-I/root."""
        workers = selected(worker, self.num_workers)
        if self.settings.dry_run:
            print(shlex.join(["cp", *(["-r"] if recurse else []), source, target]))
            return Result(None, 0, "")
        self._present()
        if self._is_remote(source) and len(workers) > 1:
            raise PodError(f"{source} is on {len(workers)} workers and {target} is one place; give --worker=0")
        output = []
        for index in workers:
            places = [self._place(text, index) for text in (source, target)]
            if self._is_remote(target):
                pathlib.Path(places[1]).parent.mkdir(parents=True, exist_ok=True)
            command = ["cp", *(["-r"] if recurse else []), "--", *places]
            done = subprocess.run(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            output.append(done.stdout)
            if done.returncode:
                return Result(index, done.returncode, "".join(output))
        return Result(None, 0, "".join(output))

    def _say(self, command: str, worker: str) -> list[int]:
        """Print what a dry run leaves out; return the workers that it is for."""
        print(shlex.join(["bash", "-c", command]))
        return selected(worker, self.num_workers)

    def _present(self) -> dict:
        pod = self.describe()
        if pod is None:
            raise PodError(f"there is no pod {self.name} in {self.folder}; `create` makes it")
        return pod

    def _workers_to_make(self) -> int:
        topology = topologies.get(self.accelerator)
        workers = self.wanted_workers or topology.hosts
        if workers < 1 or topology.chips % workers:
            raise usage_error(f"--workers={workers} does not divide the {topology.chips} chips of {topology.name}")
        return workers

    def _home(self, index: int) -> pathlib.Path:
        return self.folder / f"worker-{index}"

    def _code(self, index: int) -> pathlib.Path:
        relative = self.repo_dir.removeprefix("~/")
        if relative.startswith(("/", "~")) or ".." in pathlib.Path(relative).parts:
            raise usage_error(f"REPO_DIR={self.repo_dir} is not below a local worker's home; write ~/torus")
        return self._home(index) / relative

    def _put_code(self, index: int) -> None:
        code, commit = self._code(index), _git("rev-parse", "HEAD").strip()
        if not (code / ".venv").exists():
            code.parent.mkdir(parents=True, exist_ok=True)
            _git("clone", "--quiet", "--local", "--no-checkout", str(ROOT), str(code))
            (code / ".git" / "info" / "exclude").write_text("\n".join(hosts.OURS) + "\n")
            (code / ".venv").symlink_to(sys.prefix)
        _git("-C", str(code), "fetch", "--quiet", "origin", commit)
        _git("-C", str(code), "checkout", "--quiet", "--force", "--detach", commit)
        for name in _git("ls-files", "-z", "-m", "-o", "--exclude-standard").split("\0"):
            source, target = ROOT / name, code / name
            if name and source.is_file():
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(source, target)
            elif name and not source.exists():
                target.unlink(missing_ok=True)

    def _group(self, workers: list[int]) -> list[tuple[int, dict[str, str]]]:
        """Return (worker, variables by which its processes find each other) for a new group."""
        port, count = free_port(), len(workers)
        common = {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_PROCESS_COUNT": str(count)}
        ranked = enumerate(workers)
        return [(index, common | {"JAX_PROCESS_INDEX": str(rank), "POD_WORKER": str(index)}) for rank, index in ranked]

    def _start(self, command: str, index: int, group: dict[str, str]) -> subprocess.Popen | None:
        home = self._home(index)
        cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        environment = host_environment() | group | {"HOME": str(home), "XDG_CACHE_HOME": cache}
        if not home.is_dir():
            return None
        return subprocess.Popen(
            ["bash", "-c", command], cwd=home, env=environment, text=True, errors="replace", start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip

    def _is_remote(self, text: str) -> bool:
        return text.startswith(f"{self.name}:")

    def _place(self, text: str, index: int) -> str:
        """Return where a path of `copy` lies on this machine."""
        if not self._is_remote(text):
            return text
        path, home = text.partition(":")[2], self._home(index)
        if path.startswith("/"):
            return str(home / "root" / path.lstrip("/"))
        return os.path.join(home, path.removeprefix("~").lstrip("/"))


class _Call:
    """One worker's part of a `run`; without a process, the worker is not there."""

    def __init__(self, worker: int, process: subprocess.Popen | None):
        self.worker, self.process, self.lines = worker, process, []

    def read(self, show: bool, several: bool) -> None:
        """Take the output line by line, and show it, where there are several workers with their number."""
        prefix = f"worker {self.worker}: "
        for line in self.process.stdout if self.process else [f"{prefix}its folder is gone\n"]:
            self.lines.append(line)
            if show:
                print(prefix + line.removeprefix(prefix) if several else line, end="", flush=True)

    def kill(self) -> None:
        """End the command if it still runs."""
        if self.process and self.process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)

    def result(self) -> Result:
        """Return how it ended, and all it said."""
        if self.process:
            self.process.stdout.close()
        return Result(self.worker, self.process.wait() if self.process else 255, "".join(self.lines))


def host_environment() -> dict[str, str]:
    """Return the variables that a worker sees of this machine's, without a number of devices to simulate."""
    environment = {name: value for name, value in os.environ.items() if re.fullmatch(KEPT, name)}
    flags = [flag for flag in environment.get("XLA_FLAGS", "").split() if not flag.startswith(DEVICE_FLAG)]
    return environment | {"XLA_FLAGS": " ".join(flags)}


def free_port() -> int:
    """Return a port of this machine that nobody listens on, as on the one after it."""
    while True:
        port = random.choice(PORTS)
        with contextlib.suppress(OSError), socket.socket() as first, socket.socket() as second:
            first.bind(("127.0.0.1", port))
            second.bind(("127.0.0.1", port + 1))
            return port


def _git(*arguments: str) -> str:
    """Return what git answers about the code that runs this; PodError with its last line where it fails."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, text=True, capture_output=True)
    if done.returncode:
        raise PodError(f"git {arguments[0]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")
    return done.stdout
