# SPDX-License-Identifier: Apache-2.0
"""A module over the final states of a language model: which tokens of a draft are wrong, and what belongs there.

The model has read the draft from left to right. Its state before a token predicts that token. The module's layers see
the states, the tokens of the draft and features of the logits on both sides. Of each token they predict

- p, the probability that it is wrong;
- c(v), the distribution of the right token if it is wrong: softmax of the model's head on a corrected state.

So the right token is v with probability p c(v), and the draft's with 1 - p. Letters: B batch, T length, S chosen
positions, D embed, V vocabulary.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from layers.attention import MASKED, Attention, attend, soft_cap, through_cache
from layers.axes import weight, zeros
from layers.block import Block, Stack
from layers.cross_entropy import chunks
from layers.fsdp import all_gather_params
from layers.mixture_density import Mixture, MixtureDensity
from layers.mlp import SwiGLU
from layers.normalization import RMSNorm, normalized
from layers.products import einsum, einsum_f32
from layers.rotary import rotary_angles, rotary_frequencies

NUM_FEATURES = 4  # of the logits: entropy, margin, log-probabilities of the draft's token and of the likeliest
COMPONENTS, POINT_DIM = 5, 8  # of the mixture: Gaussians, and numbers of a token's point
LEAST_SCALE = 0.1  # of the mixture; points have unit variance, and less than this between two tokens means nothing
POINTS_KEY = 94  # of the projection of tokens to points, which is the same in every run


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the module: those of the model's blocks, but for the number of layers."""

    num_layers: int
    embed_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    epsilon: float
    rope_theta: float


class Findings(NamedTuple):
    """What the module found in a draft.

    Attributes:
      wrong_BT: float32 logits of the probability that a token is wrong.
      states_BTD: corrected states, for the head.
      hidden_BTD: last states of the module, for the mixture.
    """

    wrong_BT: jax.Array
    states_BTD: jax.Array
    hidden_BTD: jax.Array


class ErrorCorrector(nnx.Module):
    """The module; see above.

    Args:
      scan: see layers/block.py.
      saves_memory: keep only the input of each layer for the backward pass, which computes the layer again. This needs
        a scan on a CPU.
      use_mixture: add a mixture density of the right token's point, see `points_of`. Its log-density times a learned
        factor, at first 0, is added to the logits of c.
    """

    def __init__(self, sizes: Sizes, *, scan: bool, saves_memory: bool, use_mixture: bool, rngs: nnx.Rngs):
        D = sizes.embed_dim
        self.rope = sizes.head_dim, sizes.rope_theta
        self.from_states = weight(rngs, (D, D), ("embed", None), D**-0.5)
        self.from_tokens = weight(rngs, (D, D), ("embed", None), D**-0.5)
        self.from_features = weight(rngs, (NUM_FEATURES, D), (None, "embed"), 1.0)
        self.stack = Stack(
            lambda rngs: _block(sizes, rngs), num_layers=sizes.num_layers, scan=scan or saves_memory,
            remat="full" if saves_memory else "none", rngs=rngs,
        )  # fmt: skip
        self.norm = RMSNorm(D, epsilon=sizes.epsilon)
        self.detect = zeros((D, 1), ("embed", None))
        self.detect_bias = zeros((1,), (None,))
        self.correct = zeros((D, D), ("embed", None))
        if use_mixture:
            self.mixture = MixtureDensity(
                embed_dim=D, out_dim=POINT_DIM, num_components=COMPONENTS, least_scale=LEAST_SCALE, rngs=rngs
            )
            self.mixture_factor = zeros((1,), (None,))
        self.use_mixture = use_mixture

    def __call__(
        self, x_BTD: jax.Array, head_DV: jax.Array, tokens_BTD: jax.Array, draft_BT: jax.Array,
        positions_BT: jax.Array, segments_BT: jax.Array, *, num_chunks: int = 1, logit_cap: float = 0.0,
    ) -> Findings:  # fmt: skip
        """Return what the module finds in a draft.

        Args:
          x_BTD: normalised states of the model; the state at t predicts token t of the draft.
          head_DV: maps them to logits.
          tokens_BTD: embedded draft.
          draft_BT: int; less than 0 where there is no token to judge, and results mean nothing.
          positions_BT, segments_BT: int; the layers see all of a token's own segment.
          num_chunks: divides T; the logits exist one chunk at a time.
        """
        features_BTC = logit_features(x_BTD, head_DV, draft_BT, num_chunks, logit_cap).astype(x_BTD.dtype)
        h_BTD = self._product("BTD,DE->BTE", x_BTD, "from_states")
        h_BTD += self._product("BTD,DE->BTE", normalized(tokens_BTD, 1e-6).astype(x_BTD.dtype), "from_tokens")
        h_BTD += self._product("BTC,CD->BTD", features_BTC, "from_features", (None, "embed"))
        mask_BTS = segments_BT[:, :, None] == segments_BT[:, None, :]
        attends = functools.partial(through_cache, attend)
        angles = rotary_angles(positions_BT, *rotary_frequencies(*self.rope))
        context = angles, jax.tree_util.Partial(attends, mask_BTS=mask_BTS), segments_BT > 0
        h_BTD, *_ = self.stack(h_BTD, [context])
        h_BTD = self.norm(h_BTD)
        wrong_BT1 = self._product("BTD,DE->BTE", h_BTD, "detect").astype(jnp.float32) + self.detect_bias[...]
        states_BTD = x_BTD + self._product("BTD,DE->BTE", h_BTD, "correct")
        return Findings(wrong_BT1[..., 0], states_BTD, h_BTD)

    def log_corrections(
        self, states_BSD: jax.Array, hidden_BSD: jax.Array, head_DV: jax.Array, draft_BS: jax.Array,
        logit_cap: float = 0.0,
    ) -> tuple[jax.Array, Mixture | None]:  # fmt: skip
        """Return (log c of positions, float32 [B, S, V], in which the draft's token has probability 0; the mixture)."""
        logits_BSV = soft_cap(einsum_f32("BSD,DV->BSV", states_BSD, head_DV), logit_cap)
        mixture = None
        if self.use_mixture:
            mixture = self.mixture(hidden_BSD)
            known = jax.lax.stop_gradient(mixture)  # it learns from its own likelihood alone
            logits_BSV += self.mixture_factor[...] * known.log_densities(points_of(head_DV))
        is_draft_BSV = jnp.arange(head_DV.shape[1]) == draft_BS[..., None]
        return jax.nn.log_softmax(jnp.where(is_draft_BSV, MASKED, logits_BSV)), mixture

    def revisions(
        self, found: Findings, head_DV: jax.Array, draft_BT: jax.Array, *, num_chunks: int = 1, logit_cap: float = 0.0,
        allowed_V: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Return (int32 likeliest other token, float32 confidence in it), both [B, T], one chunk of logits at a time.

        The confidence is p c / (p c + 1 - p): of the cases in which a revision repairs or damages, the share that it
        repairs. To revise where it is above a threshold repairs the most for any number of damaged tokens.

        Args:
          allowed_V: bool, the tokens that may be written; None: all.
        """

        def body(_, chunk):
            states_BTD, hidden_BTD, draft_BT = chunk
            log_c_BTV, _ = self.log_corrections(states_BTD, hidden_BTD, head_DV, draft_BT, logit_cap)
            if allowed_V is not None:
                log_c_BTV = jnp.where(allowed_V, log_c_BTV, MASKED)
            return None, (jnp.argmax(log_c_BTV, axis=-1).astype(jnp.int32), jnp.max(log_c_BTV, axis=-1))

        parts = jax.lax.scan(body, None, chunks(num_chunks, found.states_BTD, found.hidden_BTD, draft_BT))[1]
        best_BT, log_c_BT = (_joined(part) for part in parts)
        return best_BT, jax.nn.sigmoid(found.wrong_BT + log_c_BT)

    def _product(self, spec: str, x: jax.Array, name: str, axes: tuple = ("embed", None)) -> jax.Array:
        """Return the einsum of `x` and the weight of this name, which is declared with `axes`, in the type of `x`."""
        return einsum(spec, x, all_gather_params(vars(self)[name][...], axes, x.dtype))


def logit_features(
    x_BTD: jax.Array, head_DV: jax.Array, draft_BT: jax.Array, num_chunks: int = 1, logit_cap: float = 0.0
) -> jax.Array:
    """Return features of the logits at each token, float32 [B, T, NUM_FEATURES], without a gradient.

    They are entropy, difference of the two largest log-probabilities, log-probability of the draft's token, and the
    largest log-probability, each divided by log V.
    """
    x_BTD, head_DV = jax.lax.stop_gradient((x_BTD, head_DV))

    def body(_, chunk):
        x_BTD, draft_BT = chunk
        logits_BTV = soft_cap(einsum_f32("BTD,DV->BTV", x_BTD, head_DV), logit_cap)
        log_p_BTV = jax.nn.log_softmax(logits_BTV)
        entropy_BT = -jnp.sum(jnp.exp(log_p_BTV) * log_p_BTV, axis=-1)
        first_BT = jnp.max(log_p_BTV, axis=-1)
        is_first_BTV = jnp.arange(log_p_BTV.shape[-1]) == jnp.argmax(log_p_BTV, axis=-1)[..., None]
        second_BT = jnp.max(jnp.where(is_first_BTV, MASKED, log_p_BTV), axis=-1)
        of_draft_BT = jnp.take_along_axis(log_p_BTV, jnp.maximum(draft_BT, 0)[..., None], axis=-1)[..., 0]
        return None, jnp.stack([entropy_BT, first_BT - second_BT, of_draft_BT, first_BT], axis=-1)

    features = _joined(jax.lax.scan(body, None, chunks(num_chunks, x_BTD, draft_BT))[1])
    return features / jnp.log(head_DV.shape[1])


def points_of(head_DV: jax.Array) -> jax.Array:
    """Return a point for each token, float32 [V, POINT_DIM], without a gradient.

    It is a random projection of the token's column of the head, with unit variance over the vocabulary. Tokens that
    follow similar texts have similar columns, and so near points (Johnson and Lindenstrauss 1984).
    """
    kernel = jax.random.normal(jax.random.key(POINTS_KEY), (head_DV.shape[0], POINT_DIM))
    points = jnp.matmul(jax.lax.stop_gradient(head_DV).astype(jnp.float32).T, kernel, precision="highest")
    return (points - points.mean(axis=0)) / jnp.maximum(points.std(axis=0), 1e-6)


def _joined(parts: jax.Array) -> jax.Array:
    """Return chunks [num_chunks, B, T / num_chunks, ...] as [B, T, ...], see `chunks` of layers/cross_entropy.py."""
    parts = jnp.moveaxis(parts, 0, 2)
    return parts.reshape(parts.shape[0], -1, *parts.shape[3:])


def _block(sizes: Sizes, rngs: nnx.Rngs) -> Block:
    both = dict(
        embed_dim=sizes.embed_dim, out_scale=(2 * sizes.num_layers) ** -0.5, quantization="none", rngs=rngs
    )  # fmt: skip
    attention = Attention(
        num_heads=sizes.num_heads, num_kv_heads=sizes.num_kv_heads, head_dim=sizes.head_dim, qk_norm=False,
        epsilon=sizes.epsilon, biases="none", **both,
    )  # fmt: skip
    norm = functools.partial(RMSNorm, sizes.embed_dim, epsilon=sizes.epsilon)
    return Block(norm, attention, SwiGLU(mlp_dim=sizes.mlp_dim, biased=False, **both))
