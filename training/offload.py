# SPDX-License-Identifier: Apache-2.0
"""Optimizer state in host memory between updates, to free device memory for activations.

As in ZeRO-Offload (arXiv:2101.06840), but the devices compute the update, so all numbers stay the same. The compiler
schedules the copies to overlap with computation, as early as memory allows.
"""

import dataclasses
from collections.abc import Callable

import jax

from training.state import TrainState

HOST = "pinned_host"  # jax's name of host memory


def optimizer_on_host(shardings: TrainState) -> TrainState:
    """Return the shardings with the sharded arrays of the optimizer in host memory; replicated ones are small."""

    def offloaded(sharding):
        return sharding.with_memory_kind(HOST) if any(sharding.spec) else sharding

    return dataclasses.replace(shardings, optimizer=jax.tree.map(offloaded, shardings.optimizer))


def on_device(tree):
    """Copy arrays to device memory inside a jitted function; arrays on the device stay there."""
    return jax.device_put(tree, jax.memory.Space.Device)


def with_optimizer_on_device(step: Callable) -> Callable:
    """Return a train step that copies the optimizer state to the devices first.

    The caller's output shardings return the new state to the host.
    """

    def train_step(state: TrainState, batch: dict, frozen: dict | None = None):
        return step(dataclasses.replace(state, optimizer=on_device(state.optimizer)), batch, frozen)

    return train_step
