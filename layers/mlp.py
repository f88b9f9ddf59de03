# SPDX-License-Identifier: Apache-2.0
"""SwiGLU feed-forward: (silu(x W_gate) * x W_up) W_down (arXiv:2002.05202, equation 6). D embed, F mlp.

With `biased`, each of the three products has a bias. With gelu in place of silu this is GEGLU.
"""

import functools
from collections.abc import Callable

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from layers import taps
from layers.adapters import Projections
from layers.axes import constrain, weight, zeros
from layers.products import add_bias
from layers.sequence_parallel import all_gather_sequence, reduce_scatter_sequence

SILU_PRODUCT_SQUARE = 0.355  # mean of (silu(g) * u)^2 for g and u of a unit normal distribution
ACTIVATIONS = {  # activation of the gate, and this mean for it
    "silu": (jax.nn.silu, SILU_PRODUCT_SQUARE),
    "gelu_tanh": (functools.partial(jax.nn.gelu, approximate=True), 0.425),
}


class SwiGLU(Projections):
    """Gated feed-forward over the last dimension, or over the dimension in the einsum specs of a subclass.

    Args:
      quantization, out_scale, declare: as in layers/attention/attention.py.
      over: name of the input and output dimension.
      activation: of the gate, a key of ACTIVATIONS.
    """

    INTO, OUT = "BTD,DF->BTF", "BTF,FD->BTD"
    HIDDEN = ("batch", "length", "mlp")

    def __init__(
        self, *, embed_dim: int, mlp_dim: int, biased: bool, quantization: str, out_scale: float, rngs: nnx.Rngs,
        declare: Callable = weight, over: str = "embed", activation: str = "silu",
    ):  # fmt: skip
        super().__init__(quantization)
        self.activate, square = ACTIVATIONS[activation]
        self.gate = declare(rngs, (embed_dim, mlp_dim), (over, "mlp"), embed_dim**-0.5)
        self.up = declare(rngs, (embed_dim, mlp_dim), (over, "mlp"), embed_dim**-0.5)
        down = out_scale * (square * mlp_dim) ** -0.5
        self.down = declare(rngs, (mlp_dim, embed_dim), ("mlp", over), down)
        self.gate_bias = zeros((mlp_dim,), ("mlp",)) if biased else None
        self.up_bias = zeros((mlp_dim,), ("mlp",)) if biased else None
        self.down_bias = zeros((embed_dim,), ("act_embed",)) if biased else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return an array like `x`, [B, T, D]."""
        x = all_gather_sequence(x)
        gate = checkpoint_name(add_bias(self.einsum(self.INTO, x, "gate"), self.gate_bias), "gate")
        up = checkpoint_name(add_bias(self.einsum(self.INTO, x, "up"), self.up_bias), "up")
        hidden = taps.tap("mlp_hidden", constrain(self.hidden(self.activate(gate) * up), *self.HIDDEN))
        return add_bias(reduce_scatter_sequence(self.einsum(self.OUT, hidden, "down")), self.down_bias)

    def hidden(self, gated: jax.Array) -> jax.Array:
        """Return the hidden units from the gated products; a subclass may act on them."""
        return gated
