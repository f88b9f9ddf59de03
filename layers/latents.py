# SPDX-License-Identifier: Apache-2.0
"""Random latents of a recursive model: random initial states, and noise along the path (arXiv:2605.21488, section 4).

Every row has its own random key, so that the draws do not depend on how rows are sharded. Keys are passed as their
data, uint32 [B, 2].
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from layers.axes import TRUNCATED


@functools.partial(jax.tree_util.register_dataclass, data_fields=["draws"], meta_fields=["deviation", "rate"])
@dataclasses.dataclass(frozen=True)
class Path:
    """How a latent moves from its value to its update.

    z <- (1 - rate) z + rate f(z) + deviation * e, with e of a unit normal distribution.

    Attributes:
      draws: keys of the noise, uint32 [B, 2]; None: there is no noise.
      deviation: of the noise.
      rate: part of the way.
    """

    draws: jax.Array | None = None
    deviation: float = 0.0
    rate: float = 1.0

    def follow(self, before: jax.Array, after: jax.Array) -> tuple[jax.Array, "Path"]:
        """Return the moved latent [B, ...], and the path with the keys of the next move."""
        moved = after if self.rate == 1 else (1 - self.rate) * before + self.rate * after
        if self.draws is None:
            return moved, self
        draws, noise = normal(self.draws, before)
        return moved + self.deviation * noise, dataclasses.replace(self, draws=draws)


def normal(draws: jax.Array, like: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return (the next keys, unit normal noise of the shape and type of `like`, [B, ...])."""

    def one(data):
        after, now = jax.random.split(jax.random.wrap_key_data(data))
        return jax.random.key_data(after), jax.random.normal(now, like.shape[1:], like.dtype)

    return jax.vmap(one)(draws)


def random_states(draws: jax.Array, like, deviation: float):
    """Return a tree like `like` of arrays [B, ...] from a normal distribution truncated at 2 of its deviations.

    They are scaled to `deviation`. Each array has its own draws.
    """
    leaves, structure = jax.tree.flatten(like)

    def one(data, leaf, number):
        key = jax.random.fold_in(jax.random.wrap_key_data(data), number)
        drawn = jax.random.truncated_normal(key, -2, 2, leaf.shape[1:])
        return (deviation / TRUNCATED * drawn).astype(leaf.dtype)

    drawn = [jax.vmap(lambda data, leaf=leaf, n=n: one(data, leaf, n))(draws) for n, leaf in enumerate(leaves)]
    return jax.tree.unflatten(structure, drawn)


def folded(draws: jax.Array, number: int | jax.Array) -> jax.Array:
    """Return other keys, one for each key and the same number: uint32 [B, 2]."""
    fold = jax.vmap(lambda data: jax.random.key_data(jax.random.fold_in(jax.random.wrap_key_data(data), number)))
    return fold(draws)


def of_each(draws: jax.Array, count: int) -> jax.Array:
    """Return `count` keys for each key, those of a row together: uint32 [B * count, 2]; none depends on `count`."""

    def one(data):
        key = jax.random.wrap_key_data(data)
        return jax.vmap(lambda number: jax.random.key_data(jax.random.fold_in(key, number)))(jnp.arange(count))

    return jax.vmap(one)(draws).reshape(-1, draws.shape[-1])
