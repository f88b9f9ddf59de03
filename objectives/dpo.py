# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation: of two answers the chosen one becomes likelier than under a frozen reference.

arXiv:2305.18290, equation 7: the mean over pairs of -log sigmoid(beta * (log ratio of what is chosen - log ratio of
what is rejected)), a log ratio being log p(answer | prompt) of the model less that of the reference, and beta times it
an answer's reward. A row is a pair: segment 1 is the prompt with the chosen answer, segment 2 with the rejected one,
and the targets that count are the answer's. The loss takes the reference as one more argument, as distillation its
teacher.
"""

import dataclasses

import jax
import jax.numpy as jnp

from layers.cross_entropy import log_probabilities
from layers.sequence_parallel import psum_sequence, sequence_shards
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, weights

SIDES = (1, 2)  # segments: chosen, rejected


def make(config, *, num_chunks: int, teacher) -> "DPO":
    """Return the objective of a configuration; see objectives/language_modeling.py for what it has.

    Args:
      teacher: the `model` section of the reference's configuration.
    """
    return DPO(**vars(language_modeling.make(config, num_chunks=num_chunks)), beta=config.preference.beta)


@dataclasses.dataclass(frozen=True)
class DPO(LanguageModeling):
    """A pair of which an answer has no token left, all having been cut off, weighs 0."""

    beta: float = 0.1

    def random_batch(self, key) -> dict[str, jax.Array]:
        """Pairs of answers without a prompt."""
        batch = super().random_batch(key)
        place_BT = jnp.broadcast_to(jnp.arange(self.length), batch["tokens"].shape)
        half = self.length // 2
        segments_BT = jnp.where(place_BT < half, *SIDES)
        return batch | {"segments": segments_BT, "positions": jnp.where(segments_BT == 1, place_BT, place_BT - half)}

    def loss(self, model, carry, batch, key, reference):
        """The key is of the model's dropout; the reference has none, and no gradient."""
        log_ratios = self._log_probabilities(model, batch, key) - jax.lax.stop_gradient(
            self._log_probabilities(reference, batch, None)
        )
        margin_B = self.beta * (log_ratios[0] - log_ratios[1])
        counts_B = jnp.all(_of_sides(batch, weights(batch)) > 0, axis=0).astype(jnp.float32) / sequence_shards()
        of_pairs = {"loss": jax.nn.softplus(-margin_B), "accuracy": (1 + jnp.sign(margin_B)) / 2, "margin": margin_B}
        scalars = {name: (jnp.sum(counts_B * of_pair), counts_B.sum()) for name, of_pair in of_pairs.items()}
        told = jax.lax.stop_gradient(scalars | {"tokens": (weights(batch).sum(), jnp.float32(0))})
        return scalars["loss"], (carry, told)

    def evaluate(self, model, batch, reference) -> dict:
        """The loss, the share of pairs whose chosen answer has the higher reward (a tie is half), and by how much."""
        _, (_, scalars) = self.loss(model, {}, batch, None, reference)
        return {name: scalars[name] for name in ("loss", "accuracy", "margin")}

    def told(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """The loss and the accuracy."""
        loss, accuracy, margin = (figures[name] for name in ("loss", "accuracy", "margin"))
        return "loss", f"{loss:.4f} a pair, accuracy {accuracy:.2%}, margin {margin:.3f}", "pairs"

    def _log_probabilities(self, model, batch: dict, key) -> jax.Array:
        """Return log p(answer | prompt) of what is chosen and of what is rejected: float32 [2, B]."""
        stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"], key=key)
        log_p_BT = log_probabilities(*model.head_inputs(stream_BTD), batch["targets"], self.num_chunks, model.logit_cap)
        return _of_sides(batch, log_p_BT)


def _of_sides(batch: dict, of_token_BT: jax.Array) -> jax.Array:
    """Return sums over the tokens of each side, those of all devices that share a row: [2, B]."""
    sides = [jnp.sum(of_token_BT * (batch["segments"] == side), axis=1) for side in SIDES]
    return psum_sequence(jnp.stack(sides))
