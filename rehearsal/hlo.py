# SPDX-License-Identifier: Apache-2.0
"""Reads the scheduled HLO text that `compiled.as_text()` prints: computations, instructions in order, shapes, sources.

The reader does not guess: a loop without a trip count or a collective without groups is a ValueError that names the
instruction.
"""

import dataclasses
import functools
import math
import pathlib
import re

import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent
PRODUCTS = {"layers/products.py", "layers/adapters.py"}  # frames to skip: their caller says more
ITEM_BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "bf16": 2,
    "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8, "c128": 16, "token": 0,
}  # fmt: skip

HOST = 5  # a memory space: S(5) in the text

_SHAPE = re.compile(r"([a-z]\w*)\[([\d,]*)\](?:\{([\d,]*)((?::[^}]*)?)\})?")
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = ")
_TUPLE_END = re.compile(r"\) ([a-z][\w\-]*)\(")
_CLOSING = re.compile(r"\}(, execution_thread=.*)?")  # ends a computation; one for another kind of core names a thread
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*\{$")
_CALLED = re.compile(
    r"(calls|body|condition|to_apply|called_computations|branch_computations|true_computation|false_computation)="
    r"(\{[^}]*\}|%?[\w.\-]+)"
)


@dataclasses.dataclass(frozen=True)
class Shape:
    """One array: `dims`, its bytes, and its bytes with the padding of its tiles.

    `space` 0 is the device's main memory, HOST its host's; others are on-chip memories or semaphores.
    """

    dtype: str
    dims: tuple[int, ...]
    bytes: float
    padded_bytes: float
    space: int


@dataclasses.dataclass(eq=False)
class Instruction:
    """One instruction as printed, compared by identity; `rest` has all attributes, `computation` contains it."""

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    rest: str
    computation: str
    root: bool

    def attribute(self, pattern: str) -> str:
        """Return the first group of a pattern in the attributes, '' if it does not match."""
        found = re.search(pattern, self.rest)
        return found.group(1) if found else ""

    @functools.cached_property
    def called(self) -> dict[str, list[str]]:
        """The computations that it calls: {attribute: names}."""
        return {kind: re.findall(r"[\w.\-]+", names) for kind, names in _CALLED.findall(self.rest)}

    @functools.cached_property
    def op_name(self) -> str:
        """The operation's name in jax: jit(train_step)/jvp()/while/body/.../dot_general."""
        return self.attribute(r'op_name="((?:[^"\\]|\\.)*)"').replace("\\'", "'")

    @functools.cached_property
    def cycles(self) -> int | None:
        """The compiler's own estimate; None if it gives none."""
        found = self.attribute(r'"estimated_cycles":"(\d+)"')
        return int(found) if found else None

    @property
    def number(self) -> int:
        """The number of a parameter, or the value of a constant."""
        return int(self.rest.partition(")")[0])

    @property
    def bytes(self) -> float:
        """Bytes of its result."""
        return sum(shape.bytes for shape in self.shapes)


@dataclasses.dataclass
class Module:
    """A compiled program: instructions of each computation in the order in which they are scheduled."""

    computations: dict[str, list[Instruction]]
    entry: str
    sources: dict[int, str]

    def __post_init__(self):
        self.instructions = {name: {i.name: i for i in body} for name, body in self.computations.items()}

    def operands(self, instruction: Instruction) -> list[Instruction]:
        """Return the instructions whose results it takes."""
        return [self.instructions[instruction.computation][name] for name in instruction.operands]

    def inside(self, instruction: Instruction) -> list[Instruction]:
        """Return all instructions of a fusion, including those of nested fusions."""
        found = [i for name in instruction.called.get("calls", []) for i in self.computations[name]]
        return found + [deeper for i in found for deeper in self.inside(i)]

    def wrapped(self, instruction: Instruction) -> Instruction:
        """Return the collective that an `async-start` wraps or that a fusion has, else the instruction."""
        inside = [i for name in instruction.called.get("calls", []) for i in self.computations[name]]
        return next((i for i in inside if collective_kind(i)), instruction)

    def root(self, computation: str) -> Instruction:
        """Return the instruction whose result is the computation's result."""
        return next(i for i in reversed(self.computations[computation]) if i.root)

    def source(self, instruction: Instruction) -> str:
        """Return the line in this workspace, file:line, that the instruction comes from; '' if unknown."""
        frame = instruction.attribute(r"stack_frame_id=(\d+)")
        return self.sources.get(int(frame), "") if frame else ""

    def trip_count(self, loop: Instruction) -> int:
        """Return how often the body of a `while` runs.

        Raises:
          ValueError: its condition is not a counter that is compared with a constant.
        """
        known = loop.attribute(r'"known_trip_count":\{"n":"(\d+)"')
        return int(known) if known else _counted(self, loop)


def parse(text: str) -> Module:
    """Read the text of a module."""
    computations, entry, body, name = {}, "", [], ""
    tables: dict[str, list[str]] = {}
    table = []
    for line in _whole_lines(text):
        if line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, [])
        elif header := (not line.startswith(" ") and _HEADER.match(line)):
            name, body = header.group(2), []
            computations[name] = body
            entry = name if header.group(1) else entry
        elif started := _LINE.match(line):
            body.append(_instruction(line, started, name))
        elif line[:1].isdigit():
            table.append(line)
    return Module(computations, entry, _sources(tables))


def _whole_lines(text: str) -> list[str]:
    """Return lines without comments; an instruction with a line break in its attributes becomes one line."""
    lines: list[str] = []
    for line in re.sub(r"/\*index=\d+\*/", "", text).split("\n"):
        if lines and lines[-1].startswith("  ") and not (line.startswith("  ") or _CLOSING.fullmatch(line)):
            lines[-1] += line
        else:
            lines.append(line)
    return lines


def _instruction(line: str, started: re.Match, computation: str) -> Instruction:
    start = started.end()
    if line[start] == "(":
        opcode = _TUPLE_END.search(line, start)
        kind, begin = line[start : opcode.start() + 1], opcode.end()
        code = opcode.group(1)
    else:
        kind_end = line.index(" ", start)
        begin = line.index("(", kind_end) + 1
        kind, code = line[start:kind_end], line[kind_end + 1 : begin - 1]
    end = line.index(")", begin)
    operands = tuple(re.findall(r"%([\w.\-]+)", line[begin:end])) if code not in ("constant", "parameter") else ()
    rest = line[begin:] if code in ("constant", "parameter") else line[end:]
    shapes = tuple(_shape(*found) for found in _SHAPE.findall(kind))
    return Instruction(started.group(2), code, shapes, operands, rest, computation, bool(started.group(1)))


@functools.cache
def _shape(dtype: str, dims: str, order: str, tiling: str) -> Shape:
    sizes = tuple(int(d) for d in dims.split(",")) if dims else ()
    if dtype not in ITEM_BYTES:
        raise ValueError(f"the array type {dtype} is unknown, so its bytes cannot be counted")
    item = ITEM_BYTES[dtype]
    padded = list(sizes)
    tile = re.search(r"T\(([\d,]+)\)", tiling)
    if tile and sizes:
        minor = [int(d) for d in order.split(",")]  # dimensions, the fastest first
        for dim, size in zip(minor, reversed(tile.group(1).split(",")), strict=False):
            padded[dim] = math.ceil(padded[dim] / int(size)) * int(size)
    space = re.search(r"S\((\d+)\)", tiling)
    count = math.prod(sizes)
    return Shape(dtype, sizes, count * item, math.prod(padded) * item, int(space.group(1)) if space else 0)


def _sources(tables: dict[str, list[str]]) -> dict[int, str]:
    """Return {stack frame: file:line of its innermost frame in this workspace}."""
    if "StackFrames" not in tables:
        return {}

    def fields(line):
        return {key: int(value) for key, value in re.findall(r"(\w+)=(\d+)", line)}

    names = {int(n): pathlib.Path(path.strip('"')) for n, path in (line.split(" ", 1) for line in tables["FileNames"])}
    places = {int(line.split(" ")[0]): fields(line) for line in tables["FileLocations"]}
    frames = {int(line.split(" ")[0]): fields(line) for line in tables["StackFrames"]}
    found = {}
    for number in frames:
        frame = number
        while frame:
            place = places[frames[frame]["file_location_id"]]
            path = names[place["file_name_id"]]
            inside = in_workspace(path)
            if inside and inside not in PRODUCTS:
                found[number] = f"{inside}:{place['line']}"
                break
            frame = frames[frame].get("parent_frame_id", 1) - 1  # printed one higher; 0: none
    return found


@functools.cache
def in_workspace(path: pathlib.Path) -> str:
    """Return a file of this workspace relative to it, "" for another file.

    A program from the compilation cache may have been compiled in another copy of the workspace.
    """
    if {".venv", "site-packages"} & set(path.parts):
        return ""
    tails = (pathlib.Path(*path.parts[first:]) for first in range(1, len(path.parts)))
    return next((str(tail) for tail in tails if (ROOT / tail).is_file()), "")


def _counted(module: Module, loop: Instruction) -> int:
    condition = loop.called["condition"][0]
    compare = module.root(condition)
    if compare.opcode != "compare" or compare.attribute(r"direction=(\w+)") != "LT":
        raise ValueError(
            f"the loop {loop.name} ends on {compare.opcode}, not on a counter; its iterations cannot be counted"
        )
    counter, limit = module.operands(compare)
    index = int(counter.attribute(r"index=(\d+)") or -1)
    start = _initial(module, loop, index)
    end = _initial(module, loop, int(limit.attribute(r"index=(\d+)"))) if limit.operands else limit
    if index < 0 or start.opcode != "constant" or end.opcode != "constant":
        raise ValueError(f"the loop {loop.name} does not count between constants; its iterations cannot be counted")
    step = _step(module, loop, index)
    return max(0, math.ceil((end.number - start.number) / step))


def _initial(module: Module, loop: Instruction, index: int) -> Instruction:
    """Return the instruction that gives a loop's initial value at an index of its tuple, following copies."""
    instruction = module.operands(module.operands(loop)[0])[index]
    while instruction.opcode in ("copy", "bitcast", "convert"):
        instruction = module.operands(instruction)[0]
    return instruction


def _step(module: Module, loop: Instruction, index: int) -> int:
    """Return the increment that a loop's body adds to its counter."""
    update = module.operands(module.root(loop.called["body"][0]))[index]
    while update.opcode == "copy":
        update = module.operands(update)[0]
    added = [i.number for i in module.operands(update) if i.opcode == "constant"]
    if update.opcode != "add" or not added:
        raise ValueError(
            f"the counter of the loop {loop.name} changes by {update.opcode}; its iterations cannot be counted"
        )
    return added[0]


COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "collective-permute", "all-to-all", "ragged-all-to-all",
    "collective-broadcast",
)  # fmt: skip


def collective_kind(instruction: Instruction) -> str:
    """Return which of COLLECTIVES an instruction is or starts, '' for none.

    Between slices the hosts perform the collective: a `send` of the operand and a `recv` of the result.
    """
    if instruction.opcode == "recv":
        return instruction.attribute(r'_xla_megascale_transfer_type="(\w+)"').lower().replace("_", "-")
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in COLLECTIVES else ""


def groups(instruction: Instruction, num_devices: int) -> list[list[int]]:
    """Return the groups of devices that a collective joins; for a permute its (source, target) pairs.

    It reads all printed forms: {{0,1},{2,3}}, [2,2]<=[4] with an optional T(1,0), and mesh['a'=2,'b'=2] {'a'} with an
    optional device_ids=([2,2]T(1,0)).

    Raises:
      ValueError: the text has no groups.
    """
    if pairs := instruction.attribute(r"source_target_pairs=\{(\{[\d,{} ]*\})\}"):
        return [[int(d) for d in pair.split(",")] for pair in re.findall(r"\{([\d,]+)\}", pairs)]
    field = instruction.rest.partition("replica_groups=")[2]
    if listed := re.match(r"\{(\{[\d,{} ]*\})\}", field):
        return [[int(d) for d in group.split(",")] for group in re.findall(r"\{([\d,]+)\}", listed.group(1))]
    if field.startswith("{}"):
        return [list(range(num_devices))]
    if iota := re.match(r"\[([\d,]+)\]<=(\[[\d,]+\](?:T\([\d,]+\))?)", field):
        return _iota(iota.group(2)).reshape([int(d) for d in iota.group(1).split(",")]).tolist()
    if named := re.match(r"@?mesh(?:_\w+)?\[([^\]]*)\](?:, device_ids=\((.*?\]\S*)\))? ?\{([^}]*)\}", field):
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named.group(1))}
        devices = _iota(named.group(2) or f"[{math.prod(axes.values())}]").reshape(list(axes.values()))
        names, joined = list(axes), re.findall(r"'([^']+)'", named.group(3))
        rest = [names.index(name) for name in names if name not in joined]
        devices = devices.transpose(rest + [names.index(name) for name in joined])
        return devices.reshape(-1, math.prod(axes[name] for name in joined)).tolist()
    raise ValueError(f"the groups of {instruction.opcode} {instruction.name} cannot be read: {field[:80]!r}")


def _iota(text: str) -> np.ndarray:
    """Return 0, 1, ... in the shape and order of [2,16]T(1,0)."""
    dims, order = (re.findall(r"\d+", part) for part in re.match(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text).groups(""))
    numbers = np.arange(math.prod(map(int, dims))).reshape([int(d) for d in dims])
    return numbers.transpose([int(d) for d in order]) if order else numbers
