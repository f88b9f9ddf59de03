# SPDX-License-Identifier: Apache-2.0
"""Matrix products: operands in the compute type, accumulation in float32.

On TPU and GPU these are plain einsums. XLA's CPU backend is fast at products of two matrices only; the gradient of an
einsum with more dimensions takes three times as long. It multiplies bfloat16 natively only as [M, K] [K, N] with a
float32 result, and casts every other product to float32, at about half the speed. So on one CPU device, einsums are
reshaped to that form. For bfloat16 this includes both products of the gradient (benchmarks/cpu_step.py has figures).
Float32 factors are not rounded on TPU and GPU either, unless JAX_DEFAULT_MATMUL_PRECISION is set (`precision`).
Products with weights can also be quantised (benchmarks/quantization.py).
"""

import functools
import itertools
import math
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp

from layers.axes import inside_shard_map, platform

QUANTIZED = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
LARGEST = "absmax,1.00394"  # scales the largest value to 127; 127.5 would round up or down by its last bit


def precision(dtype) -> jax.lax.Precision | None:
    """Return the precision for products of factors in `dtype`: float32 factors keep all their bits.

    By default JAX rounds them, to bfloat16 on a TPU and to TF32 on a GPU. None means JAX's default: for shorter types,
    on a CPU, which does not round, without a mesh in context (it shows the platform), and if the user has set
    JAX_DEFAULT_MATMUL_PRECISION.
    """
    is_set = jax.config.jax_default_matmul_precision is not None
    rounds = jax.sharding.get_abstract_mesh().size and platform() != "cpu"
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 and rounds and not is_set else None


def with_precision(function: Callable, dtype) -> Callable:
    """Return `function` of arrays in `dtype`, its products and those of its gradient computed at `precision`.

    It is for code of other libraries, which takes no precision as an argument. If a precision is needed, JAX refuses
    forward-mode differentiation (`jax.jvp`) of the result.
    """
    if precision(dtype) is None:
        return function

    def at_highest(function, *arguments):
        with jax.default_matmul_precision("highest"):
            return function(*arguments)

    call = jax.custom_vjp(functools.partial(at_highest, function))
    call.defvjp(functools.partial(at_highest, jax.vjp, function), at_highest)  # backward: the pullback, the gradient
    return call


def einsum(
    spec: str, x: jax.Array, weight: jax.Array, quantization: str = "none", *, frozen: bool = False
) -> jax.Array:
    """Return the einsum of an activation and a weight in the type of `x`, which is the compute type.

    Args:
      quantization: none, or a key of QUANTIZED, the type in which both are multiplied.
      frozen: whether the weight has no gradient; then the backward pass needs no order.
    """
    if quantization != "none":
        return _quantized(spec, QUANTIZED[quantization], x, weight.astype(x.dtype))
    if on_one_cpu():
        cpu_einsum = _native_einsum if x.dtype == jnp.bfloat16 else _matrix_einsum
        return cpu_einsum(spec, x, weight).astype(x.dtype)
    if inside_shard_map() and not frozen:
        return _weight_first(spec, x, weight.astype(x.dtype))
    return _einsum(spec, x, weight.astype(x.dtype))


def _einsum(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=precision(a.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _weight_first(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the einsum; the backward pass computes the weight's gradient first, so its reduction starts early."""
    return _einsum(spec, x, weight)


def _weight_first_backward(spec, operands, gradient):
    _, pull = jax.vjp(functools.partial(_einsum, spec), *operands)
    weight_gradient, gradient = jax.lax.optimization_barrier((pull(gradient)[1], gradient))
    return pull(gradient)[0], weight_gradient


_weight_first.defvjp(lambda spec, *operands: (_weight_first(spec, *operands), operands), _weight_first_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _quantized(spec: str, dtype, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the einsum of operands rounded to 8 bits, with a scale for each row and each column of the product.

    If devices share heads, each device rounds its own part of the sum.

    SwitchBack (arXiv:2304.13013): the gradient of the input is computed in 8 bits too. The gradient of the weight sums
    over many tokens, so rounding would matter: it is computed in the type of `x`, and first, as in `_weight_first`.
    """
    import qwix  # lazily, because its import takes time; so in `rounded`

    left, right, out = re.split(",|->", spec)
    x_rounded, weight_rounded = rounded(x, dtype, left, out), rounded(weight, dtype, right, out)
    return qwix.einsum(spec, x_rounded, weight_rounded).astype(x.dtype)


def rounded(x: jax.Array, dtype, names: str, out: str):
    """Return `x` as a qwix.QArray: 8 bits, with a float32 scale for each index of the dimensions in `out`.

    Args:
      names: of the dimensions of `x`, a letter each.
    """
    import qwix

    channels = [dim for dim, name in enumerate(names) if name in out]
    return qwix.quantize(x.astype(jnp.float32), dtype, channelwise_axes=channels, calibration_method=LARGEST)


def _quantized_backward(spec, dtype, operands, gradient):
    x, weight = operands
    _, pull = jax.vjp(functools.partial(einsum, spec, x), weight)
    weight_gradient, gradient = jax.lax.optimization_barrier((*pull(gradient), gradient))
    left, right, out = re.split(",|->", spec)
    return _quantized(f"{out},{right}->{left}", dtype, gradient, weight), weight_gradient


_quantized.defvjp(lambda *arguments: (_quantized(*arguments), arguments[2:]), _quantized_backward)


def einsum_f32(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the float32 einsum of two arrays, both cast to the type of `a`.

    The cast of a bfloat16 `a` to float32 is exact. It is free on TPU, where a float32 product of default precision
    multiplies in bfloat16. A GPU would multiply at half the speed, in TF32, as it does in the gradients of this
    product.
    """
    if a.dtype == jnp.bfloat16 and on_one_cpu():
        return _native_einsum(spec, a, b)
    if a.dtype == jnp.bfloat16 and jax.sharding.get_abstract_mesh().size and platform() == "gpu":
        return jnp.einsum(spec, a, b.astype(a.dtype), preferred_element_type=jnp.float32)
    factors = a.astype(jnp.float32), b.astype(a.dtype).astype(jnp.float32)
    return jnp.einsum(spec, *factors, precision=precision(a.dtype))


def add_bias(x: jax.Array, bias) -> jax.Array:
    """Return x + bias in the type of `x`, or `x` if the bias parameter is None.

    It is added in float32, so that its gradient, a sum over tokens, is one of float32 numbers. In bfloat16 such a sum
    stops at 256 times what is added.
    """
    return x if bias is None else (x.astype(jnp.float32) + bias[...].astype(jnp.float32)).astype(x.dtype)


def transposed(weight: jax.Array) -> jax.Array:
    """Return the transpose of a matrix for use in a product."""
    return materialized_transpose(weight) if on_one_cpu() else weight.T


def on_one_cpu() -> bool:
    """Return whether the mesh in context is one CPU device."""
    return jax.sharding.get_abstract_mesh().size == 1 and platform() == "cpu"


def _matrix_einsum(spec: str, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the einsum as a product of two matrices; dimensions that stay adjacent are merged.

    An einsum with batch dimensions stays an einsum; weights have none.
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
    if next(name for name in out if (name in left) != (name in right)) in right:
        return _native_einsum(f"{right},{left}->{out}", b, a)  # so that the product has the order of `out`
    batch = [name for name in left if name in right and name in out]
    contracted = [name for name in left if name in right and name not in out]
    rows, columns = [name for name in left if name not in right], [name for name in right if name not in left]
    a_matrices = _as_matrices(a, left, batch, rows, contracted)
    y = native_matmul(a_matrices, _as_matrices(b, right, batch, contracted, columns))
    size, order = dict(zip(left + right, a.shape + b.shape, strict=True)), batch + rows + columns
    return y.reshape([size[name] for name in order]).transpose([order.index(name) for name in out])


def _as_matrices(x: jax.Array, names: str, batch: list[str], rows: list[str], columns: list[str]) -> jax.Array:
    """Return `x`, its dimensions called `names`, as [*batch, rows, columns]."""
    swap = names.index(columns[0]) < names.index(rows[0])
    order = batch + (columns + rows if swap else rows + columns)
    size = dict(zip(names, x.shape, strict=True))
    shape = [size[name] for name in batch] + [math.prod(size[n] for n in part) for part in (rows, columns)]
    x = x.transpose([names.index(name) for name in order])
    return materialized_transpose(x.reshape(*shape[:-2], shape[-1], shape[-2])) if swap else x.reshape(shape)


@jax.custom_vjp
def native_matmul(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return the float32 product [..., M, N] of [..., M, K] and [..., K, N], cast to the shorter of their types."""
    return jnp.matmul(*_in_one_type(a, b), preferred_element_type=jnp.float32)


def _native_backward(operands, gradient):
    a, b = _in_one_type(*operands)
    gradient = gradient.astype(a.dtype)
    gradients = native_matmul(gradient, materialized_transpose(b)), native_matmul(materialized_transpose(a), gradient)
    return tuple(found.astype(operand.dtype) for found, operand in zip(gradients, operands, strict=True))


def _in_one_type(a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    dtype = min(a.dtype, b.dtype, key=lambda dtype: dtype.itemsize)
    return a.astype(dtype), b.astype(dtype)


native_matmul.defvjp(lambda a, b: (native_matmul(a, b), (a, b)), _native_backward)


def materialized_transpose(x: jax.Array) -> jax.Array:
    """Return `x` with the last two dimensions swapped, as a copy in memory.

    XLA would fold a plain transpose into the product that uses it. It does not fold a transpose of three dimensions.
    """
    *batch, rows, columns = x.shape
    group = 8 if rows % 8 == 0 else 1
    parts = jnp.moveaxis(x.reshape(*batch, rows // group, group, columns), -1, -3)
    return parts.reshape(*batch, columns, rows)
