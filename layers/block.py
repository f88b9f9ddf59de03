# SPDX-License-Identifier: Apache-2.0
"""The decoder block, and the stack that repeats it.

The stack stores one array [layers, ...] per weight for every execution: scanned (one compiled body) or unrolled (faster
on CPU), with or without rematerialisation, with identical layers or with kinds that alternate.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from layers import taps
from layers.adapters import Freezable
from layers.attention.attention import Attention
from layers.axes import constrain, declared_axes, inside_shard_map
from layers.dropout import dropout
from layers.experts.experts import Experts
from layers.fsdp import GATHERED_PARAM, all_gather_params, all_gather_params_ordered
from layers.mlp import SwiGLU
from layers.normalization import RMSNorm
from layers.sequence_parallel import REDUCED, overlap_splits

REMAT = {  # checkpoint_names that are saved for the backward pass; all else is recomputed. Each policy saves more
    # than the one before ("hidden", if an MLP is wider than the queries and keys of all heads).
    "full": (),
    "attended": ("attended",),
    "query": ("query", "attended"),
    "attention": ("query", "key", "value", "attended", REDUCED),
    "up": ("query", "key", "value", "attended", REDUCED, "up"),
    "hidden": ("key", "attended", REDUCED, "gate", "up"),
    "mlp": ("query", "key", "attended", REDUCED, "gate", "up"),
    "dots": ("query", "key", "value", "attended", REDUCED, "gate", "up"),
}


class Block(nnx.Module):
    """Compute x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
      norm: makes a norm of the residual stream.
      post_norms: whether the output of each sublayer is normalised too (arXiv:2408.00118, section 2).
      dropout_rate: of the output of each sublayer, if a key is given.
    """

    SUBLAYERS = ("attention", "mlp")  # in order of use

    def __init__(
        self, norm: Callable[[], RMSNorm], attention: Attention, mlp: SwiGLU | Experts, *, post_norms: bool = False,
        dropout_rate: float = 0.0,
    ):  # fmt: skip
        self.attention, self.mlp, self.routes = attention, mlp, isinstance(mlp, Experts)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.attention_post_norm = norm() if post_norms else lambda x: x
        self.mlp_post_norm = norm() if post_norms else lambda x: x
        self.dropout_rate = dropout_rate

    def __call__(
        self, x_BTD: jax.Array, angles: tuple, attend: Callable, valid_BT: jax.Array, cache: dict | None,
        key: jax.Array | None = None,
    ):  # fmt: skip
        """Return ([B, T, D], cache of this layer, statistics of its router).

        Args:
          valid_BT: false for padding, which a router ignores.
        """
        y_BTD, cache = self.attention(self.attention_norm(x_BTD), angles, attend, cache)
        y_BTD = taps.tap("attention", self.attention_post_norm(y_BTD))
        x_BTD = constrain(x_BTD + dropout(y_BTD, self.dropout_rate, key, 0), "batch", "length", "act_embed")
        h_BTD = self.mlp_norm(x_BTD)
        y_BTD, figures = self.mlp(h_BTD, valid_BT) if self.routes else (self.mlp(h_BTD), {})
        y_BTD = taps.tap("mlp", self.mlp_post_norm(y_BTD))
        x_BTD = constrain(x_BTD + dropout(y_BTD, self.dropout_rate, key, 1), "batch", "length", "act_embed")
        return taps.tap("block", x_BTD), cache, figures


class Stack(Freezable):
    """Apply `num_layers` blocks, whose weights are stacked on a leading axis.

    Args:
      make_block: rngs to one block, whose SUBLAYERS name its attributes that have matrices, in order of use.
      scan: one compiled body (`lax.scan`) if true, else unrolled.
      remat: "none", which saves everything except gathered weights, or a key of REMAT.
    """

    def __init__(
        self, make_block: Callable[[nnx.Rngs], nnx.Module], *, num_layers: int, scan: bool, remat: str, rngs: nnx.Rngs
    ):  # fmt: skip
        build = nnx.vmap(make_block, transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.blocks = build(rngs.split(num_layers))
        self.num_layers, self.scan, self.remat = num_layers, scan, remat

    def __call__(
        self, x_BTD: jax.Array, contexts: list[tuple], *, caches: dict | None = None, key: jax.Array | None = None
    ):
        """Apply all blocks; return ([B, T, D], caches, router statistics).

        Args:
          contexts: the other arguments of a block, one tuple for each kind of layer; layer i has kind i modulo the
            number of kinds. They are trees of arrays whose first dimension is the batch. The scanned body is a group
            of one layer of each kind. Layers that do not fill a group are unrolled at the end; their weights are
            copied out of the stack.
          caches: with a leading layers axis if the layers are scanned, else a list; like the results.
          key: of the dropout; None: no dropout.
        """
        graph, state = nnx.split(self.blocks)
        axes = unflatten_dict({path: names[1:] for path, (_, names) in declared_axes(state).items()})
        layer_numbers = taps.layer_numbers(self.num_layers)
        num_parts = overlap_splits(x_BTD.shape[0]) if layer_numbers is None else 1
        streams = jnp.split(x_BTD, num_parts)
        contexts = [_split_rows(context, num_parts) for context in contexts]
        keys = None if key is None else jax.random.split(key, (self.num_layers, num_parts))
        alone = self.scan and len(contexts) == 1
        kinds = [self._apply(graph, axes, context, alone=alone) for context in contexts]
        weights = nnx.to_pure_dict(state)
        if self.scan:
            layers = weights, caches, keys, layer_numbers
            streams, (caches, *others) = scan_layers(kinds, self.num_layers, streams, layers)
        else:
            layers = unstack((weights, keys, layer_numbers), self.num_layers)
            of_layers = caches or [None] * self.num_layers
            layers = [(layer, cache, *rest) for (layer, *rest), cache in zip(layers, of_layers, strict=True)]
            streams, outputs = unroll_layers(kinds, streams, layers)
            caches = [cache for cache, *_ in outputs] if caches else None
            others = _stacked([others for _, *others in outputs])
        figures, recorded = others
        taps.add(recorded)
        return jnp.concatenate(streams), caches, figures

    def _apply(self, graph: nnx.GraphDef, axes: dict, context: list[tuple], *, alone: bool) -> Callable:
        """Return a function (streams, layer) -> (streams, (cache, figures, recorded)) under the remat policy.

        Its `layer` is (weights, cache, keys, number for layers/taps.py), and `recorded` are activations by name.

        If a layer is not alone in the body of a scan it needs barriers. Without them the compiler may recompute all
        layers of the body at the same time.
        """
        gather = functools.partial(all_gather_params_ordered, order=self.blocks.SUBLAYERS)
        if self.frozen:  # no gradients to order
            gather = all_gather_params

        def apply(streams, layer):
            weights, cache, keys, number = layer
            weights = gather(weights, axes, streams[0].dtype)  # under remat, the backward pass gathers again
            block, parts, figures = nnx.merge(graph, weights), [], []
            with taps.body(number) as recorded:
                for n, x_BTD in enumerate(streams):
                    x_BTD, cache, of_part = block(x_BTD, *context[n], cache, None if keys is None else keys[n])
                    parts.append(x_BTD)
                    figures.append(of_part)
            return parts, (cache, jax.tree.map(lambda *of_parts: sum(of_parts), *figures), recorded)

        if self.remat == "none" and not inside_shard_map():
            return apply
        policies = jax.checkpoint_policies
        policy = policies.save_anything_except_these_names(GATHERED_PARAM)
        if self.remat != "none":
            policy = policies.save_only_these_names(*REMAT[self.remat])
        return jax.checkpoint(apply, policy=policy, prevent_cse=not alone)


def _split_rows(context, count: int) -> list:
    """Split every array of a tree by rows into `count` parts."""
    if count == 1:
        return [context]
    return [jax.tree.map(lambda rows, n=n: jnp.split(rows, count)[n], context) for n in range(count)]


def scan_layers(kinds: list[Callable], num_layers: int, streams: list[jax.Array], layers) -> tuple:
    """Apply `num_layers` layers, stacked, by a scan whose body is one layer of each kind; return stacked results."""
    if len(kinds) == 1:
        return jax.lax.scan(kinds[0], streams, layers)

    def apply_group(streams, group):
        streams, outputs = unroll_layers(kinds, streams, unstack(group, len(kinds)))
        return streams, _stacked(outputs)

    groups, rest = _group_layers(layers, num_layers // len(kinds), len(kinds))
    streams, outputs = jax.lax.scan(apply_group, streams, groups)
    outputs = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), outputs)
    if left := num_layers % len(kinds):
        streams, last = unroll_layers(kinds, streams, unstack(rest, left))
        outputs = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), outputs, _stacked(last))
    return streams, outputs


def unroll_layers(kinds: list[Callable], streams: list[jax.Array], layers: list) -> tuple[list[jax.Array], list]:
    """Apply layers one after the other, alternating the kinds; return (streams, the other results of each layer)."""
    outputs = []
    for index, layer in enumerate(layers):
        streams, output = kinds[index % len(kinds)](streams, layer)
        outputs.append(output)
    return streams, outputs


def _stacked(trees: list):
    """Stack the leaves of equal trees on a leading axis."""
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


def _group_layers(layers, num_groups: int, size: int) -> tuple:
    """Split [layers, ...] into [num_groups, size, ...] and the remaining layers."""
    grouped = num_groups * size
    groups = jax.tree.map(lambda leaf: leaf[:grouped].reshape(num_groups, size, *leaf.shape[1:]), layers)
    return groups, jax.tree.map(lambda leaf: leaf[grouped:], layers)


def unstack(tree, size: int) -> list:
    """Split the leading axis of every leaf into a list of `size` trees."""
    leaves, structure = jax.tree.flatten(tree)
    return [structure.unflatten(parts) for parts in zip(*[_unstack(leaf) for leaf in leaves], strict=True)][:size]


@jax.custom_vjp
def _unstack(x):
    return [x[i] for i in range(x.shape[0])]


# The gradient of plain indexing would be a sum of `size` zero-padded copies of the stack.
_unstack.defvjp(lambda x: (_unstack(x), None), lambda _, parts: (jnp.stack(parts),))
