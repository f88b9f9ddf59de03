# SPDX-License-Identifier: Apache-2.0
"""Matrix products whose result has more precision than their operands."""

import jax
import jax.numpy as jnp


def float32_product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the float32 einsum of operands in the compute type, accumulated in float32.

    The operands are cast: exact, free on TPU, where a float32 product of default precision multiplies in
    bfloat16, and the only way on CPU, where XLA has no bfloat16 product of every shape with a float32 result.
    """
    return jnp.einsum(spec, a.astype(jnp.float32), b.astype(jnp.float32))
