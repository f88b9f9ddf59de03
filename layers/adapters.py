# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of frozen weights: y = x W + (alpha / rank) (x A) B (arXiv:2106.09685, section 4.1).

In einsum specs R is the rank. As in PEFT, A starts uniform within 1 / sqrt(inputs); the paper draws it from a normal
distribution. B starts at 0, so that at first the model computes the same as without adapters.
"""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
from flax import nnx

from layers.products import einsum

# The number of leading dimensions of a weight that its product contracts.
INPUTS = {"query": 1, "key": 1, "value": 1, "out": 2, "gate": 1, "up": 1, "down": 1}


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Rank, alpha and targets: attribute names of the adapted weights of each block. All other weights are frozen."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def named(cls, rank: int, alpha: float, targets: str) -> "LoRA":
        """Return it with `targets` as a configuration names them: "query,value"."""
        return cls(rank, alpha, tuple(name.strip() for name in targets.split(",")))


class Adapter(nnx.Module):
    """Add a low-rank product to the product with one weight.

    Args:
      weight: the frozen weight, [layers, ...] in a stack. A product contracts the first `inputs` dimensions of a layer.
      scale: alpha / rank.
    """

    def __init__(self, weight: nnx.Param, inputs: int, *, rank: int, scale: float, rngs: nnx.Rngs):
        shape, axes = weight.shape, weight.get_metadata("out_sharding")
        first = int(axes[:1] == ("layers",))
        last = first + inputs
        bound = math.prod(shape[first:last]) ** -0.5
        (a_shape, b_shape), (a_axes, b_axes) = factors(shape, first, last, rank), factors(axes, first, last, "rank")
        uniform = jax.random.uniform(rngs.params(), a_shape, minval=-bound, maxval=bound)
        self.a = nnx.LoRAParam(uniform, out_sharding=a_axes)
        self.b = nnx.LoRAParam(jnp.zeros(b_shape), out_sharding=b_axes)
        self.scale = scale

    def __call__(self, spec: str, x: jax.Array) -> jax.Array:
        """Return the term to add to the einsum `spec` of `x` and the weight, in the type of `x`."""
        left, right, out = re.split(",|->", spec)
        inputs = "".join(name for name in right if name in left)
        outputs = right.removeprefix(inputs)
        inner = "".join(name for name in left if name not in inputs) + "R"
        y = einsum(f"{left},{inputs}R->{inner}", x, self.a[...])
        return self.scale * einsum(f"{inner},R{outputs}->{out}", y, self.b[...])


def factors(dims: tuple, first: int, last: int, rank: int | str | None) -> tuple[tuple, tuple]:
    """Return the dimensions of A and B for those of a weight, as sizes or axes; a product contracts first:last."""
    return (*dims[:last], rank), (*dims[:first], rank, *dims[last:])


class Freezable(nnx.Module):
    """A module whose backward pass is cheaper if its weights have no gradient; then `frozen` is true."""

    frozen = False


class Projections(Freezable):
    """A layer that multiplies by its weights with `einsum`; adapters of a weight attach by its attribute name.

    `quantization` of the products: see layers/products.py.
    """

    def __init__(self, quantization: str):
        self.quantization, self.adapters = quantization, nnx.Dict()

    def einsum(self, spec: str, x: jax.Array, name: str) -> jax.Array:
        """Return the einsum `spec` of `x` and the weight of this name with its adapter, in the type of `x`."""
        y = einsum(spec, x, vars(self)[name][...], self.quantization, frozen=self.frozen)
        return y + self.adapters[name](spec, x) if name in self.adapters else y


def freeze(model: nnx.Module) -> None:
    """Mark all weights that a model has now as frozen."""
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Freezable):
            module.frozen = True


def add_adapters(model: nnx.Module, lora: LoRA, rngs: nnx.Rngs) -> nnx.Module:
    """Add adapters of the target weights to each layer that has them, and mark all other weights as frozen."""
    freeze(model)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, Projections):
            for name in [name for name in INPUTS if name in lora.targets and name in vars(module)]:  # each draws
                weight, how = vars(module)[name], dict(rank=lora.rank, scale=lora.alpha / lora.rank, rngs=rngs)
                module.adapters[name] = Adapter(weight, INPUTS[name], **how)
    return model
