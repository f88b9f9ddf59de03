# SPDX-License-Identifier: Apache-2.0
"""Converts weights of the Tiny Recursive Model between the public reference and Torus.

The files are safetensors. The names are those of the published checkpoints, with or without the prefixes of
torch.compile and the loss head. `RULES` and `BLOCK_RULES` are the complete mapping. A projection of the reference is
[out, in] and may stack several of ours by rows; ours are [in, out], with a separate dim for heads.
"""

import math
import pathlib
from typing import NamedTuple

import jax
import numpy as np
import safetensors
import safetensors.numpy

from files.atomic import write_atomically
from migration.safetensors_files import WeightsError, check_names, check_types
from training.state import dotted, named_leaves

COMPUTED = {  # the values of keys of `model` that the reference has
    "low_latents": (1,), "update_rate": (1.0,), "networks": (1,), "convolution": (0,),
    "positions": ("rope", "learned", "none"),
}  # fmt: skip
PREFIXES = ("_orig_mod.model.", "model.", "")
TABLE = "inner.puzzle_emb.weights"


class Rule(NamedTuple):
    """The place of a reference tensor in our tree.

    Attributes:
        theirs: its name.
        ours: names of our arrays in it, from its first row down.
        inputs: how many leading dims of ours a product sums over; 0 if both have the same array.
    """

    theirs: str
    ours: tuple[str, ...]
    inputs: int = 0


RULES = (
    Rule("inner.embed_tokens.embedding_weight", ("embedding.embedding",)),
    Rule("inner.embed_pos.embedding_weight", ("positions.embedding",)),
    Rule(TABLE, ("puzzles.table",)),
    Rule("inner.H_init", ("initial.high",)),
    Rule("inner.L_init", ("initial.low",)),
    Rule("inner.lm_head.weight", ("head.kernel",), 1),
    Rule("inner.q_head.weight", ("halt.kernel",), 1),  # column 0: halt, column 1: continue
    Rule("inner.q_head.bias", ("halt.bias",)),
)
BLOCK, THEIR_BLOCK = "network.blocks.", "inner.L_level.layers."  # then the number of the block
BLOCK_RULES = (
    Rule("self_attn.qkv_proj.weight", ("mixer.query", "mixer.key", "mixer.value"), 1),
    Rule("self_attn.o_proj.weight", ("mixer.out",), 2),
    Rule("mlp_t.gate_up_proj.weight", ("mixer.gate", "mixer.up"), 1),
    Rule("mlp_t.down_proj.weight", ("mixer.down",), 1),
    Rule("mlp.gate_up_proj.weight", ("mlp.gate", "mlp.up"), 1),
    Rule("mlp.down_proj.weight", ("mlp.down",), 1),
)


def load(path: pathlib.Path, like: dict) -> dict:
    """Return the weights of a file as our tree.

    Args:
      like: the tree of the target model; its leaves need only a shape.

    Raises:
      WeightsError: the file cannot be read, or its tensors differ from the model's; names the first one.
    """
    try:
        with safetensors.safe_open(path, "numpy") as file:
            check_types(path, {name: file.get_slice(name).get_dtype() for name in file.keys()})  # noqa: SIM118
        tensors = safetensors.numpy.load_file(path)
    except OSError as error:
        raise WeightsError(f"{path}: {error.strerror or error}; name a safetensors file") from None
    except safetensors.SafetensorError as error:
        raise WeightsError(
            f"{path}: not a safetensors file ({error}); convert a published checkpoint with "
            "safetensors.torch.save_file(torch.load(checkpoint, weights_only=True), file)"
        ) from None
    return from_reference(tensors, like, str(path))


def save(path: pathlib.Path, params: dict, prefix: str = PREFIXES[0]) -> None:
    """Write our weights under the reference's names, atomically."""
    write_atomically(path, safetensors.numpy.save(to_reference(params, prefix)))


def to_reference(params: dict, prefix: str = PREFIXES[0]) -> dict[str, np.ndarray]:
    """Return our tree as {name in the reference: float32 array}."""
    flat = {name: np.asarray(leaf, np.float32) for name, leaf in named_leaves(params)}
    return {prefix + rule.theirs: _joined(rule, [flat[name] for name in rule.ours]) for rule in _rules(flat)}


def from_reference(tensors: dict[str, np.ndarray], like: dict, source: str = "the weights") -> dict:
    """Return our tree, float32, from the reference's tensors; see `load`.

    A puzzle table with another number of rows belongs to other puzzles: every row becomes the mean of all its rows.

    Args:
      source: the name of the tensors in messages.
    """
    shapes = {name: tuple(leaf.shape) for name, leaf in named_leaves(like)}
    given = _without_prefix(tensors, source)
    rules = _rules(shapes)
    check_names(given, {rule.theirs for rule in rules}, source, "use the configuration that they were trained with")
    flat = {}
    for rule in rules:
        wanted = [shapes[name] for name in rule.ours]
        tensor = np.asarray(given[rule.theirs]).astype(np.float32)
        if rule.theirs == TABLE and tensor.ndim == 2 and len(tensor) and len(tensor) != wanted[0][0]:
            mean = tensor.mean(0, keepdims=True, dtype=np.float64).astype(np.float32)
            tensor = np.repeat(mean, wanted[0][0], axis=0)
        if tensor.shape != (expected := _their_shape(rule, wanted)):
            raise WeightsError(
                f"{source}: {rule.theirs} has shape {list(tensor.shape)}, but the model needs {list(expected)}; use "
                "the sizes that it was trained with"
            )
        flat |= zip(rule.ours, _split(rule, tensor, wanted), strict=True)
    return jax.tree_util.tree_map_with_path(lambda path, _: flat[dotted(path)], like)


def _rules(ours: dict) -> list[Rule]:
    """Return the rules for the existing leaves; rules of blocks have the block's number.

    Raises:
      WeightsError: a leaf has no rule.
    """
    blocks = sorted({int(name.removeprefix(BLOCK).split(".")[0]) for name in ours if name.startswith(BLOCK)})
    of_blocks = (
        Rule(f"{THEIR_BLOCK}{n}.{rule.theirs}", tuple(f"{BLOCK}{n}.{name}" for name in rule.ours), rule.inputs)
        for n in blocks
        for rule in BLOCK_RULES
    )
    rules = [rule for rule in (*RULES, *of_blocks) if rule.ours[0] in ours]
    if unknown := ours.keys() - {name for rule in rules for name in rule.ours}:
        raise WeightsError(f"{min(unknown)} has no name in the reference; only models of the reference can be exported")
    return rules


def _without_prefix(tensors: dict, source: str) -> dict:
    """Return the tensors under names that begin with `inner.`."""
    prefix = next((p for p in PREFIXES if any(name.startswith(f"{p}inner.") for name in tensors)), None)
    if prefix is None:
        raise WeightsError(f"{source}: no tensor of a Tiny Recursive Model, such as {PREFIXES[0]}inner.H_init")
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _their_shape(rule: Rule, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    if not rule.inputs:
        return shapes[0]
    return sum(math.prod(shape[rule.inputs :]) for shape in shapes), math.prod(shapes[0][: rule.inputs])


def _joined(rule: Rule, arrays: list[np.ndarray]) -> np.ndarray:
    if not rule.inputs:
        return arrays[0]
    rows = [array.reshape(math.prod(array.shape[: rule.inputs]), -1).T for array in arrays]
    return np.ascontiguousarray(np.concatenate(rows))


def _split(rule: Rule, tensor: np.ndarray, shapes: list[tuple[int, ...]]) -> list[np.ndarray]:
    if not rule.inputs:
        return [tensor]
    ends = np.cumsum([math.prod(shape[rule.inputs :]) for shape in shapes])
    parts = zip(np.split(tensor, ends[:-1]), shapes, strict=True)
    return [np.ascontiguousarray(part.T).reshape(shape) for part, shape in parts]
