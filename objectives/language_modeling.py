# SPDX-License-Identifier: Apache-2.0
"""Next-token prediction: the mean of -log p(target) over unmasked tokens, in nats.

With `lora.rank`, only adapters are trained, and the loss is that of the adapted model.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from layers.adapters import LoRA, add_adapters
from layers.cross_entropy import cross_entropy, log_probabilities
from layers.experts import experts
from objectives.objective import Objective


def make(config) -> "LanguageModeling":
    """Return the objective of a configuration."""
    train, lora = config.train, config.lora
    heldout_parts = train.sequence_length // (config.evaluation.chunk_tokens or train.sequence_length)
    return LanguageModeling(
        train.global_batch, train.sequence_length, z_loss=train.z_loss, vocab_size=config.model.vocab_size,
        balance_loss=train.balance_loss, router_z_loss=train.router_z_loss, heldout_parts=heldout_parts,
        lora=LoRA.named(lora.rank, lora.alpha, lora.targets) if lora.rank else None,
    )  # fmt: skip


def loss_mask(batch: dict) -> jax.Array:
    """Return the float32 loss mask [B, T]: 0 for padding, which has segment 0, and for targets less than 0."""
    return ((batch["segments"] > 0) & (batch["targets"] >= 0)).astype(jnp.float32)


@dataclasses.dataclass(frozen=True)
class LanguageModeling(Objective):
    """Cross-entropy with auxiliary losses, which are minimised but not part of the reported `loss`.

    `z_loss` is the weight of mean log(Z)^2. `balance_loss` and `router_z_loss` are the weights of the router losses of
    layers/experts/experts.py. Router losses are sums over all tokens, but they are divided by the number of unmasked
    ones like everything else, so they weigh more in conversations. A held-out sequence is computed in `heldout_parts`
    consecutive parts of its length.
    """

    rows: int
    length: int
    num_chunks: int = 1
    z_loss: float = 0.0
    vocab_size: int = 0  # of random batches
    balance_loss: float = 0.0
    router_z_loss: float = 0.0
    heldout_parts: int = 1
    lora: LoRA | None = None

    @property
    def trainable(self) -> nnx.filterlib.Filter:
        """All parameters, or the adapters alone."""
        return nnx.LoRAParam if self.lora else nnx.Param

    def transform(self, model: nnx.Module, rngs: nnx.Rngs, **frozen: nnx.Module) -> nnx.Module:
        """Add the adapters, if there are some."""
        return add_adapters(model, self.lora, rngs) if self.lora else model

    def chunked(self, num_chunks: int) -> "LanguageModeling":
        """Return this objective with another number of chunks."""
        return dataclasses.replace(self, num_chunks=num_chunks)

    def batch(self) -> dict[str, tuple]:
        """Return the shapes of a batch. Segment 0 is padding; padding and targets of -1 have weight 0."""
        return dict.fromkeys(("tokens", "targets", "segments", "positions"), (self.rows, self.length))

    def random_batch(self, key) -> dict[str, jax.Array]:
        """Return a random batch: about four documents a row; a third of the last row is padding."""
        of_tokens, of_starts = jax.random.split(key)
        stream = jax.random.randint(of_tokens, (self.rows, self.length + 1), 0, self.vocab_size)
        starts_BT = jax.random.bernoulli(of_starts, 4 / self.length, (self.rows, self.length)).at[:, 0].set(True)
        index_BT = jnp.broadcast_to(jnp.arange(self.length), starts_BT.shape)
        first_BT = jax.lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)
        segments_BT = jnp.cumsum(starts_BT, axis=1).at[-1, self.length - self.length // 3 :].set(0)
        return {
            "tokens": stream[:, :-1], "targets": stream[:, 1:], "segments": segments_BT,
            "positions": index_BT - first_BT,
        }  # fmt: skip

    def loss(self, model, carry, batch, key):
        """Return the loss; `key` is that of the dropout, None for none."""
        stream_BTD, _, figures = model.forward_with_aux(batch["tokens"], batch["positions"], batch["segments"], key=key)
        weights_BT = loss_mask(batch)
        total, loss_sum = cross_entropy(
            *model.head_inputs(stream_BTD), batch["targets"], weights_BT, self.num_chunks, self.z_loss, model.logit_cap
        )
        weight = weights_BT.sum()
        penalty, scalars = experts.router_losses(figures, balance_loss=self.balance_loss, z_loss=self.router_z_loss)
        return (total + penalty, weight), (carry, {"loss": (loss_sum, weight)} | scalars)

    def log_probabilities(self, model, batch: dict, key, temperature: float = 1.0) -> jax.Array:
        """Return log p of each target, float32 [B, T], 0 where there is none; `key` is that of the dropout."""
        stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"], key=key)
        how = self.num_chunks, model.logit_cap, temperature
        return log_probabilities(*model.head_inputs(stream_BTD), batch["targets"], *how)

    def evaluate(self, model, batch) -> dict:
        """Return the loss without dropout.

        With several parts, each attends to the earlier ones by a key-value cache. The sums equal those of the full
        length except for rounding, with the memory of one part and the cache. A caller's rows may have another length
        than those of training; they have the largest number of parts, up to `heldout_parts`, that divides it.
        """
        rows, length = batch["tokens"].shape
        num_parts = next(count for count in range(self.heldout_parts, 0, -1) if length % count == 0)
        if num_parts == 1:
            return {"loss": self._heldout(model, batch, None, 1)[0]}

        def body(carry, part):
            cache, sums = carry
            of_part, cache = self._heldout(model, part, cache, num_parts)
            return (cache, jax.tree.map(jnp.add, sums, of_part)), None

        parts = {name: jnp.moveaxis(array.reshape(rows, num_parts, -1), 1, 0) for name, array in batch.items()}
        start = model.empty_cache(rows, length), (jnp.float32(0), jnp.float32(0))
        (_, sums), _ = jax.lax.scan(body, start, parts)
        return {"loss": sums}

    def _chunks_of_part(self, length: int, parts: int) -> int:
        """Return the number of chunks of one of `parts` parts; at most as many logits exist at once as in training."""
        return next((n for n in range(1, length) if length % n == 0 and n * parts >= self.num_chunks), length)

    def _heldout(self, model, batch, cache: dict | None, num_parts: int) -> tuple[tuple, dict | None]:
        """Return ((sum of losses, their weight), the cache with this part of the sequences in it)."""
        stream_BTD, cache = model(batch["tokens"], batch["positions"], batch["segments"], cache)
        weights_BT = loss_mask(batch)
        chunks = self._chunks_of_part(weights_BT.shape[1], num_parts)
        _, loss_sum = cross_entropy(
            *model.head_inputs(stream_BTD), batch["targets"], weights_BT, chunks, logit_cap=model.logit_cap
        )
        return (loss_sum, weights_BT.sum()), cache

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts of the loss."""
        return "loss", f"{figures['loss']:.4f} nats a token", "tokens"
