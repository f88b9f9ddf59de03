# SPDX-License-Identifier: Apache-2.0
"""Learn to find and repair the wrong tokens of a draft, from correct text that is corrupted.

A share of the targets is replaced by tokens drawn from the batch, and so by their frequency. The model reads the
corrupted text like any other. The module of layers/error_corrector.py predicts which tokens were replaced and what they
were. Its loss is -log p(right text | draft) in nats a token: -log(1 - p) for a right token, -log p - log c(target) for
a wrong one. With a mixture density, MIXTURE_WEIGHT times its negative log-likelihood of the right token's point is
added at wrong tokens.

The module alone is trained, on the frozen model of `train.init_from`. With `joint_weight`, all weights are trained,
with the model's own loss on the correct text plus this weight times the loss of the module.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from layers.adapters import freeze
from layers.error_corrector import ErrorCorrector, Findings, Sizes, points_of
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, weights

MIXTURE_WEIGHT = 0.1
CORRECTOR = "corrector"  # attribute of the model that holds the module
BINS = 10  # of the probability that a token is wrong, for the calibration


def make(config) -> "ErrorCorrection":
    """Return the objective of a configuration."""
    keys, model = config.error_correction, config.model
    sizes = Sizes(
        keys.num_layers, model.embed_dim, model.num_heads, model.num_kv_heads,
        model.head_dim or model.embed_dim // model.num_heads, model.mlp_dim, model.norm_epsilon, model.rope_theta,
    )  # fmt: skip
    return ErrorCorrection(
        **vars(language_modeling.make(config)), sizes=sizes, use_mixture=keys.use_mixture_density,
        saves_memory=keys.memory_efficient, rate=keys.rate, joint_weight=keys.joint_weight, threshold=keys.threshold,
    )  # fmt: skip


class Draft(NamedTuple):
    """A corrupted batch.

    Attributes:
      tokens_BT: int, what the model reads.
      draft_BT: int, the token of the draft at each target; less than 0 where there is no target.
      wrong_BT: float32, 1 where the draft differs from the target.
      places_BS: int, indices of the targets that were chosen to be replaced, in each row.
      chosen_BS: float32, 1 for those whose token in the draft is wrong.
    """

    tokens_BT: jax.Array
    draft_BT: jax.Array
    wrong_BT: jax.Array
    places_BS: jax.Array
    chosen_BS: jax.Array


def corrupt(batch: dict, key: jax.Array, rate: float) -> Draft:
    """Replace a share of the unmasked targets of each row by random targets of the batch.

    A drawn token may be the right one; then it is not wrong.
    """
    of_places, of_draws = jax.random.split(key)
    targets_BT, weights_BT = batch["targets"], weights(batch)
    rows, length = targets_BT.shape
    most = max(1, round(rate * length))
    order_BT = jax.random.uniform(of_places, targets_BT.shape) + weights_BT  # masked ones last
    places_BS = jax.lax.top_k(order_BT, most)[1]
    counts_B = jnp.round(rate * weights_BT.sum(axis=1))
    taken_BS = (jnp.arange(most) < counts_B[:, None]) & (jnp.take_along_axis(weights_BT, places_BS, axis=1) > 0)
    share = weights_BT.reshape(-1) / jnp.maximum(weights_BT.sum(), 1)
    drawn_BS = targets_BT.reshape(-1)[jax.random.choice(of_draws, rows * length, places_BS.shape, p=share)]
    new_BS = jnp.where(taken_BS, drawn_BS, jnp.take_along_axis(targets_BT, places_BS, axis=1))
    row_B1 = jnp.arange(rows)[:, None]
    draft_BT = targets_BT.at[row_B1, places_BS].set(new_BS)
    wrong_BT = ((draft_BT != targets_BT) & (weights_BT > 0)).astype(jnp.float32)
    # The token after a target is that target, unless another document begins there.
    before_BT = jnp.roll(draft_BT, 1, axis=1)
    replaced_BT = jnp.roll(wrong_BT, 1, axis=1) * (batch["positions"] > 0) * (jnp.arange(length) > 0)
    tokens_BT = jnp.where(replaced_BT > 0, before_BT, batch["tokens"])
    return Draft(tokens_BT, draft_BT, wrong_BT, places_BS, jnp.take_along_axis(wrong_BT, places_BS, axis=1))


@dataclasses.dataclass(frozen=True)
class ErrorCorrection(LanguageModeling):
    """The loss of the module; `loss` is -log p(right text | draft), in nats a token.

    Attributes:
      sizes: of the module.
      use_mixture, saves_memory: see `ErrorCorrector`.
      rate: share of the targets that are replaced.
      joint_weight: weight of this loss beside the model's own; 0: the model is frozen.
      threshold: confidence from which a revision counts in evaluation.
    """

    sizes: Sizes | None = None
    use_mixture: bool = False
    saves_memory: bool = False
    rate: float = 0.1
    joint_weight: float = 0.0
    threshold: float = 0.7

    reports_likelihood = False

    @property
    def trainable(self) -> nnx.filterlib.Filter:
        """The module, or all parameters."""
        return nnx.Param if self.joint_weight else nnx.All(nnx.Param, nnx.PathContains(CORRECTOR))

    def transform(self, model: nnx.Module, rngs: nnx.Rngs, **frozen: nnx.Module) -> nnx.Module:
        """Add the module; mark the weights of the model as frozen unless they are trained too."""
        if not self.joint_weight:
            freeze(model)
        corrector = ErrorCorrector(
            self.sizes, scan=model.stack.scan, saves_memory=self.saves_memory, use_mixture=self.use_mixture, rngs=rngs
        )
        setattr(model, CORRECTOR, corrector)
        return model

    def loss(self, model, carry, batch, key):
        """Return the loss; `key` is that of the corruption, and of the dropout of a model that is trained too."""
        of_corruption, of_model = jax.random.split(key)
        draft = corrupt(batch, of_corruption, self.rate)
        found, head_DV = self._examine(model, draft, batch)
        total, scalars = self._losses(model, found, head_DV, draft, batch)
        weight = weights(batch).sum()
        if self.joint_weight:
            (own, _), (_, of_own) = super().loss(model, carry, batch, of_model)
            total = own + self.joint_weight * total
            scalars |= {"language_modeling": of_own.pop("loss")} | of_own
        return (total, weight), (carry, jax.lax.stop_gradient(scalars))

    def evaluate(self, model, batch) -> dict:
        """Return the scalars of held-out rows, corrupted in the same way each time.

        They are the parts of the loss; `restored`, the share of wrong tokens that are revised to the right ones;
        `damaged`, the share of right tokens that are revised; and BINS sums from which `summary` computes the
        calibration.
        """
        key = jax.random.fold_in(jax.random.key(0), batch["tokens"].sum())
        draft = corrupt(batch, key, self.rate)
        found, head_DV = self._examine(model, draft, batch)
        _, scalars = self._losses(model, found, head_DV, draft, batch)
        best_BT, confidence_BT = model.corrector.revisions(
            found, head_DV, draft.draft_BT, num_chunks=self.num_chunks, logit_cap=model.logit_cap
        )
        weights_BT, wrong_BT = weights(batch), draft.wrong_BT
        revised_BT = confidence_BT >= self.threshold
        right_BT = weights_BT - wrong_BT
        repaired_BT = revised_BT & (best_BT == batch["targets"])
        scalars |= {
            "restored": (jnp.sum(wrong_BT * repaired_BT), wrong_BT.sum()),
            "damaged": (jnp.sum(right_BT * revised_BT), right_BT.sum()),
        }
        p_BT = jax.nn.sigmoid(found.wrong_BT)
        bin_BT = jnp.minimum((BINS * p_BT).astype(jnp.int32), BINS - 1)
        gap_BT = weights_BT * (p_BT - wrong_BT)
        gaps = {_bin(n): (jnp.sum(gap_BT * (bin_BT == n)), weights_BT.sum()) for n in range(BINS)}
        return scalars | gaps

    def summary(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the means with the expected calibration error in place of the bins (arXiv:1706.04599, equation 3)."""
        bins = {_bin(n) for n in range(BINS)}
        kept = {name: value for name, value in figures.items() if name not in bins}
        return kept | {"calibration_error": sum(abs(figures[name]) for name in bins)}

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts of all figures."""
        shares = ", ".join(f"{name} {figures[name]:.2%}" for name in ("restored", "damaged"))
        return (
            "correction loss",
            f"{figures['loss']:.4f} nats a token, {shares}, calibration error {figures['calibration_error']:.4f}",
            "tokens",
        )

    def _examine(self, model, draft: Draft, batch: dict) -> tuple[Findings, jax.Array]:
        """Return what the module finds in a draft, and the head."""
        stream_BTD, _ = model(draft.tokens_BT, batch["positions"], batch["segments"])
        stream_BTD, head_DV = model.head_inputs(stream_BTD)
        embedded_BTD = model.embed(jnp.maximum(draft.draft_BT, 0), model.dtype)
        found = model.corrector(
            stream_BTD, head_DV, embedded_BTD, draft.draft_BT, batch["positions"], batch["segments"],
            num_chunks=self.num_chunks, logit_cap=model.logit_cap,
        )  # fmt: skip
        return found, head_DV

    def _losses(self, model, found: Findings, head_DV, draft: Draft, batch: dict) -> tuple[jax.Array, dict]:
        """Return (the sum that is minimised, scalars)."""

        def at(values_BTX: jax.Array) -> jax.Array:
            places = draft.places_BS.reshape(*draft.places_BS.shape, *[1] * (values_BTX.ndim - 2))
            return jnp.take_along_axis(values_BTX, places, axis=1)

        weight, wrong_BT, chosen_BS = weights(batch).sum(), draft.wrong_BT, draft.chosen_BS
        sign_BT = 2 * wrong_BT - 1
        detection = jnp.sum(weights(batch) * jax.nn.softplus(-sign_BT * found.wrong_BT))
        targets_BS = jnp.maximum(at(batch["targets"]), 0)
        log_c_BSV, mixture = model.corrector.log_corrections(
            at(found.states_BTD), at(found.hidden_BTD), head_DV, at(draft.draft_BT), model.logit_cap
        )
        log_c_BS = jnp.take_along_axis(log_c_BSV, targets_BS[..., None], axis=-1)[..., 0]
        correction = -jnp.sum(jnp.where(chosen_BS > 0, log_c_BS, 0))
        total = detection + correction
        scalars = {
            "loss": (total, weight), "detection": (detection, weight), "correction": (correction, chosen_BS.sum())
        }  # fmt: skip
        if mixture:
            points_BSP = points_of(head_DV)[targets_BS]
            surprise = -jnp.sum(chosen_BS * mixture.log_density(points_BSP))
            total += MIXTURE_WEIGHT * surprise
            scalars["mixture_nll"] = surprise, chosen_BS.sum()
        return total, scalars


def _bin(number: int) -> str:
    return f"calibration_bin_{number}"
