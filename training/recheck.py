# SPDX-License-Identifier: Apache-2.0
"""Looks for silent corruption: one step is computed twice on the same batch, and every bit compared."""

import jax

from parallelism import processes
from training import replicas


class Corrupted(RuntimeError):
    """A device computed something else the second time; the message names it."""

    exit_status = 1


def twice(train_step, state, batch, mesh: jax.sharding.Mesh):
    """Return train_step(state, batch), having done it twice; needs memory for a second state.

    Raises:
      Corrupted: the two results differ on some device.
      ReplicasDiffer: devices that should hold the same do not.
    """
    copy = jax.tree.map(lambda leaf: jax.device_put(leaf, leaf.sharding, may_alias=False), state)
    first, _ = train_step(copy, batch)
    sums = replicas.checksums(first, mesh)
    del first
    state, scalars = train_step(state, batch)
    again = replicas.checksums(state, mesh)
    mine = sorted(key for key in sums if sums[key] != again[key])
    for number, differing in enumerate(processes.gather("recheck", mine)):
        if differing:
            name, _, device = differing[0].split("|")
            raise Corrupted(
                f"step {int(state.step)} computed twice gave other bits on device {device} of "
                f"{processes.name(number)}, in {len(differing)} arrays, {name} among them; take that device out of "
                "use, and start again from the last checkpoint"
            )
    replicas.check(state, mesh)
    return state, scalars
