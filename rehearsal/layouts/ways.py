# SPDX-License-Identifier: Apache-2.0
"""Rehearses a recipe in several ways, such as with and without optimizations, and compares their steps and memory."""

from collections.abc import Callable

from ml_collections import ConfigDict

from configs.base import MESH_AXES
from configs.errors import ConfigError
from configs.topologies import Topology
from rehearsal.compiler import Compiled, CompileError, Compiler
from rehearsal.estimate import estimate
from settings import validation
from training import fit

NAIVE = {  # a step without optimizations; its weights and moments are on every chip, see `naive`
    "model.dtype": "float32", "model.attention": "reference", "model.remat": "none", "train.loss_chunk_tokens": 1 << 20,
}  # fmt: skip
NAIVE_PRECISION = "default"  # of its Compiler: naive code has jax's default, and layers/products.py more


def naive(config: ConfigDict, topology: Topology) -> ConfigDict:
    """Return a copy without optimizations, with as few microbatches as fit."""
    copy = config.copy_and_resolve_references()
    copy.update_from_flattened_dict(NAIVE | {"batch.fit": "auto", "train.gradient_accumulation": 0})
    replicas = topology.chips // topology.slices
    copy.mesh.update(dict.fromkeys(MESH_AXES, 1) | {"dcn_data": topology.slices, "data": replicas})
    return copy


def rehearse(
    ways: dict[str, ConfigDict], topology: Topology, compiler: Compiler, announce: Callable[[str], None]
) -> dict[str, dict]:
    """Return the figures of each way by its name; {"error": text} for one that cannot run on the topology.

    The figures are `fits`, `step_seconds` and `tokens_per_second` (None if it does not fit), `memory_gib_per_device`
    and `microbatches`. Equal steps are compiled once.
    """
    found = {}
    for name, config in ways.items():
        try:
            validation.validate(config, topology.chips)
            found[name] = _figures(_compile(config, topology, compiler))
        except (ConfigError, CompileError) as error:
            found[name] = {"error": str(error)}
        announce(f"rehearsed {name} on {topology.name}: {text(found[name])}")
    return found


def factors(found: dict[str, dict], of: str, baseline: str) -> dict:
    """Return how many times faster a way is than the baseline, and how many times less memory it needs.

    A factor is None if one of the two figures is unknown.
    """

    def ratio(name: str) -> float | None:
        one, other = found[baseline].get(name), found[of].get(name)
        return one / other if one and other else None

    return {
        "baseline": baseline,
        "times_faster": ratio("step_seconds"),
        "times_less_memory": ratio("memory_gib_per_device"),
    }


def text(figures: dict) -> str:
    """Return the figures of a way in a few words."""
    if "error" in figures:
        return figures["error"]
    memory = f"{figures['memory_gib_per_device']:.3g} GiB a chip"
    if not figures["fits"]:
        return f"does not fit, it needs {memory}"
    return f"{figures['step_seconds']:.4g} s a step, {memory}"


def _compile(config: ConfigDict, topology: Topology, compiler: Compiler) -> Compiled:
    """Return a compiled step; with batch.fit=auto that of the fewest microbatches that fit, else of the most."""
    if config.batch.fit == "none":
        return compiler.compile(_settled(config), topology)
    tried = []

    def fits(candidate: ConfigDict) -> bool:
        tried.append(compiler.compile(_settled(candidate), topology))
        return tried[-1].fits

    copy = config.copy_and_resolve_references()
    try:
        fit.fit(copy, fits)
    except ConfigError:
        if not tried:
            raise
        return tried[-1]
    return compiler.compile(_settled(copy), topology)


def _settled(config: ConfigDict) -> ConfigDict:
    """Return a copy with a TPU's values of `auto` and 0, see training/platform_defaults.py: equal steps look equal."""
    copy = config.copy_and_resolve_references()
    copy.model.dtype = "bfloat16" if copy.model.dtype == "auto" else copy.model.dtype
    copy.train.gradient_accumulation = copy.train.gradient_accumulation or 1
    return copy


def _figures(compiled: Compiled) -> dict:
    found = estimate(compiled)
    return {
        "fits": found["fits"],
        "step_seconds": found["step_seconds"] if found["fits"] else None,
        "tokens_per_second": found["tokens_per_second"] if found["fits"] else None,
        "memory_gib_per_device": found["hbm_gib"]["total"],
        "microbatches": found["num_microbatches"],
        "mesh": found["mesh"],
    }
