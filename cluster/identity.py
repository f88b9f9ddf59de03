# SPDX-License-Identifier: Apache-2.0
"""Check that all hosts of a run have the same code, libraries, and environment variables of the compiler."""

import contextlib
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
from collections.abc import Iterable

from cluster import processes
from files.folders import source_files
from settings.loading import ROOT

NO_CODE = ("tests", "benchmarks", "scripts", "runs")  # folders that no run imports
LIBRARIES = (
    "jax",
    "jaxlib",
    "libtpu",
    "flax",
    "optax",
    "qwix",
    "orbax-checkpoint",
    "numpy",
    "tensorflow-cpu",
    "tensorflow",
)
PRECISION = "JAX_DEFAULT_MATMUL_PRECISION"
VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", PRECISION)


def check_same() -> None:
    """Compare code, versions and variables between all processes; ConfigError names process, host and item."""
    processes.check_same(code(), "their code")
    processes.check_same(versions(), "the versions of their libraries")
    processes.check_same({name: os.environ.get(name, "") for name in VARIABLES}, "their environment")


def code() -> dict[str, str]:
    """Return {path: digest} of each file of this repository that a run may import."""
    rooms = [path for path in ROOT.glob("[a-z]*/") if path.name not in NO_CODE]
    files = sorted([*source_files(ROOT, "*.py"), *(path for room in rooms for path in source_files(room))])
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in files}


def code_digest() -> str:
    return hashlib.sha256(repr(code()).encode()).hexdigest()[:12]


def files_digest(files: Iterable[pathlib.Path]) -> str:
    """Return one digest of the names and contents of files."""
    digest = hashlib.sha256()
    for path in sorted(files):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


@functools.cache
def versions() -> dict[str, str]:
    return {"python": platform.python_version()} | installed(LIBRARIES)


def installed(libraries: Iterable[str]) -> dict[str, str]:
    """Return the versions of those libraries that are installed."""
    found = {}
    for name in libraries:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
