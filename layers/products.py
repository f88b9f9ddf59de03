# SPDX-License-Identifier: Apache-2.0
"""Matrix products: operands in the compute type, accumulation in float32.

On TPU and GPU these are einsums. XLA's CPU backend is fast at products of two matrices; the gradient of one with more
dimensions takes three times as long. And it multiplies bfloat16 natively only as [M, K] [K, N] with a float32 result,
and casts every other product to float32 at about half the speed. So there, on one device, products are brought into
that form, those of bfloat16 with both products of their gradient (benchmarks/cpu_step.py has the figures).
Products of weights can also be quantised (benchmarks/quantization.py).
"""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import qwix

from layers.axes import inside_shard_map, platform

QUANTIZED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST = "absmax,1.00394"  # becomes 127, not 127.5: the last bit would decide which way that rounds


def project(
    spec: str, x: jax.Array, weight: jax.Array, quantization: str = "none", *, frozen: bool = False
) -> jax.Array:
    """Return the einsum of an activation and a weight, in the type of `x`, which is also the compute type.

    Args:
      quantization: none, or what both are multiplied in: a key of QUANTIZED.
      frozen: whether the weight needs no gradient, and so none has to come first.
    """
    if quantization != "none":
        return _quantized(spec, QUANTIZED[quantization], x, weight.astype(x.dtype))
    if _is_one_cpu():
        einsum = _native_einsum if x.dtype == jnp.bfloat16 else _matrix_einsum
        return einsum(spec, x, weight).astype(x.dtype)
    if inside_shard_map() and not frozen:
        return _weight_first(spec, x, weight.astype(x.dtype))
    return jnp.einsum(spec, x, weight.astype(x.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_first(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the einsum; going back the weight's gradient comes first, so that its sum over devices begins at once."""
    return jnp.einsum(spec, x, weight)


def _weight_first_backward(spec, operands, gradient):
    _, pull = jax.vjp(functools.partial(jnp.einsum, spec), *operands)
    weight_gradient, gradient = jax.lax.optimization_barrier((pull(gradient)[1], gradient))
    return pull(gradient)[0], weight_gradient


_weight_first.defvjp(lambda spec, *operands: (_weight_first(spec, *operands), operands), _weight_first_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantized(spec: str, dtype, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the einsum of operands rounded to 8 bits, with a scale for each row and each column of the product.

    Devices that share heads round each its part of what they sum.

    SwitchBack (arXiv:2304.13013): the gradient of the input is computed in the same way, that of the weight, a sum over
    so many tokens that rounding them would tell, in the type of `x`, and first, as in `_weight_first`.
    """
    left, right, out = re.split(",|->", spec)
    x_rounded, weight_rounded = _rounded(x, dtype, left, out), _rounded(weight, dtype, right, out)
    return qwix.einsum(spec, x_rounded, weight_rounded).astype(x.dtype)


def _rounded(x: jax.Array, dtype, names: str, kept: str) -> qwix.QArray:
    """Round `x`, its dimensions called `names`, with a float32 scale for each index of those that are kept."""
    channels = [dim for dim, name in enumerate(names) if name in kept]
    return qwix.quantize(x.astype(jnp.float32), dtype, channelwise_axes=channels, calibration_method=LARGEST)


def _quantized_backward(spec, dtype, operands, gradient):
    x, weight = operands
    _, pull = jax.vjp(functools.partial(project, spec, x), weight)
    weight_gradient, gradient = jax.lax.optimization_barrier((*pull(gradient), gradient))
    left, right, out = re.split(",|->", spec)
    return _quantized(f"{out},{right}->{left}", dtype, gradient, weight), weight_gradient


_quantized.defvjp(lambda *arguments: (_quantized(*arguments), arguments[2:]), _quantized_backward)


def product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the float32 einsum of two arrays, both used in the type of `a`.

    The cast to float32 is exact, and free on TPU, where a float32 product of default precision multiplies in
    bfloat16.
    """
    if a.dtype == jnp.bfloat16 and _is_one_cpu():
        return _native_einsum(spec, a, b)
    return jnp.einsum(spec, a.astype(jnp.float32), b.astype(a.dtype).astype(jnp.float32))


def plus(x: jax.Array, bias) -> jax.Array:
    """Return x + bias in the type of `x`; `x` where the bias, a parameter, is None."""
    return x if bias is None else x + bias[...].astype(x.dtype)


def transposed(weight: jax.Array) -> jax.Array:
    """Return the transpose of a matrix that is going to be used in a product."""
    return turned(weight) if _is_one_cpu() else weight.T


def _is_one_cpu() -> bool:
    return jax.sharding.get_abstract_mesh().size == 1 and platform() == "cpu"


def _matrix_einsum(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the einsum as a product of two matrices: dimensions that stay side by side are joined.

    One with batch dimensions, which no weight has, stays as it is.
    """
    left, right, out = re.split(",|->", spec)
    if {*left} & {*right} & {*out}:
        return jnp.einsum(spec, x, weight.astype(x.dtype))
    size = dict(zip(left + right, x.shape + weight.shape, strict=True))

    def joined(names: str) -> tuple[str, list[int]]:
        runs = ["".join(run) for _, run in itertools.groupby(names, key=lambda name: (name in left, name in right))]
        return "".join(run[0] for run in runs), [math.prod(size[name] for name in run) for run in runs]

    (left, x_shape), (right, weight_shape), (to, _) = (joined(names) for names in (left, right, out))
    y = jnp.einsum(f"{left},{right}->{to}", x.reshape(x_shape), weight.astype(x.dtype).reshape(weight_shape))
    return y.reshape([size[name] for name in out])


def _native_einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    left, right, out = re.split(",|->", spec)
    batch = [name for name in left if name in right and name in out]
    contracted = [name for name in left if name in right and name not in out]
    rows, columns = [name for name in left if name not in right], [name for name in right if name not in left]
    a_matrices = _as_matrices(a, left, batch, rows, contracted)
    y = native_product(a_matrices, _as_matrices(b, right, batch, contracted, columns))
    size, order = dict(zip(left + right, a.shape + b.shape, strict=True)), batch + rows + columns
    return y.reshape([size[name] for name in order]).transpose([order.index(name) for name in out])


def _as_matrices(x: jax.Array, names: str, batch: list[str], rows: list[str], columns: list[str]) -> jax.Array:
    """Return `x`, its dimensions called `names`, as [*batch, rows, columns]."""
    swap = names.index(columns[0]) < names.index(rows[0])
    order = batch + (columns + rows if swap else rows + columns)
    size = dict(zip(names, x.shape, strict=True))
    shape = [size[name] for name in batch] + [math.prod(size[n] for n in part) for part in (rows, columns)]
    x = x.transpose([names.index(name) for name in order])
    return turned(x.reshape(*shape[:-2], shape[-1], shape[-2])) if swap else x.reshape(shape)


@jax.custom_vjp
def native_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return float32 [..., M, N] of [..., M, K] and [..., K, N], both multiplied in the type of `a`."""
    return jnp.matmul(a, b.astype(a.dtype), preferred_element_type=jnp.float32)


def _native_backward(operands, gradient):
    a, b = operands
    gradient = gradient.astype(a.dtype)
    a_gradient = native_product(gradient, turned(b.astype(a.dtype)))
    b_gradient = native_product(turned(a), gradient)
    return a_gradient.astype(a.dtype), b_gradient.astype(b.dtype)


native_product.defvjp(lambda a, b: (native_product(a, b), (a, b)), _native_backward)


def turned(x: jax.Array) -> jax.Array:
    """Return the last two dimensions swapped, as a copy in memory.

    A plain transpose would be folded into the product that uses it; one of three dimensions is not.
    """
    *batch, rows, columns = x.shape
    group = 8 if rows % 8 == 0 else 1
    parts = jnp.moveaxis(x.reshape(*batch, rows // group, group, columns), -1, -3)
    return parts.reshape(*batch, columns, rows)
