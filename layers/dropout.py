# SPDX-License-Identifier: Apache-2.0
"""Dropout, inverted: what is kept is divided by the chance to be kept, so that the mean stays.

arXiv:1207.0580; where it acts in a transformer: arXiv:1706.03762, section 5.4.
"""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None, place: int) -> jax.Array:
    """Return `x` with a part `rate` of its numbers zeroed and the others divided by 1 - rate; without a key, `x`.

    Args:
      rate: less than 1.
      key: random key, None where nothing is dropped.
      place: tells apart what shares a key.
    """
    if key is None:
        return x
    kept = jax.random.bernoulli(jax.random.fold_in(key, place), 1 - rate, x.shape)
    return jnp.where(kept, x / (1 - rate), 0)
