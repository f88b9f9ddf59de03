# SPDX-License-Identifier: Apache-2.0
"""Next-token prediction: the mean over real tokens of -log p(target), in nats.

An objective is a module with `init_carry` and `make_loss`. The loss returns sums and weights, never means, so
that it is right under any sharding, packing and accumulation.
"""

import jax.numpy as jnp

from layers.cross_entropy import cross_entropy


def init_carry(batch_spec: dict) -> dict:
    """Return what one step hands to the next beside the parameters: nothing."""
    return {}


def make_loss(*, num_chunks: int, z_loss: float):
    """Return loss(model, carry, batch, key) -> (sum, weight), (carry, scalars).

    Args:
      num_chunks: parts of the length whose logits exist one at a time.
      z_loss: weight of mean log(Z)^2; part of what is minimised, not of the reported `loss`.

    The batch has int32 [B, T] arrays `tokens, targets, positions, segments`; segment 0 is padding and weighs 0.
    Scalars are (sum, weight) pairs too. The key is of the model's dropout; None, as in evaluation, for none.
    """

    def loss(model, carry, batch, key):
        stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"], key=key)
        weights_BT = (batch["segments"] > 0).astype(jnp.float32)
        total, loss_sum = cross_entropy(
            stream_BTD, model.head_weight(), batch["targets"], weights_BT, num_chunks, z_loss, model.logit_cap
        )
        weight = weights_BT.sum()
        return (total, weight), (carry, {"loss": (loss_sum, weight)})

    return loss
