# SPDX-License-Identifier: Apache-2.0
"""Stablemax cross-entropy (arXiv:2501.04697): softmax with s(u) in place of exp: u + 1 from 0 on, 1 / (1 - u) below.

It is computed as a softmax of g = log s, in float32. Written out, 1 / (1 - u) has an infinite derivative at u = 1, and
`where` multiplies it by 0 to NaN.
"""

import jax
import jax.numpy as jnp


def log_s(u: jax.Array) -> jax.Array:
    """Return float32 log s(u); its slope at 0 is 1, from both sides."""
    u = u.astype(jnp.float32)
    return jnp.log1p(jnp.where(u >= 0, u, 0)) - jnp.log1p(jnp.where(u < 0, -u, 0))


def stablemax_loss(logits: jax.Array, labels: jax.Array, smoothing: float = 0.0) -> jax.Array:
    """Return float32 -log p(label) over the last dimension of the logits; `smoothing` is as in `softmax_loss`."""
    return softmax_loss(log_s(logits), labels, smoothing)


def softmax_loss(logits: jax.Array, labels: jax.Array, smoothing: float = 0.0) -> jax.Array:
    """Return the float32 cross-entropy of softmax(logits) with a smoothed label (arXiv:1512.00567, section 7).

    The target has 1 - smoothing on the label, and smoothing spread evenly over all V logits, the label's too.
    """
    logits = logits.astype(jnp.float32)
    chosen = jnp.take_along_axis(logits, labels[..., None], axis=-1)[..., 0]
    if smoothing:
        chosen = (1 - smoothing) * chosen + smoothing * logits.mean(axis=-1)
    return jax.nn.logsumexp(logits, axis=-1) - chosen
