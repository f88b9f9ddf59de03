# SPDX-License-Identifier: Apache-2.0
"""A head on the frozen model of `train.init_from` that predicts the reward of an answer from its first tokens.

It is trained on answers that the model draws (verifiers, arXiv:2110.14168, section 4), with the keys `grpo.*` of their
number, temperature and reward. The loss of a token is -r log v - (1 - r) log(1 - v), with the reward r of its answer,
from 0 to 1, and v = sigmoid(head) of the state that predicts the token. So v is the expected reward of an answer that
begins with the tokens before it.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from layers.adapters import freeze
from layers.projection import Projection
from objectives import grpo
from objectives.grpo import GRPO
from objectives.language_modeling import loss_mask
from objectives.objective import numbers_of
from reasoning import rollouts

HEAD = "value_head"  # attribute of the model


def make(config) -> "ValueHead":
    """Return the objective of a configuration."""
    return ValueHead(**vars(grpo.make(config)), embed_dim=config.model.embed_dim)


@dataclasses.dataclass(frozen=True)
class ValueHead(GRPO):
    """The loss of the head, which alone is trained. Held-out rows are judged as in next-token prediction.

    `embed_dim` is that of the model.
    """

    embed_dim: int = 0

    trainable = nnx.All(nnx.Param, nnx.PathContains(HEAD))

    def frozen_models(self):
        """Return none: the model that draws the answers is the frozen base."""
        return ()

    def transform(self, model: nnx.Module, rngs: nnx.Rngs) -> nnx.Module:
        """Add the head, and mark all other weights as frozen."""
        freeze(model)
        setattr(model, HEAD, Projection(in_dim=model.embed_dim, out_dim=1, rngs=rngs))
        return model

    def flops_per_token(self, of_model, *, frozen: bool) -> float:
        """Return the model FLOPs of one token: a forward pass without logits, whose gradient ends at the head."""
        return of_model() / 3 - 2 * self.embed_dim * self.vocab_size

    def sample_batch(self, engine, batch, key):
        """Return answers as GRPO does; raises DataError for a reward that is not a probability."""
        sampled = super().sample_batch(engine, batch, key)
        rollouts.check_probabilities(record["reward"] for record in sampled.records)
        return sampled

    def loss(self, model, carry, batch, key):
        """Return the loss; scalars also have `accuracy`, the share of tokens whose v is on the side of the reward."""
        stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"])
        values_BT = getattr(model, HEAD)(stream_BTD)[..., 0].astype(jnp.float32)
        weights_BT, rewards_B1 = loss_mask(batch), numbers_of(batch["rewards"])[:, None]
        total = jnp.sum(weights_BT * (jax.nn.softplus(values_BT) - rewards_B1 * values_BT))
        weight = weights_BT.sum()
        is_right_BT = (values_BT > 0) == (rewards_B1 > 0.5)
        scalars = {"loss": (total, weight), "accuracy": (jnp.sum(weights_BT * is_right_BT), weight)}
        return (total, weight), (carry, jax.lax.stop_gradient(scalars))
