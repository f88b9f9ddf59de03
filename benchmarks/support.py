# SPDX-License-Identifier: Apache-2.0
"""What every benchmark shares: where it runs, and the JSON line that it ends with."""

import importlib.metadata
import json
import os
import pathlib
import platform
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
QUICK = "--quick" in sys.argv
LIBRARIES = ("jax", "flax", "optax", "numpy", "tensorflow-cpu", "sentencepiece", "torch")


def finish(name: str, figures: dict) -> None:
    """Print the closing line of a benchmark."""
    found = {d.metadata["Name"]: d.version for d in importlib.metadata.distributions()}
    versions = {"python": platform.python_version()} | {lib: found[lib] for lib in LIBRARIES if lib in found}
    print(json.dumps({"benchmark": name, "figures": figures, "versions": versions, "machine": machine()}), flush=True)


def machine() -> str:
    """Return processor, cores and memory."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    model = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    name = model.group(1) if model else platform.processor() or platform.machine()
    return f"{name}, {os.cpu_count()} cores, {gib:.0f} GiB, {platform.system()}"
