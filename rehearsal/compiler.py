# SPDX-License-Identifier: Apache-2.0
"""Compiles train.py's own step for a topology that this machine lacks, in separate processes, cached by content.

A folder of the cache holds the result of a compilation: `facts.json`, and `program.txt.gz`, the scheduled program. It
is written atomically. The process is rehearsal/compilation.py, which imports jax; this file does not.
"""

import contextlib
import dataclasses
import gzip
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator

from cluster import identity
from configs import topologies
from configs.base import keys_of
from configs.errors import ConfigError
from configs.key import UNCOMPILED
from files.folders import source_files
from files.paths import expanded
from rehearsal import sealed
from settings import loading
from settings.keys import flat

COMPILED_CODE = (
    "core/assembly.py", "core/decoding.py", "core/models.py", "configs/adaptation_keys.py", "configs/base.py",
    "configs/errors.py", "configs/key.py", "configs/reasoning_keys.py", "configs/recursion_keys.py",
    "configs/topologies.py", "checkpointing", "cluster", "files", "inference", "input_pipeline", "layers", "models",
    "objectives", "parallelism", "reasoning", "reporting", "settings", "training", "rehearsal/compilation.py",
    "rehearsal/gpu_attention.py", "rehearsal/sealed.py",
)  # fmt: skip
LIBRARIES = ("jax", "jaxlib", "flax", "optax", "qwix", "libtpu")
ON_CPU = {  # environment of concurrent processes that compile for a TPU on a machine without one
    "JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}  # fmt: skip
GIB = 2**30
FACTS, PROGRAM = "facts.json", "program.txt.gz"
EVALUATION, SAMPLE = "evaluation", "sample"  # names of a Call
COMPILING = "from rehearsal import compilation; compilation.main()"


class CompileError(RuntimeError):
    """The compiler refused the step for a reason other than memory; the message is its first meaningful line."""


@dataclasses.dataclass(frozen=True)
class Call:
    """A program of a server or of another phase of a run, compiled in place of a training step.

    Attributes:
      name: prefill, which extends a few rows by a part of a prompt; decode, which extends all rows by a token;
        EVALUATION of a batch; or SAMPLE, the prefill of a sample of text with the weights of the training state.
      rows: of the cache.
      length: tokens that a row can have.
      cache_dtype: `inference.cache_dtype`.
    """

    name: str
    rows: int
    length: int
    cache_dtype: str


@dataclasses.dataclass(frozen=True)
class Compiled:
    """The result of one compilation; sizes in bytes of one device.

    facts: `total_bytes` (that the program needs), `out_of_memory` (whether the compiler refused it), `state`
    (parameters, optimizer, extra, carry, batch), `on_host` (bytes of the optimizer in the host's memory), `frozen`
    (bytes of frozen parameters), `decoded` (rows, and tokens of a row, of the cache in which the objective draws
    answers, or None), `steps_of_batch` (that train on the answers of one rollout), `mesh`, `device_coordinates` (of
    each device, in the order of the mesh; empty where a device has none), `num_parameters`, `flops_per_step` (the
    model's, of all devices), `num_microbatches`, `compile_seconds`, and for CPUs `measured_peak_flops` (FLOP/s of a
    matrix product). Those of a Call: `state` (weights, cache), `tokens` (rows, and tokens of a row, that a call
    computes), `total_bytes`, `out_of_memory`, `mesh`, `num_parameters` and `compile_seconds`.
    """

    config: object
    topology: topologies.Topology
    facts: dict
    folder: pathlib.Path

    def program(self) -> str:
        """Return the optimised, scheduled HLO text."""
        with gzip.open(self.folder / PROGRAM, "rt") as file:
            return file.read()

    @property
    def total_bytes(self) -> float:
        """The device memory that the program needs."""
        return self.facts["total_bytes"]

    @property
    def state_bytes(self) -> float:
        """Parameters, optimizer, extra and carry, without those in the host's memory."""
        return sum(size for name, size in self.facts["state"].items() if name != "batch")

    @property
    def fits(self) -> bool:
        """Whether it compiled and needs no more memory than the chip has."""
        return not self.facts["out_of_memory"] and self.total_bytes <= self.topology.capacity_gib * GIB


def check_compiler(topology: topologies.Topology) -> None:
    """Raise ConfigError if the compiler of a topology is not installed."""
    if topology.accelerator == "tpu" and importlib.util.find_spec("libtpu") is None:
        raise ConfigError(
            f"--topology={topology.name} needs the TPU compiler, Python package libtpu, which is not installed here; "
            f"`make setup` installs it on Linux x86-64, its only platform"
        )


class Compiler:
    """Compiles configurations for topologies, each once.

    Args:
      cache: the folder of all compilations.
      processes: how many compile at once.
      program: Python code that each process runs first, to replace a part of the code and see its cost.
      precision: of products in float32, a value of JAX_DEFAULT_MATMUL_PRECISION; "" takes that of the environment, as
        a run does.
    """

    def __init__(self, cache: pathlib.Path, processes: int = 1, program: str = "", precision: str = ""):
        self.cache, self.processes, self.program = cache, processes, program
        asked = precision or os.environ.get(identity.PRECISION)
        self.variables = {identity.PRECISION: asked} if asked else {}  # of its processes
        self.spent: list[float] = []  # seconds of each compilation done here

    def folder(self, config, topology: topologies.Topology, call: Call | None = None) -> pathlib.Path:
        """Return the cache folder of a compilation; its name is a digest of everything the compilation depends on."""
        paths = [loading.ROOT / name for name in COMPILED_CODE]
        files = [file for path in paths for file in ([path] if path.is_file() else source_files(path))]
        code = identity.files_digest(files)
        request = _request(config, topology, call) | self.variables
        content = json.dumps([request, self.program, code, versions()], sort_keys=True)
        return self.cache / hashlib.sha256(content.encode()).hexdigest()[:24]

    def is_cached(self, config, topology: topologies.Topology, call: Call | None = None) -> bool:
        """Return whether it was compiled before."""
        return is_whole(self.folder(config, topology, call))

    def compile(self, config, topology, *, waiting: Callable = lambda seconds: None) -> Compiled:
        """Return the Compiled of one configuration.

        Raises:
          ConfigError: the mesh does not divide a dimension.
          CompileError: the compiler refuses it for a reason other than memory.
        """
        return in_order(self.compile_all([(config, topology)], waiting=waiting))[0]

    def compile_all(
        self, wanted: list[tuple], *, waiting: Callable = lambda seconds: None, until: float | None = None
    ) -> Generator[tuple[int, Compiled | Exception]]:
        """Yield (index, Compiled or the error) of (configuration, topology) pairs as they are done.

        Args:
          wanted: pairs; a Call as the third entry compiles that in place of a training step.
          waiting: called several times a second with the seconds since the first process began.
          until: the time.monotonic() at which unfinished compilations are given up.
        """
        folders = [self.folder(*one) for one in wanted]
        cached = [index for index, folder in enumerate(folders) if is_whole(folder)]
        for index in cached:
            yield index, _load(*wanted[index][:2], folders[index])
        queue = [index for index in range(len(wanted)) if index not in cached]
        running, began = {}, time.monotonic()
        try:
            while (queue or running) and (until is None or time.monotonic() < until):
                while queue and len(running) < self.processes:
                    index = queue.pop(0)
                    running[index] = _Process(wanted[index], folders[index], self.program, self.variables)
                for index in [i for i, process in running.items() if process.ended()]:
                    process = running.pop(index)
                    self.spent.append(time.monotonic() - process.began)
                    yield index, process.result()
                waiting(time.monotonic() - began)
                time.sleep(0.1)
        finally:
            for process in running.values():
                process.stop()


def in_order(results: Generator[tuple[int, Compiled | Exception]]) -> list[Compiled]:
    """Return the results of `Compiler.compile_all` in the order in which they were wanted, or raise its first error."""
    found = {}
    for index, result in results:
        if isinstance(result, Exception):
            results.close()  # its processes and its display end now; the error would keep the generator
            raise result
        found[index] = result
    return [found[index] for index in sorted(found)]


def is_whole(folder: pathlib.Path) -> bool:
    """Return whether a compilation is cached with undamaged facts and program."""
    facts = sealed.read(folder / FACTS)
    try:
        return facts is not None and digest(folder / PROGRAM) == facts["program_sha256"]
    except OSError:
        return False


def digest(file: pathlib.Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def _load(config, topology, folder: pathlib.Path) -> Compiled | Exception:
    facts = sealed.read(folder / FACTS)
    if facts is None:
        return CompileError(f"{folder} was changed while it was read; run the command again")
    if error := facts.get("error"):
        kind = ConfigError if error["kind"] == "ConfigError" else CompileError
        return kind(error["message"])
    return Compiled(config, topology, facts, folder)


class _Process:
    """A running compilation; it writes nothing before it is done."""

    def __init__(self, wanted: tuple, folder: pathlib.Path, program: str, variables: dict[str, str]):
        (self.config, self.topology, *_), self.folder, self.began = wanted, folder, time.monotonic()
        self.log = tempfile.TemporaryFile()  # noqa: SIM115 - read when the process has ended
        request = json.dumps(_request(*wanted))
        self.process = subprocess.Popen(
            [sys.executable, "-c", f"{program}\n{COMPILING}", str(folder), request, str(os.getpid())], cwd=loading.ROOT,
            stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=_environment(self.topology) | variables,
            start_new_session=True,
        )  # fmt: skip

    def ended(self) -> bool:
        return self.process.poll() is not None

    def result(self) -> Compiled | Exception:
        with self.log:
            self.log.seek(0)
            error = first_line(self.log.read().decode(errors="replace"))
        if is_whole(self.folder):
            return _load(self.config, self.topology, self.folder)
        return CompileError(f"the compiler's process ended with status {self.process.returncode}: {error}")

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()


def _request(config, topology: topologies.Topology, call: Call | None = None) -> dict:
    """Return everything that a compilation depends on, except code, libraries and the arguments of a Compiler."""
    read = {"evaluation.chunk_tokens"} if call and call.name == EVALUATION else set()
    keys = {key: value for key, value in flat(config).items() if key not in keys_of(UNCOMPILED) - read}
    keys["distillation.teacher"] = teacher = _absolute(config.distillation.teacher)
    slice_ = {"topology": topology.name, "chips": topology.chips, "compiler_name": topology.compiler_name}
    wanted = {"call": dataclasses.asdict(call)} if call else {}
    compiler = os.environ.get("LIBTPU_INIT_ARGS", "")
    return {"config": keys, **slice_, "teacher": _configuration(teacher), "compiler": compiler, **wanted}


def _configuration(teacher: str) -> dict:
    """Return the configuration of a teacher, which determines its shapes; {} if there is none, or it is wrong.

    The process that compiles says what is wrong.
    """
    with contextlib.suppress(ConfigError):
        return flat(loading.run_recipe(teacher)[0]) if teacher else {}
    return {}


def _absolute(name: str) -> str:
    """Return the path of a run or recipe for a process in the workspace; a name that is not here stays as it is."""
    path = expanded(name)
    return str(path.absolute()) if name and "://" not in name and path.exists() else name


def _environment(topology: topologies.Topology) -> dict[str, str]:
    devices = 1 if topology.accelerator == "tpu" else topology.chips
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("JAX_", "XLA_"))}
    return kept | {
        **ON_CPU,
        "JAX_ENABLE_COMPILATION_CACHE": "false",  # this cache keeps the program's text too
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
    }


def versions() -> dict[str, str]:
    """Return the versions of the libraries that determine a compilation."""
    return identity.installed(LIBRARIES)


def first_line(text: str) -> str:
    """Return the line that describes the error: the exception's, or that of a check in the compiler that failed."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(\w+\.)*\w*(Error|Exception)\b:|F\d{4} .* Check failed: ", line)]
    return (errors or lines[-1:] or ["it printed nothing"])[-1][:400]
