# SPDX-License-Identifier: Apache-2.0
"""Group-relative policy optimization from verifiable rewards (GRPO, arXiv:2402.03300, equations 3 and 4).

Before each step, `reasoning/rollouts.py` draws `group_size` answers to each prompt from the model that is trained, and
rewards them. The advantage of an answer is its reward minus the mean of its group, divided by the deviation of the
group unless `advantage` is "mean" (Dr. GRPO, arXiv:2503.20783). The loss of a token is

    -min(r A, clip(r, 1 - clip, 1 + clip_high) A) + kl (exp(q - p) - (q - p) - 1)

with r the ratio of the token's probability to that when it was drawn, and the log-probabilities p of the model and q of
the reference. All are at the temperature of the draws, since the model at this temperature is the policy. The ratio r
corrects for earlier updates on the same answers, if there are several (`steps_of_batch`). A larger `clip_high`
leaves room to unlikely tokens (DAPO, arXiv:2503.14476). `average` is "token", the mean over all tokens, or "sequence",
the mean over answers of the mean over their tokens.
"""

import dataclasses

import jax
import jax.numpy as jnp

from layers.sequence_parallel import psum_sequence, sequence_shards
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, loss_mask
from objectives.objective import FrozenModel, Sampled, bits_of, numbers_of
from reasoning import rollouts

MOST_CHANGE = 20.0  # of a log probability; beyond it the gradient is 0, where that of exp would overflow


def make(config) -> "GRPO":
    """Return the objective of a configuration."""
    grpo = config.grpo
    return GRPO(
        **vars(language_modeling.make(config)), clip=grpo.clip, clip_high=grpo.clip_high or grpo.clip, kl=grpo.kl,
        average=grpo.average, steps_of_batch=grpo.updates, temperature=grpo.temperature, sampler=rollouts.Sampler(
            source=config.data.source, path=config.data.path, tokenizer=config.data.tokenizer,
            group_size=grpo.group_size, temperature=grpo.temperature, divides=grpo.advantage == "deviation",
            reward=grpo.reward,
        ),
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class GRPO(LanguageModeling):
    """The GRPO loss on sampled answers. Held-out rows are judged as in next-token prediction."""

    clip: float = 0.2
    clip_high: float = 0.2
    kl: float = 0.0
    average: str = "token"
    steps_of_batch: int = 1
    temperature: float = 1.0
    sampler: rollouts.Sampler | None = None
    progress = ("reward",)

    def check_to_train(self) -> None:
        """Raise ConfigError if no recipe registered the reward."""
        self.sampler.check_reward()

    def notes(self, config) -> list[str]:
        """Say how few rows are asked, and that random weights draw the first answers if no run is named."""
        found, rows, grpo = [], config.train.global_batch, config.grpo
        if not config.train.init_from:
            found.append("Note: answers of random weights have no reward to learn from; train.init_from names a run")
        if config.data.source == "chat" and (share := grpo.group_size * grpo.updates) > 1:
            found.append(
                f"Note: one in {share} rows of an epoch is asked, and of it the first conversation: {rows} rows are "
                f"{rows // grpo.group_size} prompts with {grpo.group_size} answers each, for {grpo.updates} "
                f"step{'s' * (grpo.updates > 1)}"
            )
        return found

    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """Return the reference, the model that the run starts from, if the loss has a KL term."""
        return (FrozenModel("reference", "train.init_from"),) if self.kl else ()

    def batch(self) -> dict[str, tuple]:
        """Return the shapes of a batch; the last three have the bits of float32 numbers."""
        of_rows = dict.fromkeys(("advantages", "rewards"), (self.rows,))
        return super().batch() | of_rows | {"old_log_probs": (self.rows, self.length)}

    def random_batch(self, key) -> dict[str, jax.Array]:
        """Return random rows with random advantages, in the middle of the clipping range."""
        batch = super().random_batch(key)
        advantages_B = jax.random.normal(key, (self.rows,))
        uniform_BT = jnp.full(batch["tokens"].shape, -jnp.log(self.vocab_size))
        numbers = {"advantages": advantages_B, "rewards": advantages_B, "old_log_probs": uniform_BT}
        return batch | {name: bits_of(array) for name, array in numbers.items()}

    def sample_batch(self, engine, batch, key) -> Sampled:
        """Return answers of the model to the prompts of `batch`, with their advantages."""
        return Sampled(*self.sampler.sample(engine, batch, key))

    def decoded(self) -> tuple[int, int]:
        """Return the size of the cache of a rollout."""
        return min(self.rows, rollouts.MOST_ROWS), rollouts.tokens_of_row(self.length)

    def loss(self, model, carry, batch, key, *, reference=None):
        """Return the loss; `key` is that of the model's dropout."""
        weights_BT = loss_mask(batch)
        p_BT = self.log_probabilities(model, batch, key, self.temperature)
        change_BT = jnp.where(weights_BT > 0, p_BT - numbers_of(batch["old_log_probs"]), 0)
        ratio_BT = jnp.exp(jnp.minimum(change_BT, MOST_CHANGE))
        advantages_B1 = numbers_of(batch["advantages"])[:, None]
        clipped_BT = jnp.clip(ratio_BT, 1 - self.clip, 1 + self.clip_high)
        loss_BT = -jnp.minimum(ratio_BT * advantages_B1, clipped_BT * advantages_B1)
        if self.kl:
            q_BT = self.log_probabilities(reference, batch, None, self.temperature)
            behind_BT = jax.lax.stop_gradient(q_BT) - p_BT
            behind_BT = jnp.where(weights_BT > 0, jnp.minimum(behind_BT, MOST_CHANGE), 0)
            divergence_BT = jnp.exp(behind_BT) - behind_BT - 1
            loss_BT += self.kl * divergence_BT
        share_BT = self._shares(weights_BT)
        total, weight = jnp.sum(loss_BT * share_BT), share_BT.sum()
        rows_B = (psum_sequence(weights_BT.sum(axis=1)) > 0) / sequence_shards()
        scalars = {
            "loss": (total, weight),
            "reward": (jnp.sum(rows_B * numbers_of(batch["rewards"])), rows_B.sum()),
            "mismatch": (jnp.sum(jnp.abs(change_BT) * weights_BT), weights_BT.sum()),
            "clipped": (jnp.sum((ratio_BT != clipped_BT) * weights_BT), weights_BT.sum()),
            "tokens": (weights_BT.sum(), jnp.float32(0)),
        }
        if self.kl:
            scalars["kl"] = (jnp.sum(divergence_BT * weights_BT), weights_BT.sum())
        return (total, weight), (carry, jax.lax.stop_gradient(scalars))

    def _shares(self, weights_BT: jax.Array) -> jax.Array:
        """Return the weight of each token in the loss."""
        if self.average == "token":
            return weights_BT
        counts_B1 = psum_sequence(weights_BT.sum(axis=1, keepdims=True))
        return weights_BT / jnp.maximum(counts_B1, 1)
