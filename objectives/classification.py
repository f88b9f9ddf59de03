# SPDX-License-Identifier: Apache-2.0
"""Classification: the mean of -log p(label) over rows, in nats, and the share of rows that are classified right."""

import dataclasses

import jax
import jax.numpy as jnp

from objectives.objective import Objective


def make(config) -> "Classification":
    """Return the objective of a configuration."""
    return Classification(
        config.train.global_batch, config.train.sequence_length, config.model.vocab_size, config.model.levels
    )


@dataclasses.dataclass(frozen=True)
class Classification(Objective):
    """Cross-entropy of one label a row. Labels less than 0, as in rows of padding, have weight 0.

    A row counts as its `length` tokens, so that `tokens` of the metrics is the amount of data.
    """

    rows: int
    length: int
    num_classes: int
    levels: int

    def batch(self) -> dict[str, tuple]:
        """Return the shapes of a batch: integers from 0 to levels - 1, and labels."""
        return {"inputs": (self.rows, self.length), "labels": (self.rows,)}

    def random_batch(self, key) -> dict[str, jax.Array]:
        """Return a random batch."""
        of_inputs, of_labels = jax.random.split(key)
        return {
            "inputs": jax.random.randint(of_inputs, (self.rows, self.length), 0, self.levels),
            "labels": jax.random.randint(of_labels, (self.rows,), 0, self.num_classes),
        }

    def loss(self, model, carry, batch, key):
        """Return the loss, and the scalars `loss` and `accuracy`."""
        scalars = self.evaluate(model, batch)
        total, weight = scalars["loss"]
        return (total * self.length, weight * self.length), (carry, jax.lax.stop_gradient(scalars))

    def evaluate(self, model, batch) -> dict:
        """Return the sums over rows of `loss` and `accuracy`, with the number of rows."""
        labels_B = batch["labels"]
        counts_B = (labels_B >= 0).astype(jnp.float32)
        logits_BC = model(batch["inputs"])
        log_shares_BC = jax.nn.log_softmax(logits_BC)
        losses_B = -jnp.take_along_axis(log_shares_BC, jnp.maximum(labels_B, 0)[:, None], axis=1)[:, 0]
        right_B = jnp.argmax(logits_BC, axis=1) == labels_B
        return {
            "loss": ((counts_B * losses_B).sum(), counts_B.sum()),
            "accuracy": ((counts_B * right_B).sum(), counts_B.sum()),
        }

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts of accuracy and loss."""
        return "accuracy", f"{figures['accuracy']:.2%}, loss {figures['loss']:.4f} nats a row", "rows"
