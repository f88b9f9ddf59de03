# SPDX-License-Identifier: Apache-2.0
"""Tokens to their experts and back, on one device's tokens.

A pair is a token and one of its experts. Pairs are sorted by where they go and put into slots; slots go by all-to-all
to the devices that hold the experts, and what comes of them goes back. Letters: M tokens of a device, D embed, F mlp,
E experts, C capacity.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from layers import grouped
from layers.axes import as_axis_tuple, mesh_axes, num_shards
from layers.products import project

ROUND = 1.5  # slots of an exchange, over what it takes when every device gets as many pairs
SELDOM = "seldom"  # names what a balanced router does not need, for rehearsals


class Slots(NamedTuple):
    """A slot for each pair and a pair for each slot, int32; one past the last for none."""

    of_pair: jax.Array
    pair: jax.Array


def dropless(x_MD: jax.Array, experts: jax.Array, gates: jax.Array, weights: tuple) -> tuple[jax.Array, jax.Array]:
    """Return ([M, D], dropped): the sum over a token's experts of gate * SwiGLU; nothing is dropped.

    Devices send each other as many slots as it takes when all get about the same, and, where a device is sent more, go
    on so until every pair has been where it goes: the memory that it takes does not depend on the router.

    Args:
      x_MD: in the compute type.
      experts: int32 [experts of a token, M], as `dropped`, which is bool; past the last: none.
      gates: float32, of the same shape.
      weights: gate and up [E of a device, D, F], down [E of a device, F, D].
    """
    dropped, pairs = jnp.zeros(experts.shape, bool), experts.reshape(-1)
    num_devices, (num_local, *_) = num_owners(), weights[0].shape
    if num_devices == 1:
        y = _by_groups(jnp.tile(x_MD, (len(experts), 1)), pairs, weights)
        return _combined(y.reshape(*experts.shape, -1), gates), dropped
    capacity = math.ceil(min(1, ROUND / num_devices) * len(pairs))
    order = sort(pairs // num_local, num_devices)
    axes = _owner_axes()

    def exchanged(number, x_MD, gates, weights):
        slots = of_equal_bins(order, capacity, number * capacity)
        there = _sent(moved(jnp.tile(x_MD, (len(experts), 1)), slots.pair, slots.of_pair), axes)
        sent = _sent(pairs.at[slots.pair].get(mode="fill", fill_value=num_devices * num_local), axes)
        y = _by_groups(there, sent - num_local * jax.lax.axis_index(axes), weights)
        y = moved(_sent(y, axes), slots.of_pair, slots.pair)
        return _combined(y.reshape(*experts.shape, -1), gates)

    y_MD = exchanged(0, x_MD, gates, weights)
    rounds = math.ceil(len(pairs) / capacity)
    if rounds == 1:
        return y_MD, dropped
    largest = jax.lax.pmax(jnp.diff(order.firsts).max(), jax.sharding.get_abstract_mesh().axis_names)
    again = jax.checkpoint(exchanged)

    def next_round(y_MD, number):
        more = lambda: y_MD + again(number, x_MD, gates, weights)  # noqa: E731
        return jax.lax.cond(largest > number * capacity, more, lambda: y_MD), None  # in all devices alike

    with jax.named_scope(SELDOM):
        go_on = lambda: jax.lax.scan(next_round, y_MD, jnp.arange(1, rounds))[0]  # noqa: E731
        return jax.lax.cond(largest > capacity, go_on, lambda: y_MD), dropped


def with_capacity(
    x_MD: jax.Array, experts: jax.Array, gates: jax.Array, weights: tuple, *, factor: float
) -> tuple[jax.Array, jax.Array]:
    """Return what `dropless` does, with C = ceil(factor * pairs / experts) slots a device for each expert.

    Later pairs are dropped, first choices coming before second ones (arXiv:2006.16668, algorithm 1).
    """
    pairs, num_devices, (num_local, *_) = experts.reshape(-1), num_owners(), weights[0].shape
    num_experts, axes = num_devices * num_local, _owner_axes()
    capacity = math.ceil(factor * len(pairs) / num_experts)
    slots = of_equal_bins(sort(pairs, num_experts), capacity, 0)
    x = _sent(moved(jnp.tile(x_MD, (len(experts), 1)), slots.pair, slots.of_pair), axes)
    x = jnp.swapaxes(x.reshape(num_devices, num_local, capacity, -1), 0, 1).reshape(num_local, -1, x.shape[1])
    y = _mlp(x, weights, lambda x, weight: project("ECD,EDF->ECF", x, weight))
    y = jnp.swapaxes(y.reshape(num_local, num_devices, capacity, -1), 0, 1).reshape(-1, x_MD.shape[1])
    y = moved(_sent(y, axes), slots.of_pair, slots.pair).reshape(*experts.shape, -1)
    dropped = (slots.of_pair == num_experts * capacity).reshape(experts.shape) & (experts < num_experts)
    return _combined(y, gates), dropped


def num_owners() -> int:
    """Return over how many devices experts are split."""
    return num_shards(mesh_axes(("owners",))[0])


class Order(NamedTuple):
    """Pairs sorted by their bin: pairs in order, where each bin begins (and the last ends), each pair's place in it."""

    pairs: jax.Array
    firsts: jax.Array
    bins: jax.Array
    ranks: jax.Array


def sort(bins: jax.Array, num_bins: int) -> Order:
    """Sort pairs by bin, int32; those of a bin keep their order. Bins past the last are none."""
    bins = jnp.minimum(bins, num_bins)
    pairs = jnp.argsort(bins, stable=True)
    firsts = jnp.searchsorted(bins[pairs], jnp.arange(num_bins + 1))
    return Order(pairs, firsts, bins, jnp.argsort(pairs) - firsts[bins])


def of_equal_bins(order: Order, capacity: int, first: int | jax.Array) -> Slots:
    """Return the slots of bins of this capacity, for the pairs of each bin from the `first` on."""
    num_bins = len(order.firsts) - 1
    return slots_of(order, capacity * jnp.arange(num_bins), jnp.full(num_bins, capacity), num_bins * capacity, first)


def slots_of(order: Order, starts: jax.Array, sizes: jax.Array, num_slots: int, first: int | jax.Array = 0) -> Slots:
    """Return slots where bin b has `sizes[b]` of them from `starts[b]` on, for its pairs from the `first` on."""
    num_pairs, counts = len(order.pairs), jnp.diff(order.firsts)
    place, last = order.ranks - first, len(starts) - 1
    bins = jnp.minimum(order.bins, last)
    fits = (order.bins <= last) & (place >= 0) & (place < sizes[bins])
    slot = jnp.arange(num_slots)
    bins_of_slots = jnp.searchsorted(starts, slot, side="right") - 1
    within = slot - starts[bins_of_slots]
    filled = (within < sizes[bins_of_slots]) & (within + first < counts[bins_of_slots])
    pair = order.pairs[jnp.minimum(order.firsts[bins_of_slots] + within + first, num_pairs - 1)]
    return Slots(jnp.where(fits, starts[bins] + place, num_slots), jnp.where(filled, pair, num_pairs))


@jax.custom_vjp
def moved(x: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the rows x[sources], zero where there is none; `targets` is where each row of `x` has gone.

    The gradient is looked up as well: a TPU adds rows up one by one.
    """
    return x.at[sources].get(mode="fill", fill_value=0)


moved.defvjp(
    lambda x, sources, targets: (moved(x, sources, targets), (sources, targets)),
    lambda ways, gradient: (moved(gradient, *reversed(ways)), None, None),
)


def _sent(slots: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Return the slots that all devices have for this one, by device, of slots by the device that they are for."""
    return jax.lax.all_to_all(slots, axes, 0, 0, tiled=True) if axes else slots


def _owner_axes() -> tuple[str, ...]:
    return tuple(axis for axis in as_axis_tuple(mesh_axes(("owners",))[0]) if num_shards(axis) > 1)


def _by_groups(x_SD: jax.Array, experts: jax.Array, weights: tuple) -> jax.Array:
    """Return for each row what its expert makes of it; zero for those past the last expert."""
    num_experts = len(weights[0])
    order = sort(experts, num_experts)
    sizes = grouped.aligned(jnp.diff(order.firsts))
    slots = slots_of(order, jnp.cumsum(sizes) - sizes, sizes, grouped.num_rows(len(experts), num_experts))
    y = _mlp(moved(x_SD, slots.pair, slots.of_pair), weights, lambda x, weight: grouped.grouped(x, weight, sizes))
    return moved(y, slots.of_pair, slots.pair)


def _mlp(x: jax.Array, weights: tuple, times) -> jax.Array:
    """Return the SwiGLU of layers/mlp.py, whose products are `times`."""
    gate, up = (checkpoint_name(times(x, w), name) for w, name in zip(weights, ("gate", "up"), strict=False))
    return times(jax.nn.silu(gate) * up, weights[2])


def _combined(y: jax.Array, gates: jax.Array) -> jax.Array:
    """Return the sum over a token's experts, in the type of `y`, [experts of a token, M, D]."""
    return (gates[..., None] * y).sum(axis=0).astype(y.dtype)
