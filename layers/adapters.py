# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters of frozen weights: y = x W + (alpha / rank) (x A) B (arXiv:2106.09685, section 4.1).

In the specs of products R is the rank. As in PEFT A is uniform within 1 / sqrt(inputs), where the paper has a normal,
and B is 0, so that at first the model computes what it does without them.
"""

import dataclasses
import functools
import math
import re

import jax
from flax import nnx

from layers.products import project

# How many of a weight's first dimensions a product sums over.
INPUTS = {"query": 1, "key": 1, "value": 1, "out": 2, "gate": 1, "up": 1, "down": 1}


@dataclasses.dataclass(frozen=True)
class LoRA:
    """Which weights of each block have adapters, by their attributes' names, and of what rank; all else is frozen."""

    rank: int
    alpha: float
    targets: tuple[str, ...]


class Adapter(nnx.Module):
    """What is added to the product with one weight.

    Args:
      weight: the frozen one, whose first `inputs` dimensions a product sums over.
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
        """Return, in the type of `x`, what the einsum `spec` of `x` and the weight gets more."""
        left, right, out = re.split(",|->", spec)
        inputs = "".join(name for name in right if name in left)
        outputs = right.removeprefix(inputs)
        inner = "".join(name for name in left if name not in inputs) + "R"
        y = project(f"{left},{inputs}R->{inner}", x, self.a[...])
        return self.scale * project(f"{inner},R{outputs}->{out}", y, self.b[...])


class Adapted(nnx.Module):
    """A layer whose products with its weights may be adapted."""

    def adapt(self, lora: LoRA | None, names: tuple[str, ...], quantization: str, rngs: nnx.Rngs) -> None:
        """Say how to multiply, and declare the adapters of those weights that are targets.

        Args:
          lora: None: the weights are trained, and there are no adapters.
          names: of the weights.
          quantization: see layers/products.py.
        """
        self.multiply = functools.partial(project, quantization=quantization, frozen=lora is not None)
        how = dict(rank=lora.rank, scale=lora.alpha / lora.rank, rngs=rngs) if lora else {}
        targets = [name for name in names if lora and name in lora.targets]
        self.adapters = nnx.Dict({name: Adapter(getattr(self, name), INPUTS[name], **how) for name in targets})

    def project(self, spec: str, x: jax.Array, name: str) -> jax.Array:
        """Return the einsum `spec` of `x` and the weight of this name, in the type of `x`."""
        y = self.multiply(spec, x, getattr(self, name)[...])
        return y + self.adapters[name](spec, x) if name in self.adapters else y
