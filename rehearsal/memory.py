# SPDX-License-Identifier: Apache-2.0
"""Attributes a device's memory to the buffers that live at each point of the schedule, by class and by layer.

The compiler reports only totals. Here every result of the schedule becomes a buffer that lives from its instruction to
its last use; loops, slices updated in place and views share the buffers of their operands. The total remains the
compiler's: memory that belongs to no buffer counts as temporaries.
"""

import dataclasses
import math
import re
from collections.abc import Iterable

from rehearsal import roofline
from rehearsal.hlo import HOST, Instruction, Module
from rehearsal.schedule import label

SMALL = 2**20  # smaller buffers (in bytes) get no name
ARGUMENTS = {
    "state.params": "parameters", "frozen": "parameters", "state.extra": "optimizer", "state.optimizer": "optimizer",
    "batch": "batch",
}  # fmt: skip
CLASSES = ("parameters", "optimizer", "batch", "gradients", "saved activations", "temporaries")
SHARING = ("get-tuple-element", "tuple", "bitcast", "optimization-barrier", "opt-barrier", "while", "reshape")
ALIASED = re.compile(r"\{(\d*)\}: \((\d+), \{\}")  # (result, operand whose memory it takes) of a kernel
STARTS = (
    "copy-start", "slice-start", "all-gather-start", "all-reduce-start", "collective-permute-start", "async-start",
)  # fmt: skip


@dataclasses.dataclass(eq=False)
class Buffer:
    """Memory that a result takes: `kind` is one of CLASSES."""

    bytes: float
    kind: str
    name: str
    source: str


@dataclasses.dataclass
class Usage:
    """Memory of a device over a step.

    at_peak: the buffers that are alive at the peak.
    over_time: (seconds, {class: bytes}) along the step.
    """

    at_peak: list[Buffer]
    over_time: list[tuple[float, dict[str, float]]]

    def by_class(self) -> dict[str, float]:
        """Return the bytes of each class at the peak."""
        return _sum_by_class(self.at_peak)

    def largest(self, count: int = 10) -> list[Buffer]:
        """Return the largest buffers at the peak, the largest first."""
        return sorted(self.at_peak, key=lambda buffer: -buffer.bytes)[:count]


def usage(module: Module, entry_seconds: dict[str, float]) -> Usage:
    """Return the memory of a step over time.

    Args:
      entry_seconds: how long each instruction of the entry computation takes; a loop counts as one instruction.
    """
    peak, over_time, now = [], [], 0.0
    for instruction, live in _Walker(module).walk(module.entry, []):
        now += entry_seconds[instruction.name]
        over_time.append((now, _sum_by_class(live)))
        peak = _highest((peak, live))
    return Usage(peak, over_time)


def breakdown(
    usage_at_peak: dict[str, float], state: dict[str, float], frozen: float, total: float
) -> dict[str, float]:
    """Return bytes of each class. They add up to `total`, unless the attributed bytes alone exceed it.

    Unattributed bytes count as temporaries.

    Args:
      state, frozen: bytes of the parts of the state, and of frozen parameters.
    """
    parts = {
        "parameters": state["parameters"] + frozen,
        "optimizer": state["optimizer"] + state["extra"],
        "batch": state["batch"] + state["carry"],
        "gradients": usage_at_peak.get("gradients", 0.0),
        "saved activations": usage_at_peak.get("saved activations", 0.0),
    }
    return parts | {"temporaries": max(0.0, total - sum(parts.values()))}


def _highest(moments: Iterable[list[Buffer]]) -> list[Buffer]:
    """Return the buffers of the first moment with the most bytes."""
    return max(moments, key=lambda live: sum(buffer.bytes for buffer in live), default=[])


def _sum_by_class(buffers: list[Buffer]) -> dict[str, float]:
    sums = dict.fromkeys(CLASSES, 0.0)
    for buffer in buffers:
        sums[buffer.kind] += buffer.bytes
    return sums


class _Walker:
    """Follows buffers through computations; a result is a list of its arrays, each a list of its buffers."""

    def __init__(self, module: Module):
        self.module = module
        entry = module.computations[module.entry]
        parameters = [i for i in entry if i.opcode == "parameter" and "params" in i.op_name]
        self.weights = {i.shapes[0].dims for i in parameters}

    def walk(self, computation: str, arguments: list[list[Buffer]]):
        """Yield (instruction, buffers that live while it runs), without the buffers of the arguments."""
        body = self.module.computations[computation]
        arrays: dict[str, list[list[Buffer]]] = {}
        last, outside = _last_uses(body), {b for array in arguments for b in array}
        live: dict[Buffer, int] = {}  # the number of the instruction that uses it last
        for number, instruction in enumerate(body):
            inside: list[Buffer] = []
            if instruction.opcode == "parameter":
                found = arguments if arguments else [self._argument(instruction)]
            elif instruction.opcode == "while":
                found = arrays[instruction.operands[0]]
                self._classify_carried(instruction, found)
                inside = self._peak_inside(instruction.called["body"][0], found)
            else:
                found = self._results(arrays, instruction, live, number)
                for name in instruction.called.get("to_apply", []) if instruction.opcode == "call" else []:
                    inside = self._peak_inside(name, [a for o in instruction.operands for a in arrays[o]])
            arrays[instruction.name] = found
            for buffer in (b for array in found for b in array if b not in outside):
                live[buffer] = max(live.get(buffer, 0), last.get(instruction.name, number))
            yield instruction, [*live, *inside]
            live = {buffer: until for buffer, until in live.items() if until > number}

    def _peak_inside(self, computation: str, arguments: list[list[Buffer]]) -> list[Buffer]:
        return _highest(live for _, live in self.walk(computation, arguments))

    def _argument(self, instruction: Instruction) -> list[Buffer]:
        if instruction.shapes[0].space == HOST:
            return []
        kind = next((kind for prefix, kind in ARGUMENTS.items() if instruction.op_name.startswith(prefix)), "optimizer")
        name = ".".join(re.findall(r"'(\w+)'", instruction.op_name)) or instruction.op_name
        moment = re.search(r"\.(mu|nu|average)\b", instruction.op_name)
        name += f" ({moment.group(1)})" if moment else ""
        return [Buffer(sum(s.padded_bytes for s in instruction.shapes), kind, name, "")]

    def _results(self, arrays, instruction: Instruction, live, number: int) -> list[list[Buffer]]:
        operands = [arrays[name] for name in instruction.operands]
        opcode = instruction.opcode
        if opcode == "tuple":
            return [array for operand in operands for array in operand]
        if opcode == "get-tuple-element":
            index = int(instruction.attribute(r"index=(\d+)"))
            return [operands[0][index]] if index < len(operands[0]) else [[]]
        if opcode in SHARING or opcode.endswith("-done") or (roofline.is_free(instruction) and operands):
            return [[b for operand in operands for array in operand for b in array]]
        if opcode in roofline.IN_PLACE:
            return [operands[0][0]]
        shapes = instruction.shapes
        if opcode in STARTS:  # (operand, result, semaphores)
            shapes = shapes[:1] if opcode == "copy-start" else shapes[1:2]
        if opcode == "fusion":
            return self._fusion(instruction, operands, live, number)
        shared = {int(result or 0): operands[int(operand)] for result, operand in ALIASED.findall(instruction.rest)}
        return [shared[n][0] if n in shared else self._new(instruction, shape) for n, shape in enumerate(shapes)]

    def _fusion(self, instruction: Instruction, operands, live, number: int) -> list[list[Buffer]]:
        """Reuse for each result the array of an updated slice, or an operand of the same size that ends here."""
        body = instruction.called["calls"][0]
        root = self.module.root(body)
        parts = self.module.operands(root) if root.opcode == "tuple" else [root]
        ending = [
            array for operand in operands for array in operand
            if array and all(b in live and live[b] <= number for b in array)
        ] if not roofline.flops(self.module, instruction) else []  # fmt: skip
        found = []
        for shape, part in zip(instruction.shapes, parts, strict=False):
            updated = self._updated(body, part)
            same = next((array for array in ending if sum(b.bytes for b in array) == shape.padded_bytes), None)
            if updated is not None and updated < len(operands) and operands[updated]:
                found.append(operands[updated][0])
            elif same is not None and shape.space == 0:
                ending.remove(same)
                found.append(same)
            else:
                found.append(self._new(instruction, shape))
        return found

    def _updated(self, body: str, part: Instruction) -> int | None:
        """Return the number of the parameter that a part of a fusion's result updates in place."""
        while part.opcode in ("bitcast", "copy", *roofline.IN_PLACE):
            updates = part.opcode in roofline.IN_PLACE
            part = self.module.operands(part)[0]
            if updates and part.opcode == "parameter":
                return part.number
        return None

    def _new(self, instruction: Instruction, shape) -> list[Buffer]:
        if shape.space or shape.padded_bytes == 0:
            return []
        is_gradient = shape.dims in self.weights and "transpose(" in instruction.op_name
        kind = "gradients" if is_gradient else "temporaries"
        return [Buffer(shape.padded_bytes, kind, label(instruction), self.module.source(instruction))]

    def _classify_carried(self, loop: Instruction, arrays: list[list[Buffer]]) -> None:
        """Classify arrays that a loop carries, one row an iteration, by the rows that its body writes."""
        trips, backward = self.module.trip_count(loop), "transpose(" in loop.op_name
        root = self.module.root(loop.called["body"][0])
        for array, shape, writer in zip(arrays, loop.shapes, self.module.operands(root), strict=False):
            of_weight = shape.dims in self.weights
            copies_weight = of_weight and (not backward or shape.dtype == "bf16")  # in the compute type
            if shape.dims[:1] != (trips,) or copies_weight:
                continue
            kind = "gradients" if of_weight else "temporaries" if backward else "saved activations"
            for buffer in array:
                if buffer.kind == "temporaries" and buffer.bytes >= SMALL:
                    buffer.kind, (buffer.name, buffer.source) = kind, self._written(writer, shape.dims)

    def _written(self, writer: Instruction, dims: tuple[int, ...]) -> tuple[str, str]:
        """Return (label, source) of the instruction that computed the row written into an array of `dims`."""
        if writer.opcode == "get-tuple-element":
            writer = self.module.operands(writer)[0]
        size = math.prod(dims[1:])
        rows = [o for o in self.module.operands(writer) if o.shapes and math.prod(o.shapes[0].dims) == size]
        for made in [writer, *reversed(self.module.inside(writer)), *rows]:
            if made.op_name and "dynamic_update" not in made.op_name and self.module.source(made):
                return label(made), self.module.source(made)
        return "stream between layers", ""


def _last_uses(body: list[Instruction]) -> dict[str, int]:
    """Return the number of the last instruction that uses each result; the root's operands live to the end."""
    last = {}
    for number, instruction in enumerate(body):
        for name in instruction.operands:
            last[name] = len(body) if instruction.root else number
    # A result that shares an operand's buffers keeps them alive.
    for instruction in reversed(body):
        shares = instruction.opcode in SHARING or instruction.opcode.endswith("-done")
        if shares or roofline.is_free(instruction) or instruction.opcode in roofline.IN_PLACE:
            for name in instruction.operands:
                last[name] = max(last.get(name, 0), last.get(instruction.name, 0))
    return last
