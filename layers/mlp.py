# SPDX-License-Identifier: Apache-2.0
"""SwiGLU feed-forward: (silu(x W_gate) * x W_up) W_down (arXiv:2002.05202, equation 6). D embed, F mlp.

With biases, one is added to each of the three products.
"""

import functools

import jax
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from layers.axes import bias, constrain, weight
from layers.products import plus, project
from layers.stream import closed, opened


class SwiGLU(nnx.Module):
    """Gated feed-forward; `quantization` and `out_scale` as in layers/attention.py."""

    def __init__(
        self, *, embed_dim: int, mlp_dim: int, biased: bool, quantization: str, out_scale: float, rngs: nnx.Rngs
    ):
        self.gate = weight(rngs, (embed_dim, mlp_dim), ("embed", "mlp"), embed_dim**-0.5)
        self.up = weight(rngs, (embed_dim, mlp_dim), ("embed", "mlp"), embed_dim**-0.5)
        # silu(g) * u of unit normals g, u has a mean square of 0.355.
        self.down = weight(rngs, (mlp_dim, embed_dim), ("mlp", "embed"), out_scale * (0.355 * mlp_dim) ** -0.5)
        self.gate_bias = bias((mlp_dim,), ("mlp",)) if biased else None
        self.up_bias = bias((mlp_dim,), ("mlp",)) if biased else None
        self.down_bias = bias((embed_dim,), ("act_embed",)) if biased else None
        self.project = functools.partial(project, quantization=quantization)

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        x_BTD = opened(x_BTD)
        gate_BTF = checkpoint_name(plus(self.project("BTD,DF->BTF", x_BTD, self.gate[...]), self.gate_bias), "gate")
        up_BTF = checkpoint_name(plus(self.project("BTD,DF->BTF", x_BTD, self.up[...]), self.up_bias), "up")
        hidden_BTF = constrain(jax.nn.silu(gate_BTF) * up_BTF, "batch", "length", "mlp")
        return plus(closed(self.project("BTF,FD->BTD", hidden_BTF, self.down[...])), self.down_bias)
