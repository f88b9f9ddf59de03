# SPDX-License-Identifier: Apache-2.0
"""Inverted dropout: surviving values are divided by the probability to survive, which keeps the mean.

arXiv:1207.0580; its places in a transformer: arXiv:1706.03762, section 5.4.
"""

import jax
import jax.numpy as jnp


def dropout(x: jax.Array, rate: float, key: jax.Array | None, place: int) -> jax.Array:
    """Return `x` with a fraction `rate` of its values zeroed and the others divided by 1 - rate; without a key, `x`.

    Args:
      rate: less than 1.
      key: random key; None: no dropout.
      place: folded into the key, so that places that share a key draw differently.
    """
    if key is None:
        return x
    mask = jax.random.bernoulli(jax.random.fold_in(key, place), 1 - rate, x.shape)
    return jnp.where(mask, (x.astype(jnp.float32) / (1 - rate)).astype(x.dtype), 0)  # a bfloat16 of 0.9 is 0.898
