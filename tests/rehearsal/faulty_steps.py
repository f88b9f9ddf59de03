# SPDX-License-Identifier: Apache-2.0
"""Compiles a healthy step and some with a fault for a TPU slice, and writes their programs to a folder: NAME.txt."""

import pathlib
import sys

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from configs import topologies
from rehearsal.compilation import devices

TOPOLOGY = topologies.get("v4-8")
WIDTH, ROWS, MICROBATCHES = 512, 256, 4
STEPS = {"healthy": {}, "float32": {"dtype": jnp.float32}, "copied": {"donate": False}, "in_loop": {"in_loop": True}}


def program(*, dtype=jnp.bfloat16, donate: bool = True, in_loop: bool = False):
    """Return the program of a step of one layer, for four chips that share the batch.

    Args:
      dtype: of the product.
      donate: whether the new weights take the place of the old ones.
      in_loop: whether each microbatch reduces its gradient.
    """
    mesh = jax.sharding.Mesh(devices(TOPOLOGY), ("data",))

    def gradient(weights, batch):
        return jax.grad(lambda w: jnp.sum((batch.astype(dtype) @ w.astype(dtype)).astype(jnp.float32) ** 2))(weights)

    def summed(gradients):
        return jax.lax.psum(gradients, "data")

    def step(weights, batch):
        own = jax.lax.pcast(weights, "data", to="varying")  # so that gradients are those of a device's rows
        in_each, in_the_end = (summed, lambda sums: sums) if in_loop else (lambda part: part, summed)
        sums = jnp.zeros_like(weights if in_loop else own)
        for part in jnp.split(batch, MICROBATCHES):
            sums += jax.lax.optimization_barrier(in_each(gradient(own, part)))
        return weights - 1e-3 * in_the_end(sums)

    whole, split = PartitionSpec(), PartitionSpec("data")
    precision = "highest" if dtype == jnp.float32 else None
    stepped = jax.shard_map(step, mesh=mesh, in_specs=(whole, split), out_specs=whole)
    given = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for shape, spec in (((WIDTH, WIDTH), whole), ((ROWS * MICROBATCHES, WIDTH), split))
    ]
    with jax.default_matmul_precision(precision):
        return jax.jit(stepped, donate_argnums=0 if donate else ()).lower(*given).compile().as_text()


if __name__ == "__main__":
    for name, fault in STEPS.items():
        (pathlib.Path(sys.argv[1]) / f"{name}.txt").write_text(program(**fault))
