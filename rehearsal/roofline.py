# SPDX-License-Identifier: Apache-2.0
"""Counts the work of an instruction: FLOPs of matrix products and kernels, bytes through main memory.

Williams, Waterman and Patterson, "Roofline", CACM 52 (2009): an operation with fewer FLOPs a byte than the chip's
peak over its memory bandwidth waits for memory.
"""

import math
import re

import numpy as np

from rehearsal.hlo import Instruction, Module

IN_PLACE = ("dynamic-update-slice", "scatter")
FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "partition-id", "replica-id", "after-all",
    "opt-barrier", "optimization-barrier", "iota", "get-dimension-size", "add-dependency", "domain",
}  # fmt: skip
PRODUCTS = re.compile("matmul|gemm|conv|dot", re.IGNORECASE)  # custom calls whose FLOPs must be counted
VIEWS = {"AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "Sharding"}  # custom calls that move nothing
KERNEL = "tpu_custom_call"
GPU_ATTENTION = "in_place_of_a_gpu_kernel"  # the scope in rehearsal/gpu_attention.py
DECODE_KERNEL = "decode_kernel"  # the name of layers/attention/decode_kernels.py


def is_free(instruction: Instruction) -> bool:
    """Return whether it takes no time because it only names an existing value."""
    return instruction.opcode in FREE or (instruction.opcode == "custom-call" and target(instruction) in VIEWS)


def target(instruction: Instruction) -> str:
    """Return the target of a custom call."""
    return instruction.attribute(r'custom_call_target="([^"]*)"')


def is_kernel(instruction: Instruction) -> bool:
    """Return whether it is a Pallas kernel."""
    return instruction.opcode == "custom-call" and target(instruction) == KERNEL


def in_place_of_kernels(module: Module) -> set[Instruction]:
    """Return the instructions that replace a GPU's attention kernel: those in its named scope, and all in its loops.

    The compiler drops the scopes of some instructions, but not those of loops.
    """
    left = [i for body in module.computations.values() for i in body if GPU_ATTENTION in i.rest]
    found = set()
    while left:
        instruction = left.pop()
        if instruction not in found:
            found.add(instruction)
            left += [i for names in instruction.called.values() for name in names for i in module.computations[name]]
    return found


def kernel_of(module: Module, instruction: Instruction) -> Instruction | None:
    """Return the Pallas kernel that it is, or that is in it: a fusion writes the result of one into a larger array."""
    return next((i for i in (instruction, *module.inside(instruction)) if is_kernel(i)), None)


def flops(module: Module, instruction: Instruction) -> float:
    """Return the FLOPs of all matrix products in it and in the computations that it calls."""
    if instruction.opcode == "convolution":
        return _convolution_flops(module, instruction)
    if instruction.opcode == "dot":
        return _dot_flops(module, instruction)
    if is_kernel(instruction):
        attends = is_attention(instruction)
        return _attention_flops(module, instruction) if attends else _declared(instruction, "flops", "FLOPs")
    if instruction.opcode == "custom-call" and PRODUCTS.search(target(instruction)):
        raise ValueError(f"the FLOPs of the custom call {instruction.name}, {target(instruction)}, are unknown")
    inside = (called for names in instruction.called.values() for called in names)
    return sum(flops(module, i) for name in inside for i in module.computations[name])


def decode_bytes(instruction: Instruction) -> float:
    """Return the bytes that layers/attention/decode_kernels.py reads at most; 0 for any other instruction.

    Its operands are the caches, and so are its results, in the same memory: their sizes would count the cache twice.
    """
    decodes = is_kernel(instruction) and DECODE_KERNEL in instruction.name + instruction.op_name
    return _declared(instruction, "bytes_accessed", "bytes") if decodes else 0.0


def _declared(instruction: Instruction, field: str, what: str) -> float:
    """Return a number that a kernel declares of itself; ValueError if it declares none."""
    declared = instruction.attribute(rf'"cost_estimate":\s*\{{[^}}]*?"{field}":"?(\d+)')
    if not declared:
        raise ValueError(
            f"the kernel {instruction.name} declares no {what}, so its time cannot be estimated; give its pallas_call "
            f"a cost_estimate"
        )
    return float(declared)


def is_attention(instruction: Instruction) -> bool:
    """Return whether it is an attention kernel, by its name and its call site."""
    return is_kernel(instruction) and bool(re.search("splash|flash|attention", instruction.name + instruction.op_name))


def _attention_flops(module: Module, instruction: Instruction) -> float:
    """Return the FLOPs of causal attention, from its shapes.

    The forward pass takes 2 * batch * heads * queries * keys * head dim; a sliding window reduces it. It has two
    products, a backward pass of queries, keys and values five, one of keys and values alone four, and one of queries
    alone three: 2.5, 2 and 1.5 times that.
    """
    arrays = [o.shapes[0] for o in module.operands(instruction) if o.shapes]
    query, key, *_ = [a.dims for a in arrays if a.dtype in ("bf16", "f32", "f16") and len(a.dims) >= 3]
    backward = bool(re.search("dkv|bwd|backward", instruction.name))
    whole = 4.0 * math.prod(query[:-1]) * key[-2] * query[-1]
    forward = whole * min(0.5, _unmasked(module, instruction, query[-2] if backward else key[-2], backward))
    if backward:
        # The gradient of the queries has one more dimension than they: a part for each block of keys.
        is_of_queries_too = any(len(shape.dims) > len(query) for shape in instruction.shapes)
        return 2 * forward if "dkv" in instruction.name and not is_of_queries_too else 2.5 * forward
    return 1.5 * forward if "dq" in instruction.name else forward


def _unmasked(module: Module, instruction: Instruction, length: int, backward: bool) -> float:
    """Return the fraction of queries (of keys, in the backward pass) whose blocks splash attention visits for a row.

    Its tables of blocks, int8 [heads, queries, keys], are as long as the longest row inside a sliding window.
    """
    tables = [o.shapes[0].dims for o in module.operands(instruction) if o.shapes and o.shapes[0].dtype == "s8"]
    name = "block_q_dkv" if backward else "block_kv_dq" if "dq" in instruction.name else "block_kv"
    block = instruction.attribute(rf'{name}\\*": (\d+)')
    return tables[0][-2 if backward else -1] * int(block) / length if tables and block else 1.0


def traffic(module: Module, instruction: Instruction) -> float:
    """Return bytes read from and written to main memory; for a slice of an array only the slice counts."""
    if is_free(instruction):
        return 0.0
    operands = module.operands(instruction)
    if instruction.opcode in ("dynamic-slice", "slice", "gather"):
        return 2 * _main(instruction)
    if instruction.opcode in IN_PLACE:
        return 2 * sum(_main(o) for o in operands[1:])
    inside = instruction.called.get("calls")
    if instruction.opcode != "fusion" or not inside:
        return _main(instruction) + sum(_main(o) for o in operands)
    read = sum(_read_by_fusion(module, inside[0], n, o) for n, o in enumerate(operands))
    return read + _written_by_fusion(module, module.root(inside[0]), instruction)


def _main(instruction: Instruction) -> float:
    """Return the bytes of a result that are in main memory."""
    return sum(shape.bytes for shape in instruction.shapes if shape.space == 0)


def _read_by_fusion(module: Module, computation: str, number: int, operand: Instruction) -> float:
    """Return the bytes of an operand that a fusion reads, often only a slice of the array."""
    whole, body = _main(operand), module.computations[computation]
    parameter = next((i for i in body if i.opcode == "parameter" and i.number == number), None)
    return min(whole, _sliced(module, body, parameter, whole)) if parameter and whole else 0.0


def _sliced(module: Module, body: list[Instruction], array: Instruction, whole: float) -> float:
    """Return the bytes of all slices of an array, or `whole` if it is used in another way."""
    total = 0.0
    for user in (i for i in body if array.name in i.operands):
        if user.opcode in ("dynamic-slice", "slice", "gather"):
            total += user.bytes
        elif user.opcode in ("bitcast", "reshape", "copy", "convert"):
            total += _sliced(module, body, user, whole)
        elif user.opcode == "fusion":
            inside, number = module.computations[user.called["calls"][0]], user.operands.index(array.name)
            parameter = next(i for i in inside if i.opcode == "parameter" and i.number == number)
            total += _sliced(module, inside, parameter, whole)
        elif not (user.opcode in IN_PLACE and user.operands[0] == array.name):
            return whole
    return total


def _written_by_fusion(module: Module, root: Instruction, instruction: Instruction) -> float:
    parts = module.operands(root)
    if root.opcode != "tuple" or len(parts) != len(instruction.shapes):
        return _written(module, root, _main(instruction))
    results = zip(parts, instruction.shapes, strict=True)
    return sum(_written(module, result, shape.bytes) for result, shape in results if shape.space == 0)


def _written(module: Module, result: Instruction, whole: float) -> float:
    """Return the bytes that are written of a result: of an array that is updated in place only the new part."""
    if result.opcode == "bitcast":
        result = module.operands(result)[0]
    return module.operands(result)[1].bytes if result.opcode in IN_PLACE and whole else whole


def _dot_flops(module: Module, instruction: Instruction) -> float:
    left = module.operands(instruction)[0].shapes[0].dims
    contracted = instruction.attribute(r"lhs_contracting_dims=\{([\d,]*)\}")
    return 2.0 * math.prod(instruction.shapes[0].dims) * math.prod(left[int(d)] for d in contracted.split(",") if d)


def _convolution_flops(module: Module, instruction: Instruction) -> float:
    left, right = (o.shapes[0].dims for o in module.operands(instruction)[:2])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    of_left, of_right, of_out = labels.groups()
    window = instruction.attribute(r"window=\{([^}]*)\}")
    spatial = sorted(set(of_left) - set("bf"))
    sizes = [
        (left[of_left.index(d)], right[of_right.index(d)], instruction.shapes[0].dims[of_out.index(d)]) for d in spatial
    ]
    groups = int(instruction.attribute(r"feature_group_count=(\d+)") or 1)
    batch_groups = int(instruction.attribute(r"batch_group_count=(\d+)") or 1)
    positions = math.prod(_valid_positions(window, n, *size) for n, size in enumerate(sizes))
    features = left[of_left.index("f")] / groups * right[of_right.index("o")]
    return 2.0 * features * left[of_left.index("b")] / batch_groups * positions


def _valid_positions(window: str, dim: int, size: int, kernel: int, out: int) -> int:
    """Count pairs (output, kernel element) that read an input element, not padding or a hole of dilation."""

    def option(name, default):
        found = re.search(rf"(?<![a-z_]){name}=([\dx_\-]+)", window)
        return found.group(1).split("x")[dim] if found else default

    stride, hole = int(option("stride", "1")), int(option("lhs_dilate", "1"))
    spread, before = int(option("rhs_dilate", "1")), int(option("pad", "0_0").partition("_")[0])
    at = np.arange(out)[:, None] * stride - before + np.arange(kernel)[None] * spread
    return int(np.sum((at >= 0) & (at < (size - 1) * hole + 1) & (at % hole == 0)))
