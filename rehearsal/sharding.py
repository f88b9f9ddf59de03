# SPDX-License-Identifier: Apache-2.0
"""Ranks all shardings of one tensor on a mesh by the bytes that a step sends and a chip holds; arithmetic alone.

A mesh axis splits at most one dimension, and has to divide its size. Several axes may split one dimension. The role
of the tensor in a step decides which bytes a device receives. Collectives are rings: for an all-gather or a
reduce-scatter over n devices each device receives n - 1 shards; an all-reduce is both. W is the tensor in bfloat16,
the dtype of products and rings. G is the tensor in float32, the dtype in which replicated gradients are all-reduced:

    weights      Token axes (all but `model`) that split the weights: all-gather W forward and backward, and
                 reduce-scatter its gradient, as in ZeRO-3 (arXiv:1910.02054). Other token axes: all-reduce the
                 gradient as G. Split over `model` (arXiv:1909.08053): all-reduce the output of the product, or the
                 gradient of its input, [tokens of a device, width] in bfloat16. Not split over `model`: every device
                 along `model` computes the same.
    gradients,   Split: reduce-scatter the gradient as W, and all-gather the weights as G after the update (ZeRO-1,
    optimizer    ZeRO-2). Not split: all-reduce the gradient as G. Nothing is sent over `model`.
    activations  Token dimensions (all but the last) that are split over token axes: nothing is sent. Otherwise:
                 all-gather the activations and reduce-scatter their gradient. Over `model`, split or not, each is
                 all-gathered and reduce-scattered once (arXiv:2205.05198).

The arithmetic ignores overlap with computation, the latency of a hop, microbatches, the gathered copy of a weight, and
links that several axes share. It assumes that a product sums over the first dimension of its weights.

For each weight of Llama 2 7B on v4-32 the rules of parallelism/axis_rules.py are as good as the best. On data=2,
fsdp=4, model=2 the advice would split weights over `data` too (2.81 ms instead of 2.87). The rules replicate them over
`data`: these gradients are all-reduced once a step, but sharded weights would be all-gathered in each microbatch.
"""

import dataclasses
import itertools
import math
from typing import NamedTuple

from configs.errors import ConfigError
from rehearsal.assumptions import Assumptions, of_topology
from rehearsal.compiler import GIB
from rehearsal.layouts import sizing
from rehearsal.sections import seconds_text

MIB = 2**20
BFLOAT16, FLOAT32 = sizing.BFLOAT16, sizing.FLOAT32
BYTES = {"float32": FLOAT32, "bfloat16": BFLOAT16}
ALL_GATHERS = {  # by role: when a device all-gathers the tensor, and the bytes of each number
    "weights": ("all-gather forward and backward", 2 * BFLOAT16),
    "gradients": ("all-gather after the update", FLOAT32),
    "optimizer": ("all-gather after the update", FLOAT32),
}
SHOWN_ROWS = 8

Spec = tuple[tuple[str, ...], ...]  # for each dimension, the axes that split it, the slowest first


class Move(NamedTuple):
    """A collective, its mesh axis, and the bytes that a device receives for it in a step."""

    what: str
    axis: str
    bytes: float


@dataclasses.dataclass(frozen=True)
class Tensor:
    """A tensor and what a step does with it.

    Attributes:
      role: a key of ALL_GATHERS, or "activations".
      dtype: a key of BYTES.
      tokens: of one device, which weights are multiplied with.
    """

    shape: tuple[int, ...]
    role: str
    dtype: str = "float32"
    tokens: int = 0

    @property
    def bytes(self) -> int:
        """Its size."""
        return math.prod(self.shape) * BYTES[self.dtype]


@dataclasses.dataclass(frozen=True)
class Option:
    """A sharding: bytes that a device holds, its collectives, seconds of repeated computation, seconds in total."""

    spec: Spec
    held: float
    moves: tuple[Move, ...]
    repeated: float
    seconds: float

    @property
    def rank(self) -> tuple[float, float]:
        """A sort key, the lowest first. Times are rounded to the picosecond: sums in another order are then equal."""
        return round(self.seconds, 12), self.held

    @property
    def moved(self) -> float:
        """Bytes that a device receives in a step."""
        return sum(move.bytes for move in self.moves)


def options(tensor: Tensor, mesh: dict[str, int], rates: Assumptions) -> list[Option]:
    """Return all legal options: the quickest first, and among equally quick ones the one that holds least first.

    Args:
      mesh: size by axis, the slowest first; axes of size 1 are never named.
    """
    mesh = {axis: size for axis, size in mesh.items() if size > 1}
    legal, dims = [], range(len(tensor.shape))
    for places in itertools.product((*dims, None), repeat=len(mesh)):
        spec = tuple(tuple(axis for axis, at in zip(mesh, places, strict=True) if at == dim) for dim in dims)
        if not any(size % _size(axes, mesh) for size, axes in zip(tensor.shape, spec, strict=True)):
            legal.append(_option(tensor, spec, mesh, rates))
    return sorted(legal, key=lambda option: option.rank)


def text(spec: Spec) -> str:
    """Return a spec as code: P('fsdp', None)."""
    names = [repr(axes) if len(axes) > 1 else repr(axes[0]) if axes else "None" for axes in spec]
    return f"P({', '.join(names) if any(spec) else ''})"


def _option(tensor: Tensor, spec: Spec, mesh: dict[str, int], rates: Assumptions) -> Option:
    moves = tuple((_of_activations if tensor.role == "activations" else _of_state)(tensor, spec, mesh))
    numbers = math.prod(tensor.shape)
    held = numbers * BYTES[tensor.dtype] / math.prod(_size(axes, mesh) for axes in spec)
    again = tensor.role == "weights" and "model" in mesh and not _splits_model(spec)
    repeated = 6 * tensor.tokens * numbers * (1 - 1 / mesh["model"]) / rates.peak_flops if again else 0.0
    between_slices = rates.dcn_bandwidth or rates.ring_bandwidth
    bandwidth = {axis: between_slices if axis == "dcn_data" else rates.ring_bandwidth for axis in mesh}
    return Option(spec, held, moves, repeated, sum(move.bytes / bandwidth[move.axis] for move in moves) + repeated)


def _of_state(tensor: Tensor, spec: Spec, mesh: dict[str, int]) -> list[Move]:
    """Return the collectives of weights, gradients and an optimizer's moments."""
    split = tuple(axis for axes in spec for axis in axes if axis != "model")
    copies = tuple(axis for axis in mesh if axis not in (*split, "model"))
    columns = math.prod(tensor.shape) / (mesh["model"] if _splits_model(spec) else 1)
    what, each = ALL_GATHERS[tensor.role]
    return [
        *_ring(what, each * columns, split, mesh),
        *_ring("reduce-scatter the gradient", BFLOAT16 * columns, split, mesh),
        *_ring("all-reduce the gradient", 2 * FLOAT32 * columns / _size(split, mesh), copies, mesh),
        *(_of_product(tensor, spec, mesh) if tensor.role == "weights" and _splits_model(spec) else []),
    ]


def _of_product(tensor: Tensor, spec: Spec, mesh: dict[str, int]) -> list[Move]:
    """Return the all-reduce over `model` that a product with weights split over `model` needs."""
    if "model" in spec[0]:
        what, width = "all-reduce the output", math.prod(tensor.shape[1:])
    else:
        what, width = "all-reduce the gradient of the input", tensor.shape[0]
    return _ring(what, 2 * BFLOAT16 * tensor.tokens * width, ("model",), mesh)


def _of_activations(tensor: Tensor, spec: Spec, mesh: dict[str, int]) -> list[Move]:
    own = tuple(axis for axes in spec[:-1] for axis in axes if axis != "model")
    others = tuple(axis for axis in mesh if axis not in (*own, "model"))
    part = BFLOAT16 * math.prod(tensor.shape) / _size(own, mesh)
    across = tuple(axis for axis in mesh if axis == "model")
    return [
        *_ring("all-gather, and reduce-scatter the gradient", 2 * part, others, mesh),
        *_ring("all-gather and reduce-scatter, also the gradient", 4 * part, across, mesh),
    ]


def _ring(what: str, whole: float, axes: tuple[str, ...], mesh: dict[str, int]) -> list[Move]:
    """Return the moves of a collective over `whole` bytes: axis by axis, the slowest first, while the parts are small.

    An all-gather and a reduce-scatter move the same bytes. An all-reduce moves twice as many, which `whole` includes.
    """
    axes = tuple(axis for axis in mesh if axis in axes)
    part, moves = whole / _size(axes, mesh), []
    for axis in axes:
        moves.append(Move(what, axis, (mesh[axis] - 1) * part))
        part *= mesh[axis]
    return moves


def _splits_model(spec: Spec) -> bool:
    return any("model" in axes for axes in spec)


def _size(axes: tuple[str, ...], mesh: dict[str, int]) -> int:
    return math.prod(mesh[axis] for axis in axes)


def why(option: Option) -> str:
    """Return as text the bytes that a device receives and the time of computation that other devices repeat."""
    by_collective: dict[str, list[Move]] = {}
    for move in option.moves:
        by_collective.setdefault(move.what, []).append(move)
    parts = [
        f"{what} over {', '.join(move.axis for move in moves)}: {sum(move.bytes for move in moves) / MIB:,.3g} MiB"
        for what, moves in by_collective.items()
    ]
    parts += [f"computation repeated over model: {seconds_text(option.repeated)}"] if option.repeated else []
    return "; ".join(parts) or "nothing is sent"


def tensor_of(config, shape: tuple[int, ...], role: str) -> Tensor:
    """Return a tensor of the step of a configuration whose mesh is resolved."""
    token_ways = math.prod(size for axis, size in config.mesh.items() if axis != "model")
    tokens = config.train.global_batch * config.train.sequence_length // token_ways
    return Tensor(shape, role, "bfloat16" if role == "activations" else "float32", tokens)


def advise(config, topology, shape: tuple[int, ...], role: str) -> dict:
    """Return a table for `Display.table`, the quickest option that fits first; "best" is its spec, None if none fits.

    An option fits if a chip could hold all tensors of the recipe that have this role with the same sharding. Weights
    include their gradients and moments; activations include those of each layer.

    Args:
      config: validated, with a resolved mesh.

    Raises:
      ConfigError: the tensor is not part of a decoder's step, or the speed of the topology's links is unknown.
    """
    _check(config, topology, shape, role)
    mesh = {axis: config.mesh[axis] for axis in config.layout.axis_order.split(",") if config.mesh[axis] > 1}
    tensor = tensor_of(config, shape, role)
    found = options(tensor, mesh, of_topology(topology))
    times = _bytes_like_it(config, tensor) / tensor.bytes
    fits = {option: times * option.held <= topology.capacity_gib * GIB for option in found}
    found.sort(key=lambda option: not fits[option])
    best = found[0] if fits[found[0]] else None
    rows = [
        {
            "spec": text(option.spec), "verdict": "fits" if fits[option] else "does not fit",
            "MiB a chip": option.held / MIB, "MiB sent": option.moved / MIB, "A step": option.seconds,
            "why": why(option),
        }
        for option in found[:SHOWN_ROWS]
    ]  # fmt: skip
    illegal = [
        f"dimension {dim} of {size} is not a multiple of {axis}={mesh[axis]}"
        for dim, size in enumerate(shape) for axis in mesh if size % mesh[axis]
    ]  # fmt: skip
    on = " x ".join(f"{axis} {size}" for axis, size in mesh.items()) or "one chip"
    return {
        "title": f"{role} {' x '.join(map(str, shape))} on {topology.name}, mesh {on}: the quickest that fits first",
        "columns": ["spec", "verdict", "MiB a chip", "MiB sent", "A step", "why"],
        "rows": rows,
        "best": text(best.spec) if best else None,
        "notes": [
            *_verdict(best, found, times, topology), f"{len(found)} legal shardings", *illegal,
            "times are bytes at the rates of rehearse.py's table; no communication is hidden behind computation",
        ],
    }  # fmt: skip


def _check(config, topology, shape: tuple[int, ...], role: str) -> None:
    if topology.accelerator == "cpu":
        raise ConfigError(f"--topology={topology.name}: the speed of a CPU's links is unknown; name TPUs or GPUs")
    if config.model.name != "decoder_lm":
        raise ConfigError(f"--advise_sharding knows the step of a decoder_lm, not of model.name={config.model.name}")
    if role in ("weights", "activations") and len(shape) < 2:
        raise ConfigError(f"--advise_sharding={shape[0]}: {role} need two dimensions or more, such as 1024,1024")


def _bytes_like_it(config, tensor: Tensor) -> float:
    """Return the bytes of all tensors of the recipe that would be sharded like this one, on all chips together."""
    if tensor.role == "activations":
        return config.model.num_layers * math.prod(tensor.shape) * BFLOAT16
    moments = sizing.moments(config)
    numbers = {"weights": 2 + moments, "gradients": 1, "optimizer": moments}[tensor.role]
    return max(sizing.num_parameters(config), math.prod(tensor.shape)) * numbers * FLOAT32


def _verdict(best: Option | None, found: list[Option], times: float, topology) -> list[str]:
    """Return why the first option is the best, and the options that are as good or that are quicker but do not fit."""

    def share(option: Option) -> str:
        gib = times * option.held / GIB
        return f"{gib:,.1f} of {topology.capacity_gib:g} GiB a chip if all such tensors are sharded like this"

    if best is None:
        least = min(found, key=lambda option: option.held)
        return [f"none fits: {text(least.spec)} needs least, {share(least)}"]
    lines = [f"{text(best.spec)}: {seconds_text(best.seconds)} a step, {share(best)}; {why(best)}"]
    same = [text(other.spec) for other in found[1:] if other.rank == best.rank]
    lines += [f"equally good: {', '.join(same)}"] if same else []
    quicker = [option for option in found if option.seconds < best.seconds]
    lines += [f"{text(o.spec)} would be quicker, {seconds_text(o.seconds)}, but takes {share(o)}" for o in quicker[:1]]
    return lines
