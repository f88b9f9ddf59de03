# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of frozen weights: y = x W + (alpha / rank) (x A) B (arXiv:2106.09685, section 4.1).

In einsum specs R is the rank. As in PEFT, A starts uniform within 1 / sqrt(inputs); the paper draws it from a normal
distribution. B starts at 0, so that at first the model computes the same as without adapters.
"""

import dataclasses
import functools
import math
import re

import jax
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


class Adapter(nnx.Module):
    """Add a low-rank product to the product with one weight.

    Args:
      weight: the frozen weight, whose first `inputs` dimensions a product contracts.
      scale: alpha / rank.
    """

    def __init__(self, weight: nnx.Param, inputs: int, *, rank: int, scale: float, rngs: nnx.Rngs):
        shape, axes = weight.shape, weight.get_metadata("out_sharding")
        bound = math.prod(shape[:inputs]) ** -0.5
        uniform = jax.random.uniform(rngs.params(), (*shape[:inputs], rank), minval=-bound, maxval=bound)
        self.a = nnx.LoRAParam(uniform, out_sharding=(*axes[:inputs], "rank"))
        self.b = nnx.LoRAParam(jax.numpy.zeros((rank, *shape[inputs:])), out_sharding=("rank", *axes[inputs:]))
        self.scale = scale

    def __call__(self, spec: str, x: jax.Array) -> jax.Array:
        """Return the term to add to the einsum `spec` of `x` and the weight, in the type of `x`."""
        left, right, out = re.split(",|->", spec)
        inputs = "".join(name for name in right if name in left)
        outputs = right.removeprefix(inputs)
        inner = "".join(name for name in left if name not in inputs) + "R"
        y = einsum(f"{left},{inputs}R->{inner}", x, self.a[...])
        return self.scale * einsum(f"{inner},R{outputs}->{out}", y, self.b[...])


class Adapted(nnx.Module):
    """A layer whose weights may have adapters."""

    def adapt(self, lora: LoRA | None, names: tuple[str, ...], quantization: str, rngs: nnx.Rngs) -> None:
        """Set up the multiplication, and declare the adapters of the target weights.

        Args:
          lora: None: the weights are trained, without adapters.
          names: of the weights.
          quantization: see layers/products.py.
        """
        self.multiply = functools.partial(einsum, quantization=quantization, frozen=lora is not None)
        how = dict(rank=lora.rank, scale=lora.alpha / lora.rank, rngs=rngs) if lora else {}
        targets = [name for name in names if lora and name in lora.targets]
        self.adapters = nnx.Dict({name: Adapter(getattr(self, name), INPUTS[name], **how) for name in targets})

    def einsum(self, spec: str, x: jax.Array, name: str) -> jax.Array:
        """Return the einsum `spec` of `x` and the weight of this name with its adapter, in the type of `x`."""
        y = self.multiply(spec, x, getattr(self, name)[...])
        return y + self.adapters[name](spec, x) if name in self.adapters else y
