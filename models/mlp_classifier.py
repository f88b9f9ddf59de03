# SPDX-License-Identifier: Apache-2.0
"""A plain multilayer perceptron that classifies vectors of integers, such as the pixels of an image.

x_0 = inputs / (levels - 1); x_n = relu(x_(n-1) W_n + b_n); logits = x_L W + b. The weights of hidden layers start with
variance 2 / inputs (arXiv:1502.01852, equation 10). Letters: B rows, T integers of a row, F mlp, C classes.
"""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from layers import taps
from layers.axes import weight, zeros
from layers.fsdp import all_gather_params
from layers.products import add_bias, einsum
from layers.units import Units

AXES = ("embed", None)  # of all matrices


def widths(config) -> list[int]:
    """Return the widths of the input, the hidden layers and the output."""
    return [config.max_length, *[config.mlp_dim] * config.num_layers, config.vocab_size]


def flops_per_token(config, length: int) -> float:
    """Return floating-point operations to train on one integer of a row: 6 per weight, over the integers of a row."""
    return 6.0 * sum(inputs * outputs for inputs, outputs in itertools.pairwise(widths(config))) / length


def hidden_units(config) -> tuple[Units, ...]:
    """Return the hidden units of each layer."""
    paths = [("layers", str(layer)) for layer in range(config.num_layers + 1)]
    return tuple(
        Units(
            tap="mlp_hidden", axes=("layers", None), outgoing=((*after, "kernel"), 1), incoming={(*path, "kernel"): 0},
            biases=((*path, "bias"),), next_bias=(*after, "bias"), layer=layer,
        )
        for layer, (path, after) in enumerate(itertools.pairwise(paths))
    )  # fmt: skip


class Linear(nnx.Module):
    """Compute x W + b."""

    def __init__(self, inputs: int, outputs: int, *, variance: float, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (inputs, outputs), AXES, (variance / inputs) ** 0.5)
        self.bias = zeros((outputs,), (None,))

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        kernel = all_gather_params(self.kernel[...], AXES, x_BD.dtype)
        return add_bias(einsum("BD,DF->BF", x_BD, kernel), self.bias)


class MLPClassifier(nnx.Module):
    """Hidden layers of one width, and a linear layer to the classes.

    Args:
      config: the `model` section: num_layers hidden layers of mlp_dim, max_length inputs, vocab_size classes.
      dtype: compute type.
      scan, kernel: unused; the few layers are unrolled.
    """

    def __init__(self, config, *, dtype, scan: bool, kernel: str = "", rngs: nnx.Rngs):
        pairs = list(itertools.pairwise(widths(config)))
        self.layers = nnx.Dict({
            str(number): Linear(*sizes, variance=1.0 if number == config.num_layers else 2.0, rngs=rngs)
            for number, sizes in enumerate(pairs)
        })  # fmt: skip
        self.dtype, self.num_hidden, self.largest = dtype, config.num_layers, config.levels - 1

    def __call__(self, inputs_BT: jax.Array) -> jax.Array:
        """Return float32 logits [B, C] of int32 inputs."""
        x_BF, numbers, recorded = inputs_BT.astype(self.dtype) / self.largest, taps.layer_numbers(self.num_hidden), []
        for layer in range(self.num_hidden):
            with taps.body(None if numbers is None else numbers[layer]) as of_layer:
                x_BF = taps.tap("mlp_hidden", jax.nn.relu(self.layers[str(layer)](x_BF)))
            recorded.append(of_layer)
        taps.add(jax.tree.map(lambda *of_layers: jnp.stack(of_layers), *recorded))
        return self.layers[str(self.num_hidden)](x_BF).astype(jnp.float32)


make = MLPClassifier  # call it with a mesh in context
