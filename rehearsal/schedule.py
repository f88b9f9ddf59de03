# SPDX-License-Identifier: Apache-2.0
"""Replays the schedule of a compiled program: when each instruction would begin and end, and what waits for what.

The core runs instructions in the order of the text. An asynchronous collective or copy runs concurrently with the
core. It begins at its `-start`, after everything that already queues on the same links, and the core waits for it at
its `-done`. The time of an instruction is the compiler's own estimate in cycles if there is one; else see `Prices`.
"""

import dataclasses
from collections import defaultdict
from typing import NamedTuple

import numpy as np

from rehearsal import roofline
from rehearsal.assumptions import Assumptions
from rehearsal.hlo import HOST, Instruction, Module, collective_kind, groups

SAME_SECONDS = 1e-10  # two iterations of a loop that differ by less have settled
SELDOM = "seldom"  # the name of branches that are seldom taken, see layers/experts/dispatch.py
SHORT_LOOP = 8  # a loop of at most this many iterations is replayed whole and shown in the surrounding timeline
SCATTERING = "AllReduceScatterFusion"  # the compiler's name for an all-reduce that is fused with a slice
COPIES = ("copy-start", "slice-start", "async-start")


@dataclasses.dataclass
class Cost:
    """The total cost of one instruction over a step."""

    instruction: Instruction
    category: str  # matmul, attention kernel, kernel, collective, copy, element-wise
    seconds: float = 0.0  # from its start to its end
    waited_seconds: float = 0.0  # in which the core waited for it
    count: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0
    kind: str = ""  # for a collective, one of hlo.COLLECTIVES
    axes: str = ""  # mesh axes of a collective, "fsdp" or "data*fsdp"
    asynchronous: bool = False  # it runs while the core computes


class Event(NamedTuple):
    """A bar of the timeline."""

    lane: str
    start: float
    seconds: float
    category: str
    label: str


@dataclasses.dataclass
class Replayed:
    """A step's time and where it goes.

    entry_seconds: how long each instruction of the entry computation takes; a loop counts as one instruction.
    timelines: one iteration of each loop, {name: (seconds of all its iterations, events)}.
    """

    seconds: float
    costs: list[Cost]
    entry_seconds: dict[str, float]
    timelines: dict[str, tuple[float, list[Event]]]

    @property
    def flops(self) -> float:
        """FLOPs that the hardware performs in a step, on one chip."""
        return sum(cost.flops for cost in self.costs)

    @property
    def exposed_seconds(self) -> float:
        """Seconds in which the core waits for communication."""
        return sum(cost.waited_seconds for cost in self.costs if cost.category == "collective")


class Joined(NamedTuple):
    """A collective within a fusion.

    A collective may span several fusions. It is then in each of them, with the same channel; `mark` is
    AsyncCollectiveStart in the first and AsyncCollectiveDone in the last.
    """

    instruction: Instruction
    channel: str
    mark: str


class Price(NamedTuple):
    """The cost of an instruction alone; `where` is the mesh axes of a collective, or the direction of a copy."""

    category: str
    seconds: float
    flops: float = 0.0
    bytes: float = 0.0
    where: str = ""


class Prices:
    """Computes how long an instruction takes on a chip if nothing else runs."""

    def __init__(self, module: Module, assumptions: Assumptions, mesh: dict[str, int]):
        self.module, self.assumptions, self.mesh = module, assumptions, mesh
        self.num_devices = int(np.prod(list(mesh.values())))
        self.known: dict[Instruction, Price] = {}
        self.joined: dict[Instruction, list[Joined]] = {}
        self.within: dict[Instruction, Instruction] = {}  # the fusion that a collective is part of
        self.in_place_of_kernels = roofline.in_place_of_kernels(module)

    def of(self, instruction: Instruction) -> Price:
        """Return the price of an instruction, computed once."""
        if instruction not in self.known:
            self.known[instruction] = self._of(instruction)
        return self.known[instruction]

    def joined_in(self, fusion: Instruction) -> list[Joined]:
        """Return the collectives within a fusion."""
        if fusion not in self.joined:
            inside = self.module.inside(fusion)
            collectives = [i for i in inside if collective_kind(i)]
            self.within |= dict.fromkeys(collectives, fusion)
            marks = {name: roofline.target(i) for i in inside for name in i.operands if i.opcode == "custom-call"}
            self.joined[fusion] = [
                Joined(i, i.attribute(r"channel_id=(\d+)") or i.name, marks.get(i.name, "")) for i in collectives
            ]
        return self.joined[fusion]

    def kind(self, instruction: Instruction) -> str:
        """Return the kind of collective; an all-reduce that the compiler fused with a slice is a reduce-scatter."""
        fusion = self.within.get(instruction)
        scatters = fusion is not None and SCATTERING in fusion.rest
        return "reduce-scatter" if scatters else collective_kind(instruction)

    def _of(self, instruction: Instruction) -> Price:
        given = self.assumptions
        if kind := self.kind(instruction):
            return self._collective(instruction, kind)
        if instruction in self.in_place_of_kernels:
            causal = roofline.flops(self.module, instruction) / 2
            return Price("attention kernel", causal / (given.peak_flops * given.kernel_efficiency), causal, 0.0)
        if instruction.opcode in COPIES:
            moved = max((shape.bytes for shape in _result(instruction)), default=0.0)
            way = host_copy(instruction)
            return Price("copy", moved / (given.host_bandwidth if way else given.memory_bandwidth), 0.0, moved, way)
        flops, num_bytes = roofline.flops(self.module, instruction), roofline.traffic(self.module, instruction)
        by_memory = num_bytes / given.memory_bandwidth
        if kernel := roofline.kernel_of(self.module, instruction):
            seconds = flops / (given.peak_flops * given.kernel_efficiency)
            if read := roofline.decode_bytes(kernel):
                by_cache = read / (given.memory_bandwidth * given.decode_efficiency)
                return Price("attention kernel", max(seconds, by_cache), flops, read)
            if roofline.is_attention(kernel):
                return Price("attention kernel", seconds, flops, num_bytes)
            return Price("kernel", max(seconds, by_memory), flops, num_bytes)
        seconds = max(flops / given.peak_flops, by_memory)
        if instruction.cycles is not None and given.clock_hz:
            seconds = instruction.cycles / given.clock_hz
        return Price("matmul" if flops else "element-wise", seconds, flops, num_bytes)

    def _collective(self, instruction: Instruction, kind: str) -> Price:
        """Return the price of the bytes that a device sends.

        A ring sends (n - 1) / n of the whole tensor, an all-reduce sends that twice, a permute sends its operand once.
        """
        if instruction.opcode == "recv":  # between slices
            size, axes, bandwidth = self.mesh["dcn_data"], "dcn_data", self.assumptions.dcn_bandwidth
            sent = sum(shape.bytes for shape in instruction.shapes[:1])
        else:
            joined = groups(instruction, self.num_devices)
            size, axes, bandwidth = len(joined[0]), _mesh_axes(joined, self.mesh), self.assumptions.ring_bandwidth
            operands = self.module.operands(instruction)
            sent = sum(operand.bytes for operand in operands)
        if kind == "collective-permute":  # further operands are its destination and are not sent
            sent, bandwidth, axes = operands[0].bytes, self.assumptions.permute_bandwidth, axes + _direction(joined)
        elif kind == "all-gather":
            sent *= size - 1
        elif kind == "all-reduce":
            sent *= 2 * (size - 1) / size
        elif kind in ("all-to-all", "ragged-all-to-all"):
            sent *= max(size / 4, (size - 1) / size)  # each part travels a quarter of the ring
        else:
            sent *= (size - 1) / size
        return Price("collective", sent / bandwidth, 0.0, sent, axes)


def replay(module: Module, assumptions: Assumptions, mesh: dict[str, int]) -> Replayed:
    """Replay one step on one chip and return its time and costs.

    `module` is the program of one device. `mesh` is {axis: size}, in the order of the program's device numbers.

    Raises:
      ValueError: a loop, a collective or a kernel cannot be read; the message names it.
    """
    player = _Player(module, Prices(module, assumptions, mesh))
    entry_seconds = player.run(module.entry)
    return Replayed(player.now, list(player.costs.values()), entry_seconds, player.timelines)


class _Player:
    def __init__(self, module: Module, prices: Prices):
        self.module, self.prices = module, prices
        self.now, self.times = 0.0, 1.0  # `times`: how often the instructions being replayed run in a step
        self.free_at: dict[str, float] = defaultdict(float)  # when each asynchronous queue is free
        self.costs: dict[Instruction, Cost] = {}
        self.chains: dict[str, tuple[float, Cost]] = {}  # collectives under way over several fusions, by channel
        self.events: list[Event] = []
        self.timelines: dict[str, tuple[float, list[Event]]] = {}

    def run(self, computation: str) -> dict[str, float]:
        """Play a computation from now on; return how long each instruction took."""
        pending: dict[str, tuple[float, Cost]] = {}
        took = {}
        for instruction in self.module.computations[computation]:
            opcode, start = instruction.opcode, self.now
            if opcode == "while":
                self._loop(instruction)
            elif opcode == "conditional":
                self._branch(instruction)
            elif opcode == "call":
                self.run(instruction.called["to_apply"][0])
            elif opcode in ("send", "send-done"):
                pass  # the recv stands for both
            elif opcode.endswith(("-done", "-update")):
                begun = instruction.operands[0]
                if begun not in pending:
                    raise ValueError(f"{instruction.name} waits for an instruction that did not start")
                pending[instruction.name] = pending[begun]
                if opcode.endswith("-done"):
                    self._wait(*pending[instruction.name])
            elif opcode.endswith("-start") or opcode == "recv":
                pending[instruction.name] = self._start(self.module.wrapped(instruction))
            elif opcode == "fusion" and self.prices.joined_in(instruction):
                self._fused(instruction, self.prices.joined_in(instruction))
            elif not roofline.is_free(instruction):
                self._execute(instruction)
            took[instruction.name] = self.now - start
        return took

    def _fused(self, fusion: Instruction, joined: list[Joined]) -> None:
        """Start the collectives that begin in a fusion, run its computation, and wait for those that end in it."""
        begun = [one for one in joined if one.channel not in self.chains]
        for one in begun:
            self.chains[one.channel] = self._start(one.instruction)
        computes = fusion.cycles is not None or roofline.flops(self.module, fusion)
        if computes:
            self._execute(fusion)
        for one in joined:
            whole = one in begun and one.mark != "AsyncCollectiveStart"
            if whole or one.mark == "AsyncCollectiveDone":
                until, cost = self.chains.pop(one.channel)
                cost.asynchronous = cost.asynchronous and not (whole and not computes)
                self._wait(until, cost)

    def _cost(self, instruction: Instruction) -> tuple[Cost, float]:
        price = self.prices.of(instruction)
        shown = self.prices.within.get(instruction, instruction)
        new = Cost(shown, price.category, kind=self.prices.kind(instruction), axes=price.where.rstrip("+-"))
        cost = self.costs.setdefault(instruction, new)
        cost.seconds += price.seconds * self.times
        cost.count += self.times
        cost.flops += price.flops * self.times
        cost.bytes += price.bytes * self.times
        return cost, price.seconds

    def _execute(self, instruction: Instruction) -> None:
        cost, seconds = self._cost(instruction)
        start = self.now
        if cost.category == "collective":  # a synchronous one: the core waits for the links too
            queue = self._queue(instruction)
            start = max(start, self.free_at[queue])
            self.free_at[queue] = start + seconds
            cost.waited_seconds += (start + seconds - self.now) * self.times
        self._show("core", start, seconds, cost)
        self.now = start + seconds

    def _start(self, instruction: Instruction) -> tuple[float, Cost]:
        cost, seconds = self._cost(instruction)
        cost.asynchronous = True
        queue = self._queue(instruction)
        start = max(self.now, self.free_at[queue])
        self.free_at[queue] = start + seconds
        self._show(queue, start, seconds, cost)
        return start + seconds, cost

    def _wait(self, until: float, cost: Cost) -> None:
        cost.waited_seconds += max(0.0, until - self.now) * self.times
        self.now = max(self.now, until)

    def _queue(self, instruction: Instruction) -> str:
        price = self.prices.of(instruction)
        if price.category != "collective":
            return price.where or "copies"
        return f"{'permutes' if collective_kind(instruction) == 'collective-permute' else 'rings'} {price.where}"

    def _show(self, lane: str, start: float, seconds: float, cost: Cost) -> None:
        self.events.append(Event(lane, start, seconds, cost.category, label(cost.instruction)))

    def _branch(self, conditional: Instruction) -> None:
        """Replay the longest branch, or the shortest if the program names the others as seldom taken."""
        ends = []
        for branch in (name for names in conditional.called.values() for name in names):
            other = _Player(self.module, self.prices)
            other.run(branch)
            ends.append((other.now, branch))
        self.run((min if f"/{SELDOM}/" in conditional.op_name else max)(ends)[1])

    def _loop(self, loop: Instruction) -> None:
        """Replay iterations until two are the same, then count one more for all that remain."""
        body, trips = loop.called["body"][0], self.module.trip_count(loop)
        before, outer, events = self.now, self.times, self.events
        left, history = trips, [None]
        while left:
            start, self.events = self.now, []
            settled = trips > SHORT_LOOP and history[-1] is not None and _is_same(*history[-2:])
            happens = left if settled else 1
            self.times = outer * happens
            self.run(body)
            lags = {queue: end - self.now for queue, end in self.free_at.items() if end > self.now}
            history.append((self.now - start, lags))
            self.now += (self.now - start) * (happens - 1)
            for queue, lag in lags.items():
                self.free_at[queue] = self.now + lag
            if trips <= SHORT_LOOP:
                events = events + self.events
            left -= happens
        if trips > SHORT_LOOP:
            events = [*events, Event("core", before, self.now - before, "loop", label(loop))]
            iteration = [event._replace(start=event.start - start) for event in self.events]
            self.timelines[loop.op_name or loop.name] = (self.now - before) * outer, iteration
        self.times, self.events = outer, events


def _is_same(first: tuple | None, second: tuple) -> bool:
    """Return whether two iterations took the same time and left the same queues."""
    if first is None or first[1].keys() != second[1].keys():
        return False
    pairs = [(first[0], second[0]), *((first[1][queue], second[1][queue]) for queue in first[1])]
    return all(abs(a - b) < SAME_SECONDS for a, b in pairs)


def label(instruction: Instruction) -> str:
    """Return the last two parts of the name that jax gives it (an einsum and its product), or its name in the HLO."""
    parts = [part for part in instruction.op_name.split("/") if part not in ("while", "body", "closed_call")]
    parts = [part for part in parts if not part.startswith(("jit(", "transpose(", "jvp("))]
    return "/".join(parts[-2:]) or instruction.name


def host_copy(copy: Instruction) -> str:
    """Return the queue of an asynchronous copy, "to the host" or "from the host"; '' for a copy within the device."""
    target, *sources = [shape.space == HOST for shape in copy.shapes]
    if target != any(sources):
        return "to the host" if target else "from the host"
    return ""


def _result(instruction: Instruction) -> tuple:
    shapes = instruction.shapes
    return shapes[:1] if instruction.opcode == "copy-start" else shapes[-2:-1] or shapes


def _mesh_axes(joined: list[list[int]], mesh: dict[str, int]) -> str:
    """Return the mesh axes along which the devices of a group differ, as "data*fsdp"."""
    places = np.array(np.unravel_index(np.array(joined), list(mesh.values())))
    differ = np.any(places != places[:, :, :1], axis=(1, 2))
    return "*".join(name for name, differs in zip(mesh, differ, strict=True) if differs)


def _direction(pairs: list[list[int]]) -> str:
    """Return the direction of a permute on its ring: "+" if most targets follow their source, else "-"."""
    return "+" if sum(target > source for source, target in pairs) * 2 > len(pairs) else "-"
