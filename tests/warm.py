# SPDX-License-Identifier: Apache-2.0
"""Starts Python programs without the seconds that their imports take.

Each worker of pytest has one template, a process that imports TensorFlow, JAX, other libraries and this workspace, and
then waits. A program runs in a fork of the template. It has the same command line, environment, signals and exit status
as a process that is started in the usual way. Programs are started in the usual way if `allow` was not called, as in
most benchmarks, and in tests of the start itself.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import json
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence

ROOT = pathlib.Path(__file__).resolve().parent.parent
BEFORE_JAX = ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS")  # jax reads them at import
LIBRARIES = ("tensorflow", "jax", "flax.nnx", "optax", "orbax.checkpoint", "ml_collections", "sentencepiece")
WORKSPACE = (  # what commands import; not command_line, which records the start of its process
    "core.assembly", "core.evaluation", "core.inspection", "core.job", "input_pipeline.corpus",
    "migration.hugging_face", "migration.logits", "migration.peft", "migration.trm_reference", "puzzles.pictures",
    "inference.sampling", "puzzles.solving", "rehearsal.layouts.advice", "rehearsal.layouts.compare",
    "rehearsal.layouts.search", "pods.transports", "models.decoder_lm", "models.trm", "objectives.language_modeling",
    "objectives.recursive",
)  # fmt: skip
MESSAGE_BYTES = 1 << 18
_allowed = False


class Process:
    """A forked program, with the interface of a subprocess.Popen with pipes for stdout and stderr, in text mode."""

    def __init__(self, pid: int, pipes: list[int], end: int):
        """Take over its process id, its two output pipes, and the pipe that will bring its exit status."""
        self.pid, self.returncode, self.end = pid, None, end
        self.stdout, self.stderr = (open(pipe) for pipe in pipes)  # noqa: SIM115

    def __del__(self):
        """Close the pipes; otherwise Python would warn about them in some other test."""
        self.stdout.close()
        self.stderr.close()

    def poll(self) -> int | None:
        """Return its exit status; None while it runs."""
        return self._status(0)

    def wait(self, timeout: float | None = None) -> int:
        """Return its exit status when it has ended."""
        if self._status(timeout) is None:
            raise subprocess.TimeoutExpired("a forked program", timeout)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Return what it printed after the last read, when it has ended."""
        said = {}
        streams = {"out": self.stdout, "err": self.stderr}
        readers = [
            threading.Thread(target=lambda name=name: said.update({name: streams[name].read()}), daemon=True)
            for name in streams if not streams[name].closed
        ]  # fmt: skip
        for reader in readers:
            reader.start()
        self.wait(timeout)
        for reader in readers:
            reader.join()
        self.stdout.close()
        self.stderr.close()
        return said.get("out", ""), said.get("err", "")

    def send_signal(self, number: int) -> None:
        """Send a signal if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has just ended
                os.kill(self.pid, number)

    def kill(self) -> None:
        """End it."""
        self.send_signal(signal.SIGKILL)

    def _status(self, timeout: float | None) -> int | None:
        if self.returncode is None and select.select([self.end], [], [], timeout)[0]:
            self.returncode = int(os.read(self.end, 16) or -signal.SIGKILL)
            os.close(self.end)
        return self.returncode


class Template:
    """A process that forks on demand."""

    def __init__(self, process: subprocess.Popen, channel: socket.socket):
        """Take over the process, and the socket for requests to it."""
        self.process, self.socket = process, channel

    def fork(self, arguments: list[str], environment: dict[str, str]) -> Process:
        """Start a program."""
        pipes = [os.pipe() for _ in range(3)]
        message = json.dumps({"arguments": arguments, "environment": environment}).encode()
        socket.send_fds(self.socket, [message], [write for _, write in pipes])
        for _, write in pipes:
            os.close(write)
        out, err, end = (read for read, _ in pipes)
        return Process(int(self.socket.recv(MESSAGE_BYTES)), [out, err], end)

    def close(self) -> None:
        """End it; its forks continue."""
        self.socket.close()
        self.process.wait()


def allow() -> None:
    """Start programs from a template from now on. This needs Linux; elsewhere it changes nothing."""
    global _allowed
    _allowed = sys.platform == "linux"


def end() -> None:
    """Start programs in the usual way again."""
    global _allowed
    _allowed = False
    if template.cache_info().currsize:
        template().close()
        template.cache_clear()


@functools.cache
def template(root: pathlib.Path = ROOT, workspace: Sequence[str] = WORKSPACE) -> Template:
    """Start and return the template of this process for the workspace at `root`; it ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONUNBUFFERED": "1"}
    with theirs:
        process = subprocess.Popen(
            [sys.executable, root / "tests" / "warm.py", str(theirs.fileno()), *LIBRARIES, *workspace],
            cwd=root, env=environment, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
        )  # fmt: skip
    return Template(process, ours)


def start(arguments: list[str], environment: dict[str, str], *, ordinary: bool = False) -> subprocess.Popen | Process:
    """Start Python with these arguments in the root of the workspace, with pipes for its output."""
    if _allowed and not ordinary and all(environment.get(name) == os.environ.get(name) for name in BEFORE_JAX):
        return template().fork([*map(str, arguments)], environment)
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def stand_by(channel: socket.socket, modules: Sequence[str]) -> None:
    """Import modules, wait for requests, and run the requested program in each fork."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the forks
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    run(serve(channel))


def serve(requests: socket.socket) -> list[str]:
    """Fork for each request, and end after the last; return only in the forks, with the program's arguments."""
    ends, poller = {}, select.poll()  # {descriptor that reports its end: (process, pipe for its status)}
    poller.register(requests, select.POLLIN)
    while True:
        for ready, _ in poller.poll():
            if ready != requests.fileno():
                poller.unregister(ready)
                report(*ends.pop(ready))
                os.close(ready)
                continue
            message, pipes, _, _ = socket.recv_fds(requests, MESSAGE_BYTES, 3)
            if not message:
                os._exit(0)
            pid = os.fork()
            if not pid:
                become(json.loads(message)["environment"], pipes, [requests.detach(), *ends])
                return json.loads(message)["arguments"]
            watched = os.pidfd_open(pid)
            ends[watched] = (pid, pipes[2])
            poller.register(watched, select.POLLIN)
            os.close(pipes[0])
            os.close(pipes[1])
            requests.send(str(pid).encode())


def report(pid: int, end: int) -> None:
    """Send the exit status of a process that has ended, if its starter still waits for it."""
    _, status = os.waitpid(pid, 0)
    with contextlib.suppress(BrokenPipeError):
        os.write(end, str(os.waitstatus_to_exitcode(status)).encode())
    os.close(end)


def become(environment: dict[str, str], pipes: list[int], others: list[int]) -> None:
    """Take the output, environment and signals that the starter wants; only the imports of the template remain."""
    os.dup2(pipes[0], 1)
    os.dup2(pipes[1], 2)
    for descriptor in [*pipes, *others]:
        os.close(descriptor)
    # That of the template may have been a file, in which a stream can be moved back.
    sys.stdout = open(1, "w", buffering=1, closefd=False)  # noqa: SIM115
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()


def run(arguments: list[str]) -> None:
    """Run a program as Python does: a file, or the text after -c."""
    is_file = arguments[0] != "-c"
    name, text = (arguments[0], pathlib.Path(arguments[0]).read_text()) if is_file else ("<string>", arguments[1])
    sys.argv = arguments if is_file else ["-c", *arguments[2:]]
    sys.path[0] = str((ROOT / name).parent) if is_file else ""
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if is_file:
        main.__file__ = name
    exec(compile(text, name, "exec"), vars(main))


if __name__ == "__main__":
    sys.path[0] = str(ROOT)
    stand_by(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
