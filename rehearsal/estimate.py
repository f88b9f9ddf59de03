# SPDX-License-Identifier: Apache-2.0
"""Computes the figures of `rehearse.py --json` from a compiled step, without cost and advice.

Every figure is for one chip and one step unless its name says otherwise. The result is cached with the compilation.
"""

import dataclasses
import hashlib
import pathlib
from collections import defaultdict
from collections.abc import Callable, Iterable

import numpy as np

from cluster import identity
from rehearsal import assumptions, hlo, memory, roofline, schedule, sealed
from rehearsal.compiler import GIB, Compiled

HEAVIEST = 20
SHORTEST_BAR = 0.0005  # of an iteration; timelines omit shorter events
NUM_SAMPLES = 400  # of memory over time; fewer than twice as many are kept
ESTIMATING = ("assumptions", "estimate", "hlo", "memory", "roofline", "schedule")
ROOM = pathlib.Path(__file__).resolve().parent
BASIS = {
    "tpu": "the schedule of the TPU compiler",
    "gpu": "a roofline over a compilation for this CPU",
    "cpu": "a roofline over a compilation for this CPU, a lower bound",
}
CORE = ("matmul", "attention kernel", "kernel", "element-wise")
UPDATE_ALONE = "the step is the update alone; the answers that it learns from are drawn first, and not estimated"
PASSES = ("forward", "backward", "recomputed", "update")


def estimate(compiled: Compiled) -> dict:
    """Return the figures of a compiled step; those of time are None if the compiler ran out of device memory.

    Raises:
      ValueError: a loop, a collective or a kernel of the schedule cannot be read (the message names it), or the
        schedule has no cycles.
    """
    topology = dataclasses.replace(compiled.topology, price_per_chip_hour=None)
    facts = hashlib.sha256(f"{topology} {topology.capacity_gib}".encode()).hexdigest()
    path = compiled.folder / f"estimate-{facts[:8]}-{code_digest()}.json"
    return kept(path, lambda: _estimate(compiled))


def kept(path: pathlib.Path, make: Callable[[], dict]) -> dict:
    """Return the content of a cache file; if it is missing or damaged, make it first."""
    found = sealed.read(path)
    if found is None:
        sealed.write(path, make())
        found = sealed.read(path)
    return found


def code_digest(*files: str) -> str:
    """Return a digest of the code of an estimate and of the given files of this folder."""
    return identity.files_digest(ROOM / f"{name}.py" for name in (*ESTIMATING, *files))[:16]


def _estimate(compiled: Compiled) -> dict:
    topology, facts = compiled.topology, compiled.facts
    figures = {
        "fits": compiled.fits,
        "compiled": not facts["out_of_memory"],
        "basis": BASIS[topology.accelerator],
        "num_parameters": facts["num_parameters"],
        "num_microbatches": facts["num_microbatches"],
        "mesh": facts["mesh"],
        "flops_model": facts["flops_per_step"] / topology.chips,
        "compile_seconds": facts.get("compile_seconds"),
    }
    if facts["out_of_memory"]:
        return figures | _of_memory(compiled, {}) | dict.fromkeys(TIME_KEYS) | {"collectives": [], "notes": []}
    module = hlo.parse(compiled.program())
    if topology.accelerator == "tpu" and all(i.cycles is None for body in module.computations.values() for i in body):
        raise ValueError("the program has no cycle estimates of the compiler, from which its time is computed")
    given = assumptions.of_topology(topology, facts.get("measured_peak_flops"))
    replayed = schedule.replay(module, given, facts["mesh"])
    used = memory.usage(module, replayed.entry_seconds)
    return figures | _of_memory(compiled, used.by_class(), used) | _of_time(compiled, module, replayed, given)


TIME_KEYS = (
    "step_seconds", "mfu", "hardware_utilisation", "tokens_per_second", "tokens_per_second_per_device",
    "exposed_communication_seconds", "hidden_communication_seconds", "flops_hardware", "peak_flops",
)  # fmt: skip


def _of_memory(compiled: Compiled, at_peak: dict[str, float], used: memory.Usage | None = None) -> dict:
    state, frozen, total = compiled.facts["state"], compiled.facts["frozen"], compiled.total_bytes
    parts = {name: size / GIB for name, size in memory.breakdown(at_peak, state, frozen, total).items()}
    others = total / GIB - sum(parts[name] for name in ("parameters", "optimizer", "batch"))
    sizes = {"activations_and_temporaries": others, "total": total / GIB, "capacity": compiled.topology.capacity_gib}
    named = used.largest() if used else []
    return {
        "hbm_gib": {name.replace(" ", "_"): size for name, size in parts.items()} | sizes,
        "host_gib": compiled.facts["on_host"] / GIB,
        "largest_buffers": [{"gib": b.bytes / GIB, "class": b.kind, "name": b.name, "source": b.source} for b in named],
        "memory_over_time": _thinned(used.over_time) if used else [],
    }


def _thinned(samples: list[tuple[float, dict]]) -> list[dict]:
    """Return fewer than twice NUM_SAMPLES samples, each the highest among its neighbours."""
    size = max(1, len(samples) // NUM_SAMPLES)
    highest = [max(samples[n : n + size], key=lambda s: sum(s[1].values())) for n in range(0, len(samples), size)]
    return [{"seconds": at} | {kind: size / GIB for kind, size in by.items()} for at, by in highest]


def _of_time(compiled: Compiled, module: hlo.Module, replayed: schedule.Replayed, given) -> dict:
    config, chips = compiled.config, compiled.topology.chips
    step, model = replayed.seconds, compiled.facts["flops_per_step"] / chips
    tokens = config.train.global_batch * config.train.sequence_length
    joined = [cost for cost in replayed.costs if cost.category == "collective"]
    categories = seconds_by_category(replayed)
    return {
        "step_seconds": step,
        "mfu": model / step / given.peak_flops,
        "hardware_utilisation": replayed.flops / step / given.peak_flops,
        "tokens_per_second": tokens / step,
        "tokens_per_second_per_device": tokens / step / chips,
        "exposed_communication_seconds": replayed.exposed_seconds,
        "hidden_communication_seconds": sum(max(0.0, cost.seconds - cost.waited_seconds) for cost in joined),
        "flops_hardware": replayed.flops,
        "peak_flops": given.peak_flops,
        "seconds_by_category": dict(categories),
        "seconds_by_pass": {
            name: sum(
                cost.seconds for cost in replayed.costs if cost.category in CORE and pass_of(cost.instruction) == name
            )
            for name in PASSES
        },
        "collectives": _collectives(module, joined),
        "operations": _operations(module, replayed, given),
        "timelines": _timelines(replayed),
        "notes": _notes(compiled, categories),
    }


def seconds_by_category(replayed: schedule.Replayed) -> dict[str, float]:
    """Return the seconds that the core spends on each category, or waits for it; a missing one is 0."""
    categories = defaultdict(float)
    for cost in replayed.costs:
        categories[cost.category] += cost.seconds if cost.category in CORE else cost.waited_seconds
    return categories


def _notes(compiled: Compiled, seconds_by_category: dict[str, float]) -> list[str]:
    """Return notes on results that would surprise a reader."""
    found = []
    is_tpu, attends = compiled.topology.accelerator == "tpu", compiled.config.model.name == "decoder_lm"
    if is_tpu and attends and not seconds_by_category["attention kernel"]:
        found.append(
            "attention runs without its TPU kernel, which needs train.sequence_length / mesh.context to be a multiple "
            "of 128"
        )
    priced = {"gpu": "matmul", "tpu": "attention kernel"}.get(compiled.topology.accelerator)  # at the bfloat16 peak
    if compiled.config.model.dtype == "float32" and priced and seconds_by_category[priced]:
        found.append(f"the time of category {priced!r} is estimated as in bfloat16; in float32 it is longer")
    if (quantization := compiled.config.model.quantization) != "none":
        found.append("MFU is relative to the bfloat16 peak, although products are quantized")
        if quantization not in (faster := compiled.topology.faster):
            instead = f"use {' or '.join(faster)}, or none" if faster else "use none"
            found.append(
                f"model.quantization={quantization} gains nothing on {compiled.topology.chip}, which multiplies it no "
                f"faster than bfloat16; {instead}"
            )
        elif compiled.topology.accelerator == "gpu":
            found.append(f"the roofline assumes that products in {quantization} are as slow as those in bfloat16")
    if compiled.config.batch.ramp != "none":
        found.append(
            "the time of the run is an upper bound: batch.ramp begins with smaller batches than the estimate's"
        )
    if compiled.facts["decoded"] and not is_tpu:
        found.append(UPDATE_ALONE)
    if compiled.topology.accelerator == "gpu":
        found.append("compiled for a CPU; llama_1b on one H200 took up to 15% less time and 37 to 40% less memory")
    if compiled.topology.accelerator != "tpu" and compiled.facts["on_host"]:
        found.append("compiled for a CPU, where arrays in the host's memory count as arrays of the chip")
    hops = _longest_hops(compiled.facts["mesh"], compiled.facts["device_coordinates"])
    if far := ", ".join(f"{axis} up to {number}" for axis, number in hops.items() if number > 1):
        found.append(f"the estimate assumes that neighbors on a mesh axis are one hop apart; some are farther: {far}")
    return found


def pass_of(instruction: hlo.Instruction) -> str:
    """Return the one of PASSES that an instruction belongs to, judged by its name in jax."""
    name = instruction.op_name.partition(roofline.GPU_ATTENTION)[0]  # which computes its scores again by itself
    if "rematted_computation" in name:
        return "recomputed"
    if "transpose(" in name:
        return "backward"
    return "forward" if "jvp(" in name else "update"


def _longest_hops(mesh: dict[str, int], coordinates: list[list[int]]) -> dict[str, int]:
    """Return the most hops between ring neighbours for each mesh axis; {} if chips have no coordinates."""
    if not coordinates[0]:
        return {}
    places = np.array(coordinates).reshape(*mesh.values(), -1)
    steps = {axis: np.roll(places, 1, number) - places for number, axis in enumerate(mesh) if mesh[axis] > 1}
    return {axis: int(np.abs(step).sum(axis=-1).max()) for axis, step in steps.items()}


def summed(rows: Iterable[tuple[dict, dict]]) -> list[dict]:
    """Add up the figures of equal labels, given pairs (labels, figures); return the longest first."""
    sums: dict[tuple, dict] = {}
    for what, figures in rows:
        row = sums.setdefault(tuple(what.values()), what | dict.fromkeys(figures, 0))
        for name, figure in figures.items():
            row[name] += figure
    return sorted(sums.values(), key=lambda row: -row["seconds"])


def _collectives(module: hlo.Module, costs: list[schedule.Cost]) -> list[dict]:
    """Return collectives by kind, mesh axes, source line and whether they are asynchronous, the longest first."""
    return summed(
        ({"kind": c.kind, "axes": c.axes, "asynchronous": c.asynchronous, "source": module.source(c.instruction)},
         {"count": round(c.count), "gib": c.bytes / GIB, "seconds": c.seconds, "exposed_seconds": c.waited_seconds})
        for c in costs
    )  # fmt: skip


def _operations(module: hlo.Module, replayed: schedule.Replayed, given) -> list[dict]:
    """Return the heaviest operations on the core; operations of one source line and name are added up."""
    heaviest = summed(
        ({"name": schedule.label(c.instruction), "source": module.source(c.instruction), "category": c.category,
          "pass": pass_of(c.instruction)},
         {"seconds": c.seconds, "flops": c.flops, "bytes": c.bytes})
        for c in replayed.costs if c.category in CORE
    )[:HEAVIEST]  # fmt: skip
    ridge = given.peak_flops / given.memory_bandwidth
    for row in heaviest:
        intensity = row["flops"] / row["bytes"] if row["bytes"] else float("inf")
        row["share"] = row["seconds"] / replayed.seconds
        row["flops_per_second"] = row["flops"] / row["seconds"] if row["seconds"] else 0.0
        row["intensity"] = min(intensity, 1e6)
        row["bound"] = "chip" if not row["bytes"] else "compute" if intensity >= ridge else "memory"
    return heaviest


def _timelines(replayed: schedule.Replayed) -> list[dict]:
    """Return one iteration of each loop that takes at least a tenth of the step, the longest first."""
    found = []
    for name, (seconds, events) in sorted(replayed.timelines.items(), key=lambda item: -item[1][0]):
        end = max((e.start + e.seconds for e in events), default=0.0)
        if seconds >= 0.1 * replayed.seconds and end:
            bars = [event._asdict() for event in events if event.seconds > SHORTEST_BAR * end]
            what = "backward" if "transpose(" in name else "forward"
            share = seconds / replayed.seconds
            found.append({"name": f"{what}: {name.rpartition('/')[0]}", "share": share, "events": bars})
    return found
