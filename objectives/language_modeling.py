# SPDX-License-Identifier: Apache-2.0
"""Next-token prediction: the mean over real tokens of -log p(target), in nats.

An objective is a module with `make`. What it makes has these five, and returns sums and weights, never means, so that
it is right under any sharding, packing and accumulation:

- `batch()`: {name: shape} of the int32 arrays of a batch, their first dimension the rows;
- `init_carry(model, rows, key)`: what one step hands to the next beside the parameters, its first dimensions the rows;
- `loss(model, carry, batch, key)`: (sum, weight), (carry, scalars), the weight in tokens, scalars (sum, weight) too;
- `evaluate(model, batch)`: the scalars of held-out rows;
- `told(figures)`: what to say of their means: (name, values, what the weight of the loss counts).
"""

import dataclasses

import jax.numpy as jnp

from layers.cross_entropy import cross_entropy


def make(config, *, num_chunks: int) -> "LanguageModeling":
    """Return the objective of a configuration.

    Args:
      num_chunks: parts of the length whose logits exist one at a time.
    """
    train = config.train
    return LanguageModeling(train.global_batch, train.sequence_length, num_chunks, train.z_loss)


@dataclasses.dataclass(frozen=True)
class LanguageModeling:
    """`z_loss` is the weight of mean log(Z)^2; part of what is minimised, not of the reported `loss`."""

    rows: int
    length: int
    num_chunks: int = 1
    z_loss: float = 0.0

    def batch(self) -> dict[str, tuple]:
        """Segment 0 is padding and weighs 0."""
        return dict.fromkeys(("tokens", "targets", "segments", "positions"), (self.rows, self.length))

    def init_carry(self, model, rows: int, key) -> dict:
        """Nothing."""
        return {}

    def loss(self, model, carry, batch, key):
        """The key is of the model's dropout; None, as in evaluation, for none."""
        stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"], key=key)
        weights_BT = (batch["segments"] > 0).astype(jnp.float32)
        total, loss_sum = cross_entropy(
            stream_BTD, model.head_weight(), batch["targets"], weights_BT, self.num_chunks, self.z_loss,
            model.logit_cap,
        )  # fmt: skip
        weight = weights_BT.sum()
        return (total, weight), (carry, {"loss": (loss_sum, weight)})

    def evaluate(self, model, batch) -> dict:
        """The loss, with nothing random in it."""
        _, (_, scalars) = self.loss(model, {}, batch, None)
        return scalars

    def told(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """The loss."""
        return "loss", f"{figures['loss']:.4f} nats a token", "tokens"
