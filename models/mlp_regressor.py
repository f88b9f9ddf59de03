# SPDX-License-Identifier: Apache-2.0
"""A multilayer perceptron with ReLU, for tasks of a few numbers.

Finn et al. 2017, arXiv:1703.03400, section 5.1, fit sinusoids with two hidden layers of 40 units.
"""

import itertools

import jax
import jax.numpy as jnp
from flax import nnx

from layers.axes import weight, zeros
from layers.products import add_bias, precision
from layers.units import Units


def flops_per_token(config, length: int) -> float:
    """Return floating-point operations to train on one example, without an inner loop: 6 per weight of a product."""
    sizes = _sizes(config)
    return 6.0 * sum(before * after for before, after in itertools.pairwise(sizes))


def hidden_units(config) -> tuple[Units, ...]:
    """Return none: the units of networks that are adapted to each task are not measured."""
    return ()


class MLPRegressor(nnx.Module):
    """Map inputs [..., input_dim] to outputs [..., output_dim], by `num_layers` hidden layers of `mlp_dim` units.

    Args:
      config: the `model` section of a configuration.
      dtype: compute type.
      scan, kernel: unused; the model has neither a stack of equal blocks nor attention.
    """

    def __init__(self, config, *, dtype, scan: bool = False, kernel: str = "", rngs: nnx.Rngs):
        sizes = _sizes(config)
        self.dtype, self.num_hidden = dtype, config.num_layers
        self.layers = nnx.Dict({str(n): Dense(*pair, rngs=rngs) for n, pair in enumerate(itertools.pairwise(sizes))})

    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the outputs in the compute type."""
        x = x.astype(self.dtype)
        for n in range(self.num_hidden):
            x = jax.nn.relu(self.layers[str(n)](x))
        return self.layers[str(self.num_hidden)](x)


class Dense(nnx.Module):
    """An affine map, with weights of variance 1 / inputs. It is replicated."""

    def __init__(self, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (inputs, outputs), (None, None), inputs**-0.5)
        self.bias = zeros((outputs,), (None,))

    def __call__(self, x: jax.Array) -> jax.Array:
        y = jnp.matmul(x, self.kernel[...].astype(x.dtype), precision=precision(x.dtype))
        return add_bias(y, self.bias)


def _sizes(config) -> list[int]:
    return [config.input_dim, *[config.mlp_dim] * config.num_layers, config.output_dim]


make = MLPRegressor
