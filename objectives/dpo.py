# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation with a frozen reference (arXiv:2305.18290, equation 7).

The loss is the mean over pairs of -log sigmoid(beta * (chosen log ratio - rejected log ratio)). A log ratio is log
p(answer | prompt) of the model minus that of the reference; beta times it is the reward of an answer. A row is a pair:
segment 1 is the prompt with the chosen answer, segment 2 the prompt with the rejected one. Only targets of answers are
unmasked.
"""

import dataclasses

import jax
import jax.numpy as jnp

from layers.sequence_parallel import psum_sequence, sequence_shards
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, loss_mask
from objectives.objective import FrozenModel

SIDES = (1, 2)  # segments: chosen, rejected


def make(config) -> "DPO":
    """Return the objective of a configuration."""
    return DPO(**vars(language_modeling.make(config)), beta=config.preference.beta)


@dataclasses.dataclass(frozen=True)
class DPO(LanguageModeling):
    """The DPO loss. A pair with an answer that was cut off completely has weight 0."""

    beta: float = 0.1

    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """Return the reference: the model that the run starts from."""
        return (FrozenModel("reference", "train.init_from", evaluates=True),)

    def random_batch(self, key) -> dict[str, jax.Array]:
        """Return random pairs of answers without a prompt."""
        batch = super().random_batch(key)
        place_BT = jnp.broadcast_to(jnp.arange(self.length), batch["tokens"].shape)
        half = self.length // 2
        segments_BT = jnp.where(place_BT < half, *SIDES)
        return batch | {"segments": segments_BT, "positions": jnp.where(segments_BT == 1, place_BT, place_BT - half)}

    def loss(self, model, carry, batch, key, *, reference):
        """Return the loss; `key` is that of the model's dropout. The reference has no dropout and no gradient."""
        of_model = _of_sides(batch, self.log_probabilities(model, batch, key))
        of_reference = _of_sides(batch, self.log_probabilities(reference, batch, None))
        log_ratios = of_model - jax.lax.stop_gradient(of_reference)
        margin_B = self.beta * (log_ratios[0] - log_ratios[1])
        counts_B = jnp.all(_of_sides(batch, loss_mask(batch)) > 0, axis=0).astype(jnp.float32) / sequence_shards()
        of_pairs = {"loss": jax.nn.softplus(-margin_B), "accuracy": (1 + jnp.sign(margin_B)) / 2, "margin": margin_B}
        scalars = {name: (jnp.sum(counts_B * of_pair), counts_B.sum()) for name, of_pair in of_pairs.items()}
        reported = jax.lax.stop_gradient(scalars | {"tokens": (loss_mask(batch).sum(), jnp.float32(0))})
        return scalars["loss"], (carry, reported)

    def evaluate(self, model, batch, *, reference) -> dict:
        """Return loss, accuracy (the fraction of pairs with a higher chosen reward; a tie is half), and margin."""
        _, (_, scalars) = self.loss(model, {}, batch, None, reference=reference)
        return {name: scalars[name] for name in ("loss", "accuracy", "margin")}

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts of loss, accuracy and margin."""
        loss, accuracy, margin = (figures[name] for name in ("loss", "accuracy", "margin"))
        return "loss", f"{loss:.4f} a pair, accuracy {accuracy:.2%}, margin {margin:.3f}", "pairs"


def _of_sides(batch: dict, of_token_BT: jax.Array) -> jax.Array:
    """Return sums over the tokens of each side, all-reduced over the devices that share a sequence: [2, B]."""
    sides = [jnp.sum(of_token_BT * (batch["segments"] == side), axis=1) for side in SIDES]
    return psum_sequence(jnp.stack(sides))
