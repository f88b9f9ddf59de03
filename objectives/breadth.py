# SPDX-License-Identifier: Apache-2.0
"""Breadth at test time: several trajectories of latents for each puzzle, each with its own noise (arXiv:2605.19943).

The first trajectory has no noise: it is the answer of the model alone, unless it begins with random latents.
Trajectories of a puzzle are rows of one batch, so that one program computes them all, and they are sharded as rows are.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from layers import latents
from objectives.recursive import OF_START, Recursive, where_rows

OF_NOISE = 3  # purpose of random draws; objectives/recursive.py has the others


class Breadth(NamedTuple):
    """How puzzles are explored.

    Attributes:
      trajectories: number of answers to a puzzle, J.
      steps: supervision steps, N.
      noise: standard deviation of the noise that is added to all latents before each step.
      random_start: standard deviation of random initial latents, 0: the model's vectors; less than 0: as in training.
    """

    trajectories: int
    steps: int
    noise: float = 1.0
    random_start: float = -1.0


class Explored(NamedTuple):
    """The answers of all trajectories after each step: N steps, B puzzles, J trajectories, S cells.

    Attributes:
      tokens: [N, B, J, S], the likeliest ones; int16, or int32 if there are more than 32,768.
      halts: float32 [N, B, J], halt logits.
      changes: float32 [N, B, J], the root mean square of what the step changed in `high`, after its noise.
    """

    tokens: jax.Array
    halts: jax.Array
    changes: jax.Array


def of_config(config) -> Breadth:
    """Return what the section `inference` of a configuration says."""
    own = config.inference
    return Breadth(own.trajectories, own.supervision_steps or config.supervision.max_steps, own.noise, own.random_start)


def explore(objective: Recursive, model, batch: dict, draws: jax.Array, breadth: Breadth) -> Explored:
    """Return the answers of all trajectories; no slot halts early.

    Trajectory j of a puzzle depends neither on the number of trajectories nor on the other puzzles.

    Args:
      batch: arrays with B rows.
      draws: a random key for each puzzle, as data, uint32 [B, 2].
    """
    plain, count = objective.plain, breadth.trajectories
    rows = draws.shape[0] * count
    keys = latents.of_each(draws, count)
    is_noisy = jnp.arange(rows) % count > 0
    carry = plain.init_carry(model, rows, jax.random.key(0)) | {
        "states": _begun(plain, model, keys, is_noisy, breadth),
        "halted": jnp.zeros(rows, bool),
        **{name: jnp.repeat(batch[name], count, axis=0) for name in plain.batch()},
    }

    def step(reached, _):
        carry, noise_keys = reached
        if breadth.noise:
            noise_keys, states = _with_noise(noise_keys, carry["states"], is_noisy, breadth.noise)
            carry |= {"states": states}
        before = carry["states"][0]
        carry, logits, halts = plain.step_on(model, carry, carry)
        moved = (carry["states"][0] - before).astype(jnp.float32)
        changes = jnp.sqrt(jnp.square(moved).mean(axis=tuple(range(1, moved.ndim))))
        kind = jnp.int16 if logits.shape[-1] <= 1 << 15 else jnp.int32
        return (carry, noise_keys), (jnp.argmax(logits, axis=-1).astype(kind), halts, changes)

    _, found = jax.lax.scan(step, (carry, latents.folded(keys, OF_NOISE)), length=breadth.steps)
    return Explored(*(part.reshape(breadth.steps, -1, count, *part.shape[2:]) for part in found))


def _begun(plain: Recursive, model, keys: jax.Array, is_noisy: jax.Array, breadth: Breadth):
    """Return the initial states of all trajectories."""
    states, deviation = plain.start(model, keys), breadth.random_start
    if deviation < 0:
        return states
    others = model.start(len(keys))
    if deviation:
        others = latents.random_states(latents.folded(keys, OF_START), states, deviation)
    return jax.tree.map(functools.partial(where_rows, is_noisy), others, states)


def _with_noise(keys: jax.Array, states, is_noisy: jax.Array, deviation: float):
    """Return (the next keys, the states with noise in the noisy trajectories)."""
    leaves, structure = jax.tree.flatten(states)
    noised = []
    for leaf in leaves:
        keys, noise = latents.normal(keys, leaf)
        noised.append(where_rows(is_noisy, leaf + deviation * noise, leaf))
    return keys, jax.tree.unflatten(structure, noised)
