# SPDX-License-Identifier: Apache-2.0
"""Next-token prediction: the mean over the tokens that count of -log p(target), in nats.

An objective is a module with `make`. What it makes has these six, and returns sums and weights, never means, so that
it is right under any sharding, packing and accumulation:

- `batch()`: {name: shape} of the int32 arrays of a batch, their first dimension the rows;
- `random_batch(key)`: one of these with random contents, to prove a layout with;
- `init_carry(model, rows, key)`: what one step hands to the next beside the parameters, its first dimensions the rows;
- `loss(model, carry, batch, key)`: (sum, weight), (carry, scalars), the weight in tokens, scalars (sum, weight) too,
  among them `tokens` where that weight counts something else;
- `evaluate(model, batch)`: the scalars of held-out rows;
- `told(figures)`: what to say of their means: (name, values, what the weight of the loss counts).
"""

import dataclasses

import jax
import jax.numpy as jnp

from layers import experts
from layers.cross_entropy import cross_entropy


def make(config, *, num_chunks: int) -> "LanguageModeling":
    """Return the objective of a configuration.

    Args:
      num_chunks: parts of the length whose logits exist one at a time.
    """
    train = config.train
    heldout_parts = train.sequence_length // (config.evaluation.chunk_tokens or train.sequence_length)
    return LanguageModeling(
        train.global_batch, train.sequence_length, num_chunks, train.z_loss, config.model.vocab_size,
        train.balance_loss, train.router_z_loss, heldout_parts,
    )  # fmt: skip


def weights(batch: dict) -> jax.Array:
    """Return float32 [B, T]: 1 where a target counts; padding, of segment 0, and targets less than 0 do not."""
    return ((batch["segments"] > 0) & (batch["targets"] >= 0)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class LanguageModeling:
    """`z_loss` is the weight of mean log(Z)^2; part of what is minimised, not of the reported `loss`.

    So are `balance_loss` and `router_z_loss`, the weights of what layers/experts.py adds: sums over tokens that are
    read, divided as all is by those that count, so that of conversations they weigh more. A held-out sequence is
    computed in `heldout_parts` parts of its length, one after the other.
    """

    rows: int
    length: int
    num_chunks: int = 1
    z_loss: float = 0.0
    vocab_size: int = 0  # of random batches
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    heldout_parts: int = 1

    def batch(self) -> dict[str, tuple]:
        """Segment 0 is padding and weighs 0, as does a target of -1."""
        return dict.fromkeys(("tokens", "targets", "segments", "positions"), (self.rows, self.length))

    def random_batch(self, key) -> dict[str, jax.Array]:
        """Some four documents a row, of random lengths; of the last row a third is padding."""
        of_tokens, of_starts = jax.random.split(key)
        stream = jax.random.randint(of_tokens, (self.rows, self.length + 1), 0, self.vocab_size)
        starts_BT = jax.random.bernoulli(of_starts, 4 / self.length, (self.rows, self.length)).at[:, 0].set(True)
        index_BT = jnp.broadcast_to(jnp.arange(self.length), starts_BT.shape)
        first_BT = jax.lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)
        segments_BT = jnp.cumsum(starts_BT, axis=1).at[-1, -(self.length // 3) :].set(0)
        return {
            "tokens": stream[:, :-1], "targets": stream[:, 1:], "segments": segments_BT,
            "positions": index_BT - first_BT,
        }  # fmt: skip

    def init_carry(self, model, rows: int, key) -> dict:
        """Nothing."""
        return {}

    def loss(self, model, carry, batch, key):
        """The key is of the model's dropout; None, as in evaluation, for none."""
        stream_BTD, _, figures = model.forward_with_aux(batch["tokens"], batch["positions"], batch["segments"], key=key)
        weights_BT = weights(batch)
        total, loss_sum = cross_entropy(
            *model.head_inputs(stream_BTD), batch["targets"], weights_BT, self.num_chunks, self.z_loss, model.logit_cap
        )
        weight = weights_BT.sum()
        penalty, scalars = experts.router_losses(figures, balance_loss=self.balance_loss, z_loss=self.router_z_loss)
        return (total + penalty, weight), (carry, {"loss": (loss_sum, weight)} | scalars)

    def evaluate(self, model, batch) -> dict:
        """The loss, with nothing random in it.

        Of several parts each attends to those before by a key-value cache, so that the sums are those of the whole but
        for rounding, in the memory of a part and of the cache.
        """
        if self.heldout_parts == 1:
            return {"loss": self._heldout(model, batch, None)[0]}

        def body(carry, part):
            cache, sums = carry
            of_part, cache = self._heldout(model, part, cache)
            return (cache, jax.tree.map(jnp.add, sums, of_part)), None

        rows, length = batch["tokens"].shape
        parts = {name: jnp.moveaxis(array.reshape(rows, self.heldout_parts, -1), 1, 0) for name, array in batch.items()}
        start = model.empty_cache(rows, length), (jnp.float32(0), jnp.float32(0))
        (_, sums), _ = jax.lax.scan(body, start, parts)
        return {"loss": sums}

    def _heldout(self, model, batch, cache: dict | None) -> tuple[tuple, dict | None]:
        """Return ((sum of losses, their weight), the cache with this part of the sequences in it)."""
        stream_BTD, cache = model(batch["tokens"], batch["positions"], batch["segments"], cache)
        weights_BT = weights(batch)
        length = weights_BT.shape[1]
        chunks = next(n for n in range(1, length + 1) if length % n == 0 and n * self.heldout_parts >= self.num_chunks)
        _, loss_sum = cross_entropy(
            *model.head_inputs(stream_BTD), batch["targets"], weights_BT, chunks, logit_cap=model.logit_cap
        )
        return (loss_sum, weights_BT.sum()), cache

    def told(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """The loss."""
        return "loss", f"{figures['loss']:.4f} nats a token", "tokens"
