# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts: a router chooses a few SwiGLUs for each token (arXiv:2101.03961; arXiv:2401.06066).

y = shared(x) + sum over the chosen e of gate_e(x) * expert_e(x). Letters: B batch, T length, D embed, F mlp, E experts,
K experts of a token, M tokens of a device, L layers.
"""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from layers import taps
from layers.axes import as_axis_tuple, inside_shard_map, mesh_axes, num_shards, weight, zeros
from layers.experts import dispatch
from layers.mlp import SILU_PRODUCT_SQUARE, SwiGLU

BALANCE = "balance"  # names the dimension of a router's bias, which has its own rule in training/optimizers.py
LOG_SCORES = {"softmax": jax.nn.log_softmax, "sigmoid": jax.nn.log_sigmoid}  # logs: scores can underflow in float32


class Experts(nnx.Module):
    """Feed-forward over the last dimension, by a shared SwiGLU and by the experts that a router chooses.

    Each expert is on one device. Devices along `mesh.expert` and `mesh.model` exchange tokens.

    Args:
      mlp_dim: hidden width of an expert.
      experts_per_token: number of experts that the router chooses for each token, out of `num_experts`.
      shared_experts: width of the shared SwiGLU, in experts; 0: there is none.
      capacity: slots of an expert over its mean load, for each device's tokens; tokens beyond are dropped; 0: no limit.
      router: key of LOG_SCORES: softmax as in Mixtral (arXiv:2401.04088), sigmoid as in DeepSeek-V3 (2412.19437).
      gate_scale: sum of a token's gates. With one expert a token, its gate is its score, as in arXiv:2101.03961.
      out_scale: as in layers/attention/attention.py.
    """

    def __init__(
        self, *, embed_dim: int, mlp_dim: int, num_experts: int, experts_per_token: int, shared_experts: int,
        capacity: float, router: str, gate_scale: float, out_scale: float, rngs: nnx.Rngs,
    ):  # fmt: skip
        # Not sharded: an all-gather would round it to the compute type.
        self.router = weight(rngs, (embed_dim, num_experts), ("norm", "router"), embed_dim**-0.5)
        self.bias = zeros((num_experts,), (BALANCE,))
        # The sharded dimension is never the last: an all-gather along the last one is followed by a transposing copy.
        into, out = ("experts", "expert_embed", "expert_mlp"), ("experts", "expert_hidden", "expert_out")
        self.gate = weight(rngs, (num_experts, embed_dim, mlp_dim), into, embed_dim**-0.5)
        self.up = weight(rngs, (num_experts, embed_dim, mlp_dim), into, embed_dim**-0.5)
        down = out_scale * (SILU_PRODUCT_SQUARE * mlp_dim) ** -0.5
        self.down = weight(rngs, (num_experts, mlp_dim, embed_dim), out, down)
        if shared_experts:
            self.shared = SwiGLU(
                embed_dim=embed_dim, mlp_dim=shared_experts * mlp_dim, biased=False, quantization="none",
                out_scale=out_scale, rngs=rngs,
            )  # fmt: skip
        self.has_shared, self.num_experts, self.experts_per_token = shared_experts > 0, num_experts, experts_per_token
        self.log_scores, self.gate_scale = LOG_SCORES[router], gate_scale
        self.dispatch = dispatch.dropless
        if capacity:
            self.dispatch = functools.partial(dispatch.with_capacity, factor=capacity)

    def __call__(self, x_BTD: jax.Array, valid_BT: jax.Array) -> tuple[jax.Array, dict]:
        """Return (array like `x_BTD`, the statistics that `router_losses` takes).

        Args:
          valid_BT: bool, false for padding, which goes to no expert and counts in no statistic.
        """
        experts_BTK, gates_BTK, figures = self._route(x_BTD, valid_BT)
        y_BTD, dropped_BTK = self._dispatch(x_BTD, experts_BTK, gates_BTK)
        if self.has_shared:
            y_BTD += self.shared(x_BTD)
        return y_BTD, figures | {"dropped": dropped_BTK.mean(axis=-1).sum()}

    def _route(self, x_BTD: jax.Array, valid_BT: jax.Array) -> tuple[jax.Array, jax.Array, dict]:
        """Return (experts, their gates, statistics), computed in float32; an index past the last expert means none.

        The bias changes the choice of experts, but not their gates (arXiv:2408.15664, equation 3).
        """
        K, E = self.experts_per_token, self.num_experts
        x_BTD = x_BTD.astype(jnp.float32)
        logits_BTE = jnp.einsum("BTD,DE->BTE", x_BTD, self.router[...], precision=jax.lax.Precision.HIGHEST)
        log_scores_BTE = self.log_scores(logits_BTE)
        _, experts_BTK = jax.lax.top_k(jax.lax.stop_gradient(jnp.exp(log_scores_BTE) + self.bias[...]), K)
        chosen_BTK = jnp.take_along_axis(log_scores_BTE, experts_BTK, axis=-1)
        gates_BTK = self.gate_scale * jax.nn.softmax(chosen_BTK) if K > 1 else jnp.exp(chosen_BTK)
        experts_BTK = jnp.where(valid_BT[..., None], experts_BTK, E)
        load_E = (experts_BTK[..., None] == jnp.arange(E)).sum(axis=(0, 1, 2), dtype=jnp.float32)
        gates_BTK = _with_balance_gradient(gates_BTK, self.bias[...], load_E)
        log_shares_BTE = jax.nn.log_softmax(log_scores_BTE)
        shares_BTE = jnp.exp(log_shares_BTE)
        figures_BT = {
            "z": jax.nn.logsumexp(logits_BTE, axis=-1) ** 2,
            "entropy": -(shares_BTE * log_shares_BTE).sum(axis=-1),
            "tokens": jnp.ones(valid_BT.shape),
        }
        figures = {name: jnp.where(valid_BT, figure, 0).sum() for name, figure in figures_BT.items()}
        shares_E = jnp.where(valid_BT[..., None], shares_BTE, 0).sum(axis=(0, 1))
        return experts_BTK, gates_BTK, figures | {"shares": shares_E, "load": load_E}

    def _dispatch(self, x_BTD, experts_BTK, gates_BTK) -> tuple[jax.Array, jax.Array]:
        """Return ([B, T, D], bool [B, T, K] of dropped pairs), with tokens sharded over all devices.

        Inside a shard_map each device has its tokens already. Otherwise the tokens are sharded here, padded with tokens
        that go to no expert.
        """
        B, T, D = x_BTD.shape
        M, K = B * T, self.experts_per_token
        tokens, owners = mesh_axes(("tokens",))[0], mesh_axes(("experts",))
        split = not inside_shard_map() and num_shards(tokens) > 1
        more = -M % num_shards(tokens) if split else 0
        x = jnp.pad(x_BTD.reshape(M, D), ((0, more), (0, 0)))
        experts = jnp.pad(experts_BTK.reshape(M, K), ((0, more), (0, 0)), constant_values=self.num_experts).T
        gates = jnp.pad(gates_BTK.reshape(M, K), ((0, more), (0, 0))).T

        def of_device(*arguments):
            with taps.body() as recorded:
                y, dropped = self.dispatch(*arguments)
            others = tuple(axis for axis in as_axis_tuple(tokens) if axis not in as_axis_tuple(owners[0]))
            return y, dropped, jax.lax.psum(recorded, others) if split else recorded

        if split:
            choices = PartitionSpec(None, tokens)
            of_device = jax.shard_map(
                of_device, in_specs=(PartitionSpec(tokens), choices, choices, owners),
                out_specs=(PartitionSpec(tokens), choices, owners), check_vma=False,
            )  # fmt: skip
        y, dropped, recorded = of_device(x, experts, gates, (self.gate[...], self.up[...], self.down[...]))
        taps.add(recorded)
        return y[:M].reshape(B, T, D), dropped.T[:M].reshape(B, T, K)


def router_losses(figures: dict, *, balance_loss: float, z_loss: float) -> tuple[jax.Array | float, dict]:
    """Return (the auxiliary losses of routers, scalars as (sum, weight) pairs) from the statistics of a stack.

    The losses are balance_loss * E * sum of f_e P_e (arXiv:2101.03961, equation 4, with f_e over all choices) and
    z_loss * log(Z)^2 (arXiv:2202.08906, equation 5), each a sum over layers and tokens. f_e and P_e are those of one
    forward pass, so with gradient accumulation the balance loss is the mean over the microbatches.

    The scalars are `expert_load`, [L, E], the fraction of a layer's pairs that each expert gets; its largest and
    smallest entry; `load_violation`, largest load / mean load - 1 in the worst layer; `dropped_share` of the pairs; and
    `router_entropy` in nats. With gradient accumulation all but the first are means over the microbatches, weighted by
    their pairs.

    Args:
      figures: statistics of `Experts`, stacked over layers; {} without experts.
    """
    if not figures:
        return 0.0, {}
    load_LE = figures["load"]
    if inside_shard_map():  # all-reduced once: each layer's own would wait for the all-gathers of its weights
        load_LE = jax.lax.psum(load_LE, as_axis_tuple(mesh_axes(("tokens",))[0]))
    fractions_LE = load_LE / jnp.maximum(load_LE.sum(axis=1, keepdims=True), 1)
    num_experts = load_LE.shape[1]
    penalty = balance_loss * num_experts * (figures["shares"] * fractions_LE).sum() + z_loss * figures["z"].sum()
    tokens, pairs = figures["tokens"].sum(), load_LE.sum()
    scalars = {
        "expert_load": (load_LE, load_LE.sum(axis=1, keepdims=True)),
        "largest_load": (fractions_LE.max() * pairs, pairs),
        "smallest_load": (fractions_LE.min() * pairs, pairs),
        "load_violation": ((fractions_LE.max() * num_experts - 1) * pairs, pairs),
        "dropped_share": (figures["dropped"].sum(), tokens),
        "router_entropy": (figures["entropy"].sum(), tokens),
    }
    return penalty, jax.lax.stop_gradient(scalars)


@jax.custom_vjp
def _with_balance_gradient(gates: jax.Array, bias_E: jax.Array, load_E: jax.Array) -> jax.Array:
    """Return the gates; the gradient of the bias is each expert's load minus the mean load.

    So the load violation is summed over devices and microbatches like any gradient, and the optimizer's rule moves the
    bias against its sign (arXiv:2408.15664, algorithm 1).
    """
    return gates


_with_balance_gradient.defvjp(
    lambda gates, bias_E, load_E: (gates, load_E),
    lambda load_E, gradient: (gradient, load_E - load_E.mean(), jnp.zeros_like(load_E)),
)
