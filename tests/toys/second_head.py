# SPDX-License-Identifier: Apache-2.0
"""A toy for tests/test_additions.py: a second head on a frozen base predicts whether the next token is odd."""

import jax
import jax.numpy as jnp
from flax import nnx

from layers.projection import Projection
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, loss_mask


def make(config) -> "SecondHead":
    """Return the objective of a configuration."""
    return SecondHead(**vars(language_modeling.make(config)))


class SecondHead(LanguageModeling):
    """The binary cross-entropy of the second head, which alone is trained."""

    trainable = nnx.PathContains("second_head")

    def transform(self, model, rngs):
        """Add the head."""
        model.second_head = Projection(in_dim=model.embed_dim, out_dim=1, rngs=rngs)
        return model

    def loss(self, model, carry, batch, key):
        """Return the loss of the second head."""
        stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"])
        logits_BT = model.second_head(stream_BTD)[..., 0].astype(jnp.float32)
        weights_BT = loss_mask(batch)
        of_token_BT = jax.nn.softplus(logits_BT) - logits_BT * (batch["targets"] % 2)
        pair = jnp.sum(weights_BT * of_token_BT), weights_BT.sum()
        return pair, (carry, {"loss": pair})

    def evaluate(self, model, batch):
        """Return the loss on held-out rows."""
        return self.loss(model, {}, batch, None)[1][1]
