# SPDX-License-Identifier: Apache-2.0
"""Moments that wait for the next update in the hosts' memory, so that activations may have their place on the chips.

As in ZeRO-Offload (arXiv:2101.06840), but that the chips compute the update, so that every number is the
same. The compiler orders the copies: beside other work, and as early as memory allows.
"""

import dataclasses
from collections.abc import Callable

import jax

from training.state import TrainState

HOST = "pinned_host"  # jax's name of that memory


def on_host(shardings: TrainState) -> TrainState:
    """Return where a state lies whose moments are on the hosts, all that are split; the others are small."""

    def moved(sharding):
        return sharding.with_memory_kind(HOST) if any(sharding.spec) else sharding

    return dataclasses.replace(shardings, optimizer=jax.tree.map(moved, shardings.optimizer))


def on_device(tree):
    """Return arrays in the devices' memory, within a jitted function; what is there already stays as it is."""
    return jax.device_put(tree, jax.memory.Space.Device)


def brought(step: Callable) -> Callable:
    """Return a train step that takes moments from the hosts; its caller says where the new ones go."""

    def train_step(state: TrainState, batch: dict, *frozen):
        return step(dataclasses.replace(state, optimizer=on_device(state.optimizer)), batch, *frozen)

    return train_step
