# SPDX-License-Identifier: Apache-2.0
"""Ten points to check before a long run, each judged by the compiled step or by the configuration, with evidence.

`rehearse.py --checklist` judges a step that was compiled for a topology, `pod.py validate` the step that a pod ran. A
point is a function (Seen) -> (verdict, evidence) in POINTS. The verdict is None where the point is not about this
hardware.
"""

import math
import re
from collections import defaultdict
from collections.abc import Callable
from typing import NamedTuple

from configs.base import BATCH_AXES
from rehearsal import hlo, roofline, schedule
from rehearsal.assumptions import Assumptions, of_topology
from rehearsal.compiler import GIB, Compiled
from rehearsal.layouts import sizing
from rehearsal.sections import Section, Table, seconds_text
from reporting.display import duration
from settings import cycles
from settings.architecture import attends, head_dim

REDUCE_SCATTER = "reduce_scatter"  # as in layers/fsdp.py, which would import jax
SHORT_TYPES = ("bf16", "s8", "u8", "f8e4m3fn", "f8e5m2")  # of operands that matrix units multiply at full speed
SIDE = 128  # columns of a matrix unit
FEWEST_SHORT, LEAST_IN_PLACE, LEAST_FREE, MOST_EXPOSED = 0.95, 0.9, 0.05, 0.1
REDUCING = ("reduce-scatter", "all-reduce", "collective-permute", "all-to-all")
BYTES = 4  # of a parameter
ONCE = 1.5  # times the gradient's elements; less than two reductions
LONGEST_LOST = 1800.0  # seconds of work that a preemption may cost
FEWEST_STEPS_OF_A_LINE = 5
WORDS = {True: "holds", False: "DOES NOT HOLD", None: "not judged"}
Verdict = tuple[bool | None, str]


class Seen(NamedTuple):
    """What the points judge; bytes are those of one device."""

    config: object  # resolved for the topology
    text: str  # of the compiled program
    module: hlo.Module  # the same, parsed
    replayed: schedule.Replayed  # the program's schedule
    mesh: dict[str, int]  # sizes of its axes
    accelerator: str  # cpu, tpu or gpu
    state_bytes: float  # of parameters and optimizer
    parameter_bytes: float
    total_bytes: float  # needed
    capacity_bytes: float | None  # available; None if unknown


class Point(NamedTuple):
    """A judged point; `holds` is None where it is not about this hardware."""

    name: str
    holds: bool | None
    evidence: str


def see(config, text: str, *, given: Assumptions, mesh: dict[str, int], **sizes) -> Seen:
    """Return what the points judge of a compiled program; `sizes` are the remaining attributes."""
    module = hlo.parse(text)
    return Seen(config, text, module, schedule.replay(module, given, mesh), mesh, **sizes)


def of_rehearsal(compiled: Compiled, figures: dict) -> list[Point]:
    """Return all points of a compiled step, given the report on it."""
    topology, facts = compiled.topology, compiled.facts
    return judge(see(
        compiled.config, compiled.program(), given=of_topology(topology, figures["peak_flops"]), mesh=facts["mesh"],
        accelerator=topology.accelerator, state_bytes=compiled.state_bytes,
        parameter_bytes=facts["state"]["parameters"], total_bytes=compiled.total_bytes,
        capacity_bytes=topology.capacity_gib * GIB,
    ))  # fmt: skip


def judge(seen: Seen) -> list[Point]:
    """Return all points."""
    return [Point(name, *point(seen)) for name, point in POINTS.items()]


def sections(report: dict) -> list[Section]:
    """Return the table of the points; [] for a report without them."""
    points = [Point(**one) for one in report.get("checklist", ())]
    if not points:
        return []
    judged = [point for point in points if point.holds is not None]
    holding = sum(point.holds for point in judged)
    title = f"CHECKLIST: {holding} of {len(judged)} points hold"
    title += f"; {len(points) - len(judged)} are not about this hardware" if len(judged) < len(points) else ""
    rows = [(point.name, WORDS[point.holds], point.evidence) for point in points]
    return [Section(title, [], (Table(("point", "verdict", "evidence"), rows),), bad=holding < len(judged))]


def bfloat16(seen: Seen) -> Verdict:
    """Nearly all products have operands of bfloat16 or shorter types."""
    if seen.accelerator == "cpu":
        return None, "products on a CPU use the type that is fastest there"
    by_type, others = defaultdict(float), defaultdict(float)
    for cost in seen.replayed.costs:
        for product, share in _products(seen.module, cost):
            kind = _operand_type(seen.module, product)
            by_type[kind] += share
            if kind not in SHORT_TYPES:
                others[seen.module.source(cost.instruction) or product.name] += share
    total = sum(by_type.values())
    if not total:
        return False, "the step has no matrix products"
    short = sum(flops for kind, flops in by_type.items() if kind in SHORT_TYPES) / total
    parts = ", ".join(f"{kind} {flops / total:.1%}" for kind, flops in sorted(by_type.items(), key=lambda i: -i[1]))
    longest = max(others, key=others.get, default="")
    return short >= FEWEST_SHORT, f"FLOPs of products by type: {parts}" + (f"; longest at {longest}" if longest else "")


def _products(module: hlo.Module, cost: schedule.Cost) -> list[tuple[hlo.Instruction, float]]:
    """Return the products within an instruction, each with its FLOPs of a step."""
    whole = cost.instruction
    inside = [i for i in (whole, *module.inside(whole)) if i.opcode in ("dot", "convolution") or roofline.is_kernel(i)]
    flops = [roofline.flops(module, i) for i in inside]
    return [(i, cost.flops * f / sum(flops)) for i, f in zip(inside, flops, strict=True) if f]


def _operand_type(module: hlo.Module, product: hlo.Instruction) -> str:
    """Return the type of the widest array among the first two operands that are not tables."""
    arrays = [o.shapes[0] for o in module.operands(product) if o.shapes and len(o.shapes[0].dims) > 1]
    if roofline.is_kernel(product):  # its tables are integers
        arrays = [a for a in arrays if "f" in a.dtype]
    return max(arrays[:2], key=lambda a: hlo.ITEM_BYTES[a.dtype]).dtype if arrays else "unknown"


def fixed_shapes(seen: Seen) -> Verdict:
    """One program runs all steps."""
    config = seen.config
    if names := cycles.changing_keys(config):
        return False, f"{' and '.join(names)} change the shape during the run; each shape is compiled while others run"
    rows, length = config.train.global_batch, config.train.sequence_length
    return True, f"one program for all steps, of {rows} x {length} tokens"


def one_reduction(seen: Seen) -> Verdict:
    """Gradients are reduced over the axes of the batch once a step, not in each microbatch."""
    axes = [axis for axis in BATCH_AXES if seen.mesh.get(axis, 1) > 1]
    if not axes:
        return None, "one device has the whole batch"
    if seen.mesh.get("context", 1) > 1:
        return None, "over mesh.context, gradients of weights and of keys and values cannot be distinguished"
    found = [cost for cost in seen.replayed.costs if _reduces(cost, axes)]
    reduced = sum(
        cost.count * _elements_before(cost, seen.mesh) * _sent(cost.axes.split("*"), seen.mesh) for cost in found
    )
    gradient = seen.parameter_bytes / BYTES * _times_gathered(seen.config, seen.mesh) * _sent(axes, seen.mesh)
    counts = {kind: round(sum(cost.count for cost in found if cost.kind == kind)) for kind in REDUCING}
    kinds = ", ".join(f"{count:,} {kind}s" for kind, count in counts.items() if count) or "no reductions"
    evidence = f"{kinds} over {', '.join(axes)} a step, of {reduced / gradient:.2f} times the gradient"
    return reduced <= ONCE * gradient, evidence


def _sent(axes: list[str], mesh: dict[str, int]) -> float:
    """Return the share of its array that a device sends to reduce it; of two reductions, the first leaves a part."""
    return 1 - 1 / math.prod(mesh[axis] for axis in axes)


def _times_gathered(config, mesh: dict[str, int]) -> float:
    """Return how many times its own part of the weights a device has the gradient of, before it is reduced.

    parallelism/axis_rules.py shards weights over fsdp and expert; those of experts stay split over expert.
    """
    model, expert = config.model, mesh.get("expert", 1)
    experts = sizing.expert_parameters(model) / sizing.num_parameters(config) if model.num_experts else 0.0
    return mesh.get("fsdp", 1) * (expert * (1 - experts) + experts)


def _reduces(cost: schedule.Cost, axes: list[str]) -> bool:
    """Return whether a collective adds up gradients over axes of the batch.

    A permute or an all-to-all does so only in layers/fsdp.py: ring_reduce_scatter.
    """
    if cost.kind not in REDUCING or not cost.axes or not set(cost.axes.split("*")) <= set(axes):
        return False
    return cost.kind in ("reduce-scatter", "all-reduce") or REDUCE_SCATTER in cost.instruction.op_name


def _elements_before(cost: schedule.Cost, mesh: dict[str, int]) -> float:
    """Return how many numbers of a device a reduction adds up; a ring of n devices sends n - 1 parts of them."""
    shapes, number = cost.instruction.shapes, math.prod(mesh[axis] for axis in cost.axes.split("*"))
    if cost.kind == "collective-permute":
        return math.prod(shapes[0].dims) * number / (number - 1)
    elements = sum(math.prod(shape.dims) for shape in shapes)
    return elements * number if hlo.collective_kind(cost.instruction) == "reduce-scatter" else elements


def in_place(seen: Seen) -> Verdict:
    """The new state takes the memory of the old one."""
    numbers = map(int, re.findall(r"\{[\d, ]*\}: \((\d+), \{", seen.text.partition("\n")[0]))
    entry = seen.module.computations[seen.module.entry]
    given = {i.number: i.bytes for i in entry if i.opcode == "parameter"}
    share = sum(given.get(number, 0.0) for number in numbers) / seen.state_bytes
    return share >= LEAST_IN_PLACE, f"{min(1.0, share):.0%} of {seen.state_bytes / GIB:.2f} GiB is updated in place"


def memory(seen: Seen) -> Verdict:
    """Some memory is left for what is not in the step, such as evaluation and fragmentation."""
    if not seen.capacity_bytes or seen.accelerator == "cpu":
        why = "a CPU's devices share the host's memory" if seen.accelerator == "cpu" else "its capacity is not known"
        return None, f"a step needs {seen.total_bytes / GIB:.2f} GiB; {why}"
    free = 1 - seen.total_bytes / seen.capacity_bytes
    needed, capacity = seen.total_bytes / GIB, seen.capacity_bytes / GIB
    return free >= LEAST_FREE, f"a step needs {needed:.1f} of {capacity:.0f} GiB; {free:.0%} is free"


def full_units(seen: Seen) -> Verdict:
    """All sizes of products fill the matrix units of a TPU."""
    if seen.accelerator != "tpu":
        return None, f"only TPUs have matrix units of {SIDE} columns"
    model = seen.config.model
    sizes = {"model.mlp_dim": model.mlp_dim / seen.mesh.get("model", 1)}
    sizes |= {} if model.name in ("mlp_classifier", "mlp_regressor") else {"model.embed_dim": model.embed_dim}
    sizes |= {"model.head_dim": head_dim(model)} if attends(model) else {}
    odd = [f"{name} is {size:g} on a device" for name, size in sizes.items() if size % SIDE]
    return not odd, "; ".join(odd) or f"{', '.join(sizes)}: multiples of {SIDE}"


def hidden_collectives(seen: Seen) -> Verdict:
    """Devices compute while others' data is on its way."""
    if math.prod(seen.mesh.values()) == 1:
        return None, "one device exchanges nothing"
    if seen.accelerator != "tpu":
        return None, "only the TPU compiler schedules collectives during computation"
    exposed, step = seen.replayed.exposed_seconds, seen.replayed.seconds
    evidence = f"devices wait {seconds_text(exposed)} of {seconds_text(step)} for collectives, {exposed / step:.1%}"
    return exposed <= MOST_EXPOSED * step, evidence


def input_ahead(seen: Seen) -> Verdict:
    """Batches are made ahead, in threads, and each host reads its own rows."""
    data = seen.config.data
    prefetch, readers = data.prefetch or "automatic", data.readers or "automatic"
    evidence = f"data.prefetch={prefetch}, data.readers={readers}; each process reads only its rows"
    return data.prefetch != 1, evidence


def saves(seen: Seen) -> Verdict:
    """Checkpoints are saved while the run goes on, often enough."""
    every, seconds = seen.config.train.save_every, seen.replayed.seconds
    if not every:
        return False, "train.save_every=0 saves only at the end of the run"
    lost = every * seconds
    if seen.accelerator == "cpu":
        return None, f"saved in the background every {every} steps"
    evidence = f"saved in the background every {every} steps; a lost host costs at most {duration(lost)} of work"
    return lost <= LONGEST_LOST, evidence


def metrics(seen: Seen) -> Verdict:
    """Numbers are fetched one step late and written seldom, and the run can be profiled."""
    every = seen.config.train.log_every
    evidence = f"train.log_every={every}; --profile=START:STOP, or a number in RUN/profile.request, traces steps"
    return every >= FEWEST_STEPS_OF_A_LINE, evidence


POINTS: dict[str, Callable[[Seen], Verdict]] = {
    "products in bfloat16": bfloat16, "fixed shapes": fixed_shapes, "one reduction of gradients": one_reduction,
    "state updated in place": in_place, "memory to spare": memory, "full matrix units": full_units,
    "hidden collectives": hidden_collectives, "input made ahead": input_ahead, "asynchronous saves": saves,
    "few metrics, and a profile": metrics,
}  # fmt: skip
