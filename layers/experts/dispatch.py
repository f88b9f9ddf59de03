# SPDX-License-Identifier: Apache-2.0
"""Dispatch one device's tokens to their experts and combine the results.

A pair is a token and one of its experts. Pairs are sorted by destination and put into slots. An all-to-all sends the
slots to the devices that hold the experts, and another returns the results. Experts multiply their hidden units by the
gates, so the gradient of the gates needs no output of an expert, and rematerialisation does not compute it again.
Letters: M tokens of a device, D embed, F mlp, E experts, C capacity, S slots.
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp

from layers import taps
from layers.axes import as_axis_tuple, mesh_axes, num_shards
from layers.experts import grouped
from layers.products import einsum

ROUND = 1.5  # slots of one exchange, relative to the slots that a perfectly balanced router needs
SELDOM = "seldom"  # names a branch that a balanced router does not take, so that rehearsals can skip it


class Slots(NamedTuple):
    """The slot of each pair and the pair of each slot, int32; an index past the last means none."""

    of_pair: jax.Array
    pair: jax.Array


def dropless(x_MD: jax.Array, experts: jax.Array, gates: jax.Array, weights: tuple) -> tuple[jax.Array, jax.Array]:
    """Return ([M, D], dropped): the sum over a token's experts of gate * SwiGLU; no pair is dropped.

    One exchange has slots for a balanced router. If a device gets more pairs, more exchanges follow until all pairs
    are computed. So memory does not depend on the router.

    Args:
      x_MD: in the compute type.
      experts: int32 [experts of a token, M]; an index past the last means none. `dropped` is bool of this shape.
      gates: float32, of the same shape.
      weights: gate and up [E of a device, D, F], down [E of a device, F, D].
    """
    dropped, pairs = jnp.zeros(experts.shape, bool), experts.reshape(-1)
    num_devices, (num_local, *_) = num_expert_shards(), weights[0].shape
    if num_devices == 1:
        return _grouped_mlp(x_MD, pairs, gates, weights), dropped
    capacity = math.ceil(min(1, ROUND / num_devices) * len(pairs))
    order = sort(pairs // num_local, num_devices)
    axes = _owner_axes()

    def exchanged(number, x_MD, gates, weights):
        slots = slots_of_equal_bins(order, capacity, number * capacity)
        received = _all_to_all(spread(x_MD, slots), axes)
        received_gates = _all_to_all(permute_rows(gates.reshape(-1), slots.pair, slots.of_pair), axes)
        chosen = _all_to_all(pairs.at[slots.pair].get(mode="fill", fill_value=num_devices * num_local), axes)
        with taps.body() as recorded:
            owned = chosen - num_local * jax.lax.axis_index(axes)
            y = _grouped_mlp(received, owned, received_gates, weights)
        return collect(_all_to_all(y, axes), slots, len(x_MD)), recorded

    first = exchanged(0, x_MD, gates, weights)
    rounds = math.ceil(len(pairs) / capacity)
    if rounds == 1:
        y_MD, recorded = first
        taps.add(recorded)
        return y_MD, dropped
    largest = jax.lax.pmax(jnp.diff(order.firsts).max(), jax.sharding.get_abstract_mesh().axis_names)
    again = jax.checkpoint(exchanged)

    def next_round(sums, number):
        more = lambda: jax.tree.map(jnp.add, sums, again(number, x_MD, gates, weights))  # noqa: E731
        return jax.lax.cond(largest > number * capacity, more, lambda: sums), None  # the same branch on all devices

    with jax.named_scope(SELDOM):
        more_rounds = lambda: jax.lax.scan(next_round, first, jnp.arange(1, rounds))[0]  # noqa: E731
        y_MD, recorded = jax.lax.cond(largest > capacity, more_rounds, lambda: first)
    taps.add(recorded)
    return y_MD, dropped


def with_capacity(
    x_MD: jax.Array, experts: jax.Array, gates: jax.Array, weights: tuple, *, factor: float
) -> tuple[jax.Array, jax.Array]:
    """Compute the same as `dropless` with C = ceil(factor * pairs / experts) slots a device for each expert.

    Pairs beyond the capacity are dropped; first choices come before second ones (arXiv:2006.16668, algorithm 1).
    """
    pairs, num_devices, (num_local, *_) = experts.reshape(-1), num_expert_shards(), weights[0].shape
    num_experts, axes = num_devices * num_local, _owner_axes()
    capacity = math.ceil(factor * len(pairs) / num_experts)
    slots = slots_of_equal_bins(sort(pairs, num_experts), capacity, 0)

    def by_expert(sent):
        of_devices = _all_to_all(sent, axes).reshape(num_devices, num_local, capacity, -1)
        return jnp.swapaxes(of_devices, 0, 1).reshape(num_local, num_devices * capacity, -1)

    x = by_expert(spread(x_MD, slots))
    is_pair = jnp.any(x != 0, axis=-1)  # a normalised token is not zero; an empty slot is
    owned = jnp.where(is_pair, jnp.arange(num_local)[:, None], num_local)
    received_gates = by_expert(permute_rows(gates.reshape(-1), slots.pair, slots.of_pair))[..., 0]
    y, gate, up = grouped.composed(lambda x, weight: einsum("ECD,EDF->ECF", x, weight), x, received_gates, weights)
    _tap_hidden(gate, up, owned, num_local)
    y = jnp.swapaxes(y.reshape(num_local, num_devices, capacity, -1), 0, 1).reshape(-1, x_MD.shape[1])
    dropped = (slots.of_pair == num_experts * capacity).reshape(experts.shape) & (experts < num_experts)
    return collect(_all_to_all(y, axes), slots, len(x_MD)), dropped


def num_expert_shards() -> int:
    """Return the number of devices that the experts are sharded over."""
    return num_shards(mesh_axes(("owners",))[0])


class Order(NamedTuple):
    """Pairs sorted by bin: the sorted pairs, the first index of each bin and the end, each pair's bin and rank."""

    pairs: jax.Array
    firsts: jax.Array
    bins: jax.Array
    ranks: jax.Array


def sort(bins: jax.Array, num_bins: int) -> Order:
    """Sort pairs by bin, int32, stably. A bin past the last means none."""
    bins = jnp.minimum(bins, num_bins)
    pairs = jnp.argsort(bins, stable=True)
    firsts = jnp.searchsorted(bins[pairs], jnp.arange(num_bins + 1))
    return Order(pairs, firsts, bins, jnp.argsort(pairs) - firsts[bins])


def slots_of_equal_bins(order: Order, capacity: int, first: int | jax.Array) -> Slots:
    """Return the slots if each bin has `capacity` slots, for the pairs of each bin from rank `first` on."""
    num_bins = len(order.firsts) - 1
    return slots_of_bins(
        order, capacity * jnp.arange(num_bins), jnp.full(num_bins, capacity), num_bins * capacity, first
    )


def slots_of_bins(
    order: Order, starts: jax.Array, sizes: jax.Array, num_slots: int, first: int | jax.Array = 0
) -> Slots:
    """Return the slots if bin b has slots `starts[b]` to `starts[b] + sizes[b]`, for its pairs from rank `first` on."""
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
def permute_rows(x: jax.Array, sources: jax.Array, targets: jax.Array) -> jax.Array:
    """Return the rows x[sources], zero for indices past the end; `targets` is the inverse permutation.

    The gradient is a gather by `targets`. The usual scatter-add is slow on a TPU, which adds rows one by one.
    """
    return x.at[sources].get(mode="fill", fill_value=0)


permute_rows.defvjp(
    lambda x, sources, targets: (permute_rows(x, sources, targets), (sources, targets)),
    lambda ways, gradient: (permute_rows(gradient, *reversed(ways)), None, None),
)


@jax.custom_vjp
def spread(x_MD: jax.Array, slots: Slots) -> jax.Array:
    """Return [S, D]: the token of each slot's pair, zero for empty slots; the gradient is `collect`."""
    num_pairs, M = len(slots.of_pair), len(x_MD)
    return x_MD.at[jnp.where(slots.pair < num_pairs, slots.pair % M, M)].get(mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def collect(y_SD: jax.Array, slots: Slots, num_tokens: int) -> jax.Array:
    """Return [num_tokens, D]: the sum over the slots of a token's pairs; the gradient is `spread`."""
    choices = slots.of_pair.reshape(-1, num_tokens)  # added one by one: a sum over the first dimension is slow on TPU
    rows = [y_SD.at[slots_M].get(mode="fill", fill_value=0).astype(jnp.float32) for slots_M in choices]
    return sum(rows).astype(y_SD.dtype)


spread.defvjp(
    lambda x_MD, slots: (spread(x_MD, slots), (slots, len(x_MD))),
    lambda kept, gradient: (collect(gradient, *kept), None),
)
collect.defvjp(
    lambda y_SD, slots, num_tokens: (collect(y_SD, slots, num_tokens), slots),
    lambda num_tokens, slots, gradient: (spread(gradient, slots), None),
)


def _all_to_all(slots: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Exchange slots ordered by destination device; the result is ordered by source device."""
    return jax.lax.all_to_all(slots, axes, 0, 0, tiled=True) if axes else slots


def _owner_axes() -> tuple[str, ...]:
    return tuple(axis for axis in as_axis_tuple(mesh_axes(("owners",))[0]) if num_shards(axis) > 1)


def _grouped_mlp(x_MD: jax.Array, experts: jax.Array, gates: jax.Array, weights: tuple) -> jax.Array:
    """Return [M, D]: the sum of gate * SwiGLU over the experts of each row; an index past the last means none.

    Args:
      experts: [experts of a row * M]; `gates` as many in any shape, both in the order of `Slots`.
    """
    num_experts = len(weights[0])
    order = sort(experts, num_experts)
    sizes = grouped.aligned(jnp.diff(order.firsts))
    slots = slots_of_bins(order, jnp.cumsum(sizes) - sizes, sizes, grouped.num_rows(len(experts), num_experts))
    y, gate, up = grouped.swiglu(
        spread(x_MD, slots), permute_rows(gates.reshape(-1), slots.pair, slots.of_pair), weights, sizes
    )
    _tap_hidden(gate, up, experts.at[slots.pair].get(mode="fill", fill_value=num_experts), num_experts)
    return collect(y, slots, len(x_MD))


def _tap_hidden(gate: jax.Array, up: jax.Array, experts: jax.Array, num_experts: int) -> None:
    """Measure the hidden units of the experts, which `experts` names for each row."""
    taps.tap_groups("expert_hidden", jax.nn.silu(gate) * up, experts, num_experts)
