# SPDX-License-Identifier: Apache-2.0
"""Learn to find and repair the wrong tokens of a draft, from correct text that is corrupted.

A share of the targets is replaced by tokens drawn from the batch, and so by their frequency. The model reads the
corrupted text like any other. The module of layers/error_corrector.py predicts p, the probability that a token was
replaced, and c, the distribution of the right token. Its loss is, in nats a token, the mean of

    detection, -log p for a wrong token and -log(1 - p) for a right one, plus correction, -log c(right token).

With a mixture density, MIXTURE_WEIGHT times its negative log-likelihood of the right token's point is added.

The module alone is trained, on the frozen model of `train.init_from`. With `joint_weight`, all weights are trained,
with the model's own loss on the correct text plus this weight times the loss of the module.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from layers.adapters import freeze
from layers.cross_entropy import cross_entropy
from layers.error_corrector import ErrorCorrector, Findings, Sizes, fill_gaps, points_of
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, loss_mask

MIXTURE_WEIGHT = 0.1
CORRECTOR = "corrector"  # attribute of the model that holds the module
BINS = 10  # of the probability that a token is wrong, for the calibration


def make(config) -> "ErrorCorrection":
    """Return the objective of a configuration."""
    keys, model = config.error_correction, config.model
    sizes = Sizes(
        num_layers=keys.num_layers, embed_dim=model.embed_dim, num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads, head_dim=model.head_dim or model.embed_dim // model.num_heads,
        mlp_dim=model.mlp_dim, epsilon=model.norm_epsilon, rope_theta=model.rope_theta,
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
    """

    tokens_BT: jax.Array
    draft_BT: jax.Array
    wrong_BT: jax.Array


def corrupt(batch: dict, key: jax.Array, rate: float) -> Draft:
    """Replace each unmasked target with probability `rate` by a random unmasked target of the batch.

    A drawn token may be the right one; then it is not wrong.
    """
    of_places, of_draws = jax.random.split(key)
    targets_BT, weights_BT = batch["targets"], loss_mask(batch)
    counts_S = jnp.cumsum(weights_BT.reshape(-1) > 0)  # whole numbers: sums of shares would not rise at every place
    number_BT = jax.random.randint(of_draws, targets_BT.shape, 1, counts_S[-1] + 1)
    drawn_BT = targets_BT.reshape(-1)[jnp.searchsorted(counts_S, number_BT)]
    chosen_BT = jax.random.bernoulli(of_places, rate, targets_BT.shape) & (weights_BT > 0)
    draft_BT = jnp.where(chosen_BT, drawn_BT, targets_BT)
    wrong_BT = draft_BT != targets_BT
    # A token that is read is the target before it, unless a document begins there.
    follows_BT = (batch["positions"] > 0) & (jnp.arange(targets_BT.shape[1]) > 0)
    replaced_BT = jnp.roll(wrong_BT, 1, axis=1) & follows_BT
    tokens_BT = jnp.where(replaced_BT, jnp.roll(draft_BT, 1, axis=1), batch["tokens"])
    return Draft(tokens_BT, draft_BT, wrong_BT.astype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class ErrorCorrection(LanguageModeling):
    """The loss of the module.

    Attributes:
      sizes: of the module.
      use_mixture, saves_memory: see `ErrorCorrector`.
      rate: share of the targets that are replaced.
      joint_weight: weight of this loss relative to the model's own; 0: the model is frozen.
      threshold: confidence from which evaluation revises a token.
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

    def flops_per_token(self, of_model: Callable[..., float], *, frozen: bool) -> float:
        """Return those of the module, and of the model: a forward pass if it is frozen, else two training passes."""
        sizes, heads_dim = self.sizes, self.sizes.num_heads * self.sizes.head_dim
        mlp = 3 * sizes.embed_dim * sizes.mlp_dim
        layer = sizes.embed_dim * 2 * (heads_dim + sizes.num_kv_heads * sizes.head_dim) + mlp
        weights = sizes.num_layers * layer + mlp + 5 * sizes.embed_dim**2
        attention = 12.0 * sizes.num_layers * heads_dim * self.length / 2
        of_head = (4.0 if frozen else 6.0) * sizes.embed_dim * self.vocab_size
        return (of_model() / 3 if frozen else 2 * of_model()) + 6.0 * weights + attention + of_head

    def loss(self, model, carry, batch, key):
        """Return the loss; `key` is that of the corruption, and of the dropout of a model that is trained too."""
        of_corruption, of_model = jax.random.split(key)
        draft = corrupt(batch, of_corruption, self.rate)
        found, head_DV = self._examine(model, draft, batch)
        total, scalars = self._losses(found, head_DV, model.logit_cap, draft, batch)
        if self.joint_weight:
            (own, _), (_, of_own) = super().loss(model, carry, batch, of_model)
            total = own + self.joint_weight * total
            scalars |= {"language_modeling": of_own.pop("loss")} | of_own
        return (total, loss_mask(batch).sum()), (carry, jax.lax.stop_gradient(scalars))

    def evaluate(self, model, batch) -> dict:
        """Return the scalars of held-out rows, corrupted in the same way each time.

        They are the parts of the loss; `restored`, the share of wrong tokens that are revised to the right ones;
        `damaged`, the share of right tokens that are revised; and BINS sums from which `summary` computes the
        calibration.
        """
        key = jax.random.fold_in(jax.random.key(0), batch["tokens"].sum())
        draft = corrupt(batch, key, self.rate)
        found, head_DV = self._examine(model, draft, batch)
        _, scalars = self._losses(found, head_DV, model.logit_cap, draft, batch)
        best_BT, confidence_BT = model.corrector.revisions(
            found, head_DV, draft.draft_BT, num_chunks=self.num_chunks, logit_cap=model.logit_cap
        )
        revised_BT = confidence_BT >= self.threshold
        right_BT = loss_mask(batch) - draft.wrong_BT
        repaired_BT = revised_BT & (best_BT == batch["targets"])
        scalars |= {
            "restored": (jnp.sum(draft.wrong_BT * repaired_BT), draft.wrong_BT.sum()),
            "damaged": (jnp.sum(right_BT * revised_BT), right_BT.sum()),
        }
        return scalars | _calibration(found.wrong_BT, draft.wrong_BT, loss_mask(batch))

    def summary(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the means with the expected calibration error in place of the bins (arXiv:1706.04599, equation 3)."""
        bins = {_bin(n) for n in range(BINS)}
        kept = {name: value for name, value in figures.items() if name not in bins}
        return kept | {"calibration_error": sum(abs(figures[name]) for name in bins)}

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts of loss, shares and calibration."""
        shares = ", ".join(f"{name} {figures[name]:.2%}" for name in ("restored", "damaged"))
        error = f"calibration error {figures['calibration_error']:.4f}"
        return "correction loss", f"{figures['loss']:.4f} nats a token, {shares}, {error}", "tokens"

    def _examine(self, model, draft: Draft, batch: dict) -> tuple[Findings, jax.Array]:
        """Return what the module finds in a draft, and the head."""
        stream_BTD, _ = model(draft.tokens_BT, batch["positions"], batch["segments"])
        stream_BTD, head_DV = model.head_inputs(stream_BTD)
        embedded_BTD = model.embed(fill_gaps(draft.draft_BT, draft.tokens_BT), model.dtype)
        found = model.corrector(
            stream_BTD, head_DV, embedded_BTD, draft.draft_BT, batch["positions"], batch["segments"],
            num_chunks=self.num_chunks, logit_cap=model.logit_cap,
        )  # fmt: skip
        return found, head_DV

    def _losses(self, found: Findings, head_DV, logit_cap: float, draft: Draft, batch: dict) -> tuple[jax.Array, dict]:
        """Return (the sum that is minimised, scalars)."""
        targets_BT, weights_BT = jnp.maximum(batch["targets"], 0), loss_mask(batch)
        weight = weights_BT.sum()
        detection = jnp.sum(weights_BT * jax.nn.softplus((1 - 2 * draft.wrong_BT) * found.wrong_BT))
        correction, _ = cross_entropy(
            found.states_BTD, head_DV, targets_BT, weights_BT, self.num_chunks, logit_cap=logit_cap
        )
        total = detection + correction
        scalars = {"loss": (total, weight), "detection": (detection, weight), "correction": (correction, weight)}
        if found.mixture:
            surprise = -jnp.sum(weights_BT * found.mixture.log_density(points_of(head_DV)[targets_BT]))
            total += MIXTURE_WEIGHT * surprise
            scalars["mixture_nll"] = surprise, weight
        return total, scalars


def _calibration(logits_BT: jax.Array, wrong_BT: jax.Array, weights_BT: jax.Array) -> dict[str, tuple]:
    """Return a (sum, weight) pair for each bin of p: the sum of p - wrong over its tokens, and all tokens."""
    p_BT = jax.nn.sigmoid(logits_BT)
    bin_BT = jnp.minimum((BINS * p_BT).astype(jnp.int32), BINS - 1)
    gap_BT = weights_BT * (p_BT - wrong_BT)
    return {_bin(n): (jnp.sum(gap_BT * (bin_BT == n)), weights_BT.sum()) for n in range(BINS)}


def _bin(number: int) -> str:
    return f"calibration_bin_{number}"
