# SPDX-License-Identifier: Apache-2.0
"""A module over the final states of a language model: which tokens of a draft are wrong, and what belongs there.

The model has read the draft from left to right: its state before a token knows the left side. The module's layers read
the draft from right to left. Both sides together predict of each token

- c(v), the distribution of the right token, from both sides without the draft's own token;
- p, the probability that the draft's token is wrong, also from that token and from features of the logits.

No state that predicts a token has seen it. So c learns from every token of a text, not only from the few that are
wrong. If the draft's token is d, the right one is v with probability p c(v) / (1 - c(d)), and d with 1 - p. Letters:
B batch, T length, D embed, V vocabulary, C features.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from layers.attention.attention import MASKED, Attention, attend, soft_cap, through_cache
from layers.attention.rotary import rotary_angles, rotary_frequencies
from layers.axes import weight, zeros
from layers.block import Block, Stack
from layers.cross_entropy import chunks, merged
from layers.fsdp import all_gather_params, all_gather_state
from layers.mixture_density import Mixture, MixtureDensity
from layers.mlp import SwiGLU
from layers.normalization import RMSNorm, normalized
from layers.products import einsum, einsum_f32

NUM_FEATURES = 4  # of logits: entropy, margin, log-probabilities of the draft's token and of the likeliest
COMPONENTS, POINT_DIM = 5, 8  # of the mixture: Gaussians, and numbers of a token's point
LEAST_SCALE = 0.1  # of the mixture; points have unit variance, and less than this between two tokens means nothing
POINTS_KEY = 94  # of the projection of tokens to points, which is the same in every run


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of the module: those of the model's blocks, except for the number of layers."""

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
      wrong_BT: float32 logits of p.
      states_BTD: states that the head maps to the logits of c.
      mixture: density of the right token's point; None without a mixture.
    """

    wrong_BT: jax.Array
    states_BTD: jax.Array
    mixture: Mixture | None


class ErrorCorrector(nnx.Module):
    """The module; see above.

    Args:
      scan: see layers/block.py.
      saves_memory: keep only the input of each layer for the backward pass, which computes the layer again. This needs
        a scan on a CPU.
      use_mixture: add a mixture density of the right token's point, see `points_of`, from both sides like c. Its
        log-density of the draft's token, times a learned factor that begins at 0, is added to the logit of p.
    """

    def __init__(self, sizes: Sizes, *, scan: bool, saves_memory: bool, use_mixture: bool, rngs: nnx.Rngs):
        D = sizes.embed_dim
        self.rope = sizes.head_dim, sizes.rope_theta
        self.from_right = weight(rngs, (D, D), ("embed", "act_embed"), D**-0.5)
        self.stack = Stack(
            lambda rngs: _block(sizes, rngs), num_layers=sizes.num_layers, scan=scan or saves_memory,
            remat="full" if saves_memory else "none", rngs=rngs,
        )  # fmt: skip
        self.from_states = weight(rngs, (D, D), ("embed", "act_embed"), D**-0.5)
        self.joined_norm, self.norm = (RMSNorm(D, epsilon=sizes.epsilon) for _ in range(2))
        self.joined_mlp = SwiGLU(
            embed_dim=D, mlp_dim=sizes.mlp_dim, biased=False, quantization="none", out_scale=1.0, rngs=rngs
        )
        self.correct = zeros((D, D), ("embed", "act_embed"))
        self.from_joined = weight(rngs, (D, D), ("embed", "act_embed"), D**-0.5)
        self.from_tokens = weight(rngs, (D, D), ("embed", "act_embed"), D**-0.5)
        self.from_features = weight(rngs, (2 * NUM_FEATURES, D), (None, "embed"), 1.0)
        self.detect = zeros((D, 1), ("embed", None))
        self.detect_bias = zeros((1,), (None,))
        self.use_mixture = use_mixture
        if use_mixture:
            self.mixture = MixtureDensity(
                embed_dim=D, out_dim=POINT_DIM, num_components=COMPONENTS, least_scale=LEAST_SCALE, rngs=rngs
            )
            self.mixture_factor = zeros((1,), (None,))

    def __call__(
        self, x_BTD: jax.Array, head_DV: jax.Array, tokens_BTD: jax.Array, draft_BT: jax.Array,
        positions_BT: jax.Array, segments_BT: jax.Array, *, num_chunks: int = 1, logit_cap: float = 0.0,
    ) -> Findings:  # fmt: skip
        """Return what the module finds in a draft.

        Args:
          x_BTD: normalised states of the model; the state at t has read the tokens before token t of the draft.
          head_DV: maps them to logits.
          tokens_BTD: embedded draft.
          draft_BT: int; less than 0 where there is no token to judge, and p means nothing.
          positions_BT, segments_BT: int; only tokens of its own segment are read for a token.
          num_chunks: divides T; logits exist one chunk at a time.
        """
        tokens_BTD = normalized(tokens_BTD, 1e-6).astype(x_BTD.dtype)
        joined_BTD = self._joined(x_BTD, tokens_BTD, positions_BT, segments_BT)
        states_BTD = x_BTD + self._product("BTD,DE->BTE", joined_BTD, "correct")
        features = [logit_features(s, head_DV, draft_BT, num_chunks, logit_cap) for s in (x_BTD, states_BTD)]
        hidden_BTD = self._product("BTD,DE->BTE", joined_BTD, "from_joined")
        hidden_BTD += self._product("BTD,DE->BTE", tokens_BTD, "from_tokens")
        features_BTC = jnp.concatenate(features, axis=-1).astype(x_BTD.dtype)
        hidden_BTD += self._product("BTC,CD->BTD", features_BTC, "from_features", (None, "embed"))
        wrong_BT1 = self._product("BTD,DE->BTE", jax.nn.silu(hidden_BTD), "detect").astype(jnp.float32)
        wrong_BT, mixture = (wrong_BT1 + self.detect_bias[...])[..., 0], None
        if self.use_mixture:
            mixture = self.mixture(joined_BTD)
            known = jax.lax.stop_gradient(mixture)  # it learns from its own likelihood alone
            points = points_of(head_DV)[jnp.maximum(draft_BT, 0)]
            wrong_BT += self.mixture_factor[...] * known.log_density(points)
        return Findings(wrong_BT, states_BTD, mixture)

    def _joined(self, x_BTD, tokens_BTD, positions_BT, segments_BT) -> jax.Array:
        """Return what both sides say of each token, without the token itself: [B, T, D]."""
        is_last_BT = segments_BT != jnp.pad(segments_BT[:, 1:], ((0, 0), (0, 1)))
        next_BTD = jnp.pad(tokens_BTD[:, 1:], ((0, 0), (0, 1), (0, 0)))
        next_BTD = jnp.where(is_last_BT[..., None], 0, next_BTD)
        is_later_BTS = positions_BT[:, None, :] >= positions_BT[:, :, None]  # at each place is the token after it
        mask_BTS = (segments_BT[:, :, None] == segments_BT[:, None, :]) & is_later_BTS
        angles = rotary_angles(positions_BT, *rotary_frequencies(*self.rope))
        attends = jax.tree_util.Partial(functools.partial(through_cache, attend), mask_BTS=mask_BTS)
        h_BTD = self._product("BTD,DE->BTE", next_BTD, "from_right")
        h_BTD, *_ = self.stack(h_BTD, [(angles, attends, segments_BT > 0)])
        h_BTD += self._product("BTD,DE->BTE", x_BTD, "from_states")
        graph, state = nnx.split(self.joined_mlp)
        joined_mlp = nnx.merge(graph, all_gather_state(state, x_BTD.dtype))
        return self.norm(h_BTD + joined_mlp(self.joined_norm(h_BTD)))

    def revisions(
        self, found: Findings, head_DV: jax.Array, draft_BT: jax.Array, *, num_chunks: int = 1, logit_cap: float = 0.0,
        allowed_V: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array]:  # fmt: skip
        """Return (int32 likeliest other token v, float32 confidence in it), both [B, T], in chunks as `__call__`.

        With r = c(v) / (1 - c(d)), the confidence is p r / (p r + 1 - p): of the cases in which the revision repairs or
        damages, the share that it repairs. To revise where it is above a threshold repairs the most for any number of
        damaged tokens.

        Args:
          allowed_V: bool, the tokens that may be written; None: all.
        """

        def of_chunk(chunk):
            states_BTD, draft_BT = chunk
            logits_BTV = soft_cap(einsum_f32("BTD,DV->BTV", states_BTD, head_DV), logit_cap)
            is_draft_BTV = jnp.arange(head_DV.shape[1]) == draft_BT[..., None]
            log_r_BTV = jax.nn.log_softmax(jnp.where(is_draft_BTV, MASKED, logits_BTV))
            if allowed_V is not None:
                log_r_BTV = jnp.where(allowed_V, log_r_BTV, MASKED)
            return jnp.argmax(log_r_BTV, axis=-1).astype(jnp.int32), jnp.max(log_r_BTV, axis=-1)

        best_BT, log_r_BT = map(merged, jax.lax.map(of_chunk, chunks(num_chunks, found.states_BTD, draft_BT)))
        return best_BT, jax.nn.sigmoid(found.wrong_BT + log_r_BT)

    def _product(self, spec: str, x: jax.Array, name: str, axes: tuple = ("embed", None)) -> jax.Array:
        """Return the einsum of `x` and the weight of this name, sharded by `axes`, in the type of `x`."""
        return einsum(spec, x, all_gather_params(vars(self)[name][...], axes, x.dtype))


def logit_features(
    x_BTD: jax.Array, head_DV: jax.Array, draft_BT: jax.Array, num_chunks: int, logit_cap: float
) -> jax.Array:
    """Return features of the logits at each token, float32 [B, T, NUM_FEATURES], without a gradient.

    They are entropy, difference of the two largest log-probabilities, log-probability of the draft's token, and the
    largest log-probability, each divided by log V.
    """
    x_BTD, head_DV = jax.lax.stop_gradient((x_BTD, head_DV))

    def of_chunk(chunk):
        x_BTD, draft_BT = chunk
        logits_BTV = soft_cap(einsum_f32("BTD,DV->BTV", x_BTD, head_DV), logit_cap)
        log_p_BTV = jax.nn.log_softmax(logits_BTV)
        entropy_BT = -jnp.sum(jnp.exp(log_p_BTV) * log_p_BTV, axis=-1)
        first_BT = jnp.max(log_p_BTV, axis=-1)
        is_first_BTV = jnp.arange(log_p_BTV.shape[-1]) == jnp.argmax(log_p_BTV, axis=-1)[..., None]
        second_BT = jnp.max(jnp.where(is_first_BTV, MASKED, log_p_BTV), axis=-1)
        of_draft_BT = jnp.take_along_axis(log_p_BTV, jnp.maximum(draft_BT, 0)[..., None], axis=-1)[..., 0]
        return jnp.stack([entropy_BT, first_BT - second_BT, of_draft_BT, first_BT], axis=-1)

    features = merged(jax.lax.map(of_chunk, chunks(num_chunks, x_BTD, draft_BT)))
    return features / jnp.log(head_DV.shape[1])


def points_of(head_DV: jax.Array) -> jax.Array:
    """Return a point for each token, float32 [V, POINT_DIM], without a gradient.

    It is a random projection of the token's column of the head, with unit variance over the vocabulary. Tokens that
    follow similar texts have similar columns, and so near points (Johnson and Lindenstrauss 1984).
    """
    kernel = jax.random.normal(jax.random.key(POINTS_KEY), (head_DV.shape[0], POINT_DIM))
    points = jnp.matmul(jax.lax.stop_gradient(head_DV).astype(jnp.float32).T, kernel, precision="highest")
    return (points - points.mean(axis=0)) / jnp.maximum(points.std(axis=0), 1e-6)


def fill_gaps(draft_BT: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Return the draft; where it has no token (less than 0), the next input token, and 0 at the end."""
    return jnp.where(draft_BT >= 0, draft_BT, jnp.pad(tokens_BT[:, 1:], ((0, 0), (0, 1))))


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
