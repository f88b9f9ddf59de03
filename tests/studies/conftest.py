# SPDX-License-Identifier: Apache-2.0
"""What the tests of studies share: tiny trials, a storage on disk, and programs with a planned exit status."""

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from tests.support import ROOT

needs_optuna = pytest.mark.skipif(
    importlib.util.find_spec("optuna") is None, reason="optuna is not installed here; `make setup EXTRAS=studies`"
)
TINY = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 64,
    "model.high_cycles": 1, "model.low_cycles": 1, "model.layer_loop": "unroll", "supervision.max_steps": 3,
    "train.global_batch": 16, "train.steps": 60, "train.eval_every": 30, "train.save_every": 30,
    "data.puzzle_count": 4, "data.puzzle_augmentations": 0, "data.puzzle_heldout": 20, "optimizer.warmup_steps": 5,
    "logging.tensorboard": False, "logging.report": False,
}  # fmt: skip
KEYS = [f"--config.{key}={value}" for key, value in TINY.items()]


def environment(cache: pathlib.Path) -> dict[str, str]:
    """Return the environment of a command on one CPU device, which compiles as quickly as the tests."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    kept = {key: value for key, value in os.environ.items() if key != "JAX_PLATFORMS"}
    return kept | {"XDG_CACHE_HOME": str(cache), "XLA_FLAGS": " ".join(flags), "PYTHONUNBUFFERED": "1"}


def sweep(folder: pathlib.Path, *arguments: str) -> subprocess.Popen:
    """Start sweep.py in a folder, where the storage is studies.db."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "sweep.py"), *arguments], cwd=folder, env=environment(folder), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def ended(process: subprocess.Popen) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr) when a command has ended."""
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err
