# SPDX-License-Identifier: Apache-2.0
"""What rehearsals say of a configuration: the records of the repository, and the user's own cache of rehearse.py."""

import functools
import json
import time
from collections.abc import Iterator

from configs import topologies
from configs.base import keys_of
from configs.errors import ConfigError
from configs.key import MACHINE, UNCOMPILED
from input_pipeline.cache import cache_folder, cache_path
from rehearsal import record
from rehearsal.compiler import Compiled, CompileError, Compiler, check_compiler
from rehearsal.estimate import estimate
from rehearsal.sections import seconds_text
from reporting.display import duration
from settings.keys import flat, from_flat
from studies.suites import Member

# Numbers in a compiled step: with other values, it has the same operations.
FREE = {
    "train.steps", "train.tokens", "train.epochs", "train.seed", "supervision.exploration", "supervision.max_steps",
    "optimizer.learning_rate", "optimizer.warmup_steps", "optimizer.final_fraction", "optimizer.weight_decay",
    "optimizer.table_learning_rate", "optimizer.table_weight_decay", "optimizer.beta1", "optimizer.beta2",
}  # fmt: skip
SAVED = ("parameters", "optimizer", "extra", "carry")  # parts of a device's state that a checkpoint has


def step_seconds(values: dict[str, object], topology: str) -> float | None:
    """Return the seconds of a step on a slice, with these values of every key; None if nobody rehearsed it.

    The user's own rehearsal of this very configuration takes precedence over a record of a step that computes the same.
    """
    if compiled := cached(values, topology):
        return estimate(compiled)["step_seconds"] if compiled.fits else None
    wanted = _compiled_keys(values)
    return next((seconds for case, seconds in _recorded(topology) if case == wanted), None)


def fill_cache(members: list[Member], topology: str) -> Iterator[str]:
    """Compile the step of each configuration whose seconds are not known; yield a line for each, with the time left.

    Raises ConfigError if this machine has no compiler for the slice.
    """
    preset = topologies.get(topology)
    unknown = [member for member in members if step_seconds(member.values, topology) is None]
    if not unknown:
        return
    check_compiler(preset)
    compiler, began = Compiler(cache_folder(unknown[0].values["data.cache_dir"]) / "rehearsals"), time.monotonic()
    wanted = [(from_flat(member.values), preset) for member in unknown]
    for done, (index, result) in enumerate(compiler.compile_all(wanted), 1):
        left = (time.monotonic() - began) / done * (len(unknown) - done)
        yield f"{done} of {len(unknown)}: {unknown[index].title}, {_said(result, topology)}; {duration(left)} left"


def _said(result: Compiled | Exception, topology: str) -> str:
    """Return what a rehearsal found, in words."""
    if isinstance(result, Exception):
        return f"refused: {result}"
    if not result.fits:
        return f"does not fit in the memory of a chip of {topology}"
    return f"{seconds_text(estimate(result)['step_seconds'])} a step"


def checkpoint_bytes(values: dict[str, object], topology: str) -> int | None:
    """Return an upper bound of the bytes of a checkpoint; None if the configuration is not in the user's cache.

    A part that several chips replicate counts once for each chip, except along the axes of data parallelism.
    """
    compiled = cached(values, topology)
    if compiled is None:
        return None
    of_chip = sum(compiled.facts["state"][part] for part in SAVED) + compiled.facts["on_host"]
    mesh = compiled.facts["mesh"]
    return of_chip * compiled.topology.chips // (mesh["data"] * mesh["dcn_data"])


def cached(values: dict[str, object], topology: str) -> Compiled | None:
    """Return the compilation of a configuration that rehearse.py left in the cache; None if there is none that runs."""
    cache = cache_path(values["data.cache_dir"]) / "rehearsals"
    if not cache.is_dir():
        return None
    compiler, config, preset = Compiler(cache), from_flat(values), topologies.get(topology)
    try:
        return compiler.compile(config, preset) if compiler.is_cached(config, preset) else None
    except (ConfigError, CompileError):  # the cache also has what the compiler refused
        return None


@functools.cache
def _recorded(topology: str) -> list[tuple[dict[str, object], float]]:
    cases = [case for case in record.cases() if case.topology == topology and case.path.is_file()]
    return [
        (_compiled_keys(flat(case.load().config)), json.loads(case.path.read_text())["figures"]["step_seconds"])
        for case in cases
    ]


def _compiled_keys(values: dict[str, object]) -> dict[str, object]:
    """Return the keys that decide what a step computes; of optimizer.ema_decay only whether there is one."""
    left_out = keys_of(UNCOMPILED) | keys_of(MACHINE) | FREE
    kept = {key: value for key, value in values.items() if key not in left_out}
    mesh = {key: value for key, value in values.items() if key.startswith(("mesh.", "layout."))}
    dtype = {"model.dtype": "bfloat16"} if kept["model.dtype"] == "auto" else {}  # records are of TPUs
    return kept | mesh | dtype | {"optimizer.ema_decay": kept["optimizer.ema_decay"] > 0}
