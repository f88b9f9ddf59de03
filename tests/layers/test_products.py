# SPDX-License-Identifier: Apache-2.0
"""The forms of a product, native to XLA's CPU backend and quantised, against the einsum and numpy."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from layers import products
from layers.mlp import SwiGLU
from models.trm import LengthMixer
from parallelism.mesh import make_mesh, mesh_context
from tests.support import ROOT, assert_close, relative_error

SIZES = dict(zip("BTSDFNKGHVECR", (3, 11, 16, 20, 28, 6, 2, 5, 8, 37, 4, 7, 9), strict=True))
SOURCES = "".join(p.read_text() for room in ("layers", "models", "objectives") for p in (ROOT / room).rglob("*.py"))
SPECS = sorted(set(re.findall(r'(?<!jnp\.)\b(?:einsum|einsum_f32)\(\s*"([^"]+)"', SOURCES)))
OF_WEIGHTS = sorted(
    {*re.findall(r'\bself\.einsum\("([^"]+)"', SOURCES), SwiGLU.INTO, SwiGLU.OUT, LengthMixer.INTO, LengthMixer.OUT}
)
OF_ADAPTERS = {"BTD,DR->BTR", "BTR,RNH->BTNH", "BTNH,NHR->BTR", "BTR,RD->BTD"}  # as layers/adapters.py makes them
# Of a product whose operands are rounded: int8 is off by up to 1/255 of the largest of some ten numbers, fp8 by 1/16.
ROUNDED = {"int8": 0.015, "fp8": 0.05}


def operands(spec: str, dtype=jnp.float32):
    """Return the two operands, and an array of the result's shape to take the gradient along."""
    rng = np.random.default_rng(0)
    shapes = [[SIZES[letter] for letter in part] for part in re.split(",|->", spec)]
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in shapes]


def value_and_gradients(function):
    """Return f(a, b, direction) -> (the product, the gradients of its inner product with `direction`)."""

    def along(a, b, direction):
        y = function(a, b)
        return jnp.sum(y.astype(jnp.float32) * direction.astype(jnp.float32)), y

    return jax.jit(jax.value_and_grad(along, argnums=(0, 1), has_aux=True))


def by_hand(spec: str, a, b, direction):
    """Return what `value_and_gradients` of an einsum does, in float64 by numpy."""
    left, right, out = re.split(",|->", spec)
    a, b, direction = (np.asarray(x, np.float64) for x in (a, b, direction))
    y = np.einsum(spec, a, b)
    gradients = np.einsum(f"{out},{right}->{left}", direction, b), np.einsum(f"{left},{out}->{right}", a, direction)
    return (np.sum(y * direction), y), gradients


def test_the_specs_were_found():
    assert {"BTD,DNH->BTNH", "BTKGH,BSKH->BKGTS", "BTD,BTV->DV"} <= set(SPECS)


@pytest.mark.parametrize(
    ("form", "spec"),
    [
        (form, spec)
        for form in (products._native_einsum, products._matrix_einsum)
        for spec in sorted({*SPECS, *OF_WEIGHTS, *OF_ADAPTERS})
    ],
)
def test_native_form_equals_einsum_forward_and_backward(form, spec):
    (_, actual), gradients = value_and_gradients(lambda a, b: form(spec, a, b))(*operands(spec))
    (_, expected), wanted = by_hand(spec, *operands(spec))
    assert_close((actual, gradients), (expected, wanted))


@pytest.mark.parametrize("device", ["one cpu", "cpu", "gpu", "tpu"])
@pytest.mark.parametrize("function", [products.einsum, products.einsum_f32])
def test_bfloat16_accumulates_in_float32(function, device, monkeypatch):
    """By the products of one CPU device, and by those of all other devices."""
    monkeypatch.setattr(products, "on_one_cpu", lambda: device == "one cpu")
    monkeypatch.setattr(products, "platform", lambda: device)
    spec = "BTD,DNH->BTNH"
    a, b, direction = operands(spec, jnp.bfloat16)
    (_, actual), gradients = value_and_gradients(lambda a, b: function(spec, a, b))(a, b, direction)
    assert actual.dtype == (jnp.float32 if function is products.einsum_f32 else jnp.bfloat16)
    (_, expected), wanted = by_hand(spec, a, b, direction)
    assert_close(actual, expected, actual.dtype)
    assert_close(gradients, wanted, "bfloat16")


@pytest.mark.parametrize("spec", SPECS)
def test_on_one_cpu_every_bfloat16_product_and_its_gradients_are_plain_matrix_products(spec):
    """Any other form would be cast to float32 by XLA's CPU backend, at about half the speed."""
    function = value_and_gradients(lambda a, b: products.einsum_f32(spec, a, b))
    dots = re.findall(r"stablehlo.dot_general .*", function.lower(*operands(spec, jnp.bfloat16)).as_text())
    assert len(dots) == 3
    for dot in dots:
        rank = len(re.search(r"\(tensor<([\dx]*)xbf16>", dot)[1].split("x"))
        assert f"contracting_dims = [{rank - 1}] x [{rank - 2}]" in dot and re.search(r"-> tensor<[\dx]*xf32>", dot), (
            dot
        )


def test_gradient_of_a_bias_loses_nothing_in_bfloat16():
    """In bfloat16, a sum of numbers near 1 stops at 256."""
    rng = np.random.default_rng(0)
    x, along = (jnp.asarray(1 + 0.1 * rng.standard_normal((32, 512, 64)), jnp.bfloat16) for _ in range(2))

    @jax.jit
    def gradient(bias, x, along):
        return jax.grad(lambda bias: (products.add_bias(x, nnx.Param(bias)) * along).astype(jnp.float32).sum())(bias)

    exact = gradient(jnp.zeros(64), x.astype(jnp.float32), along.astype(jnp.float32))
    assert relative_error(gradient(jnp.zeros(64), x, along), exact) < 0.01


def test_on_a_gpu_bfloat16_operands_are_multiplied_as_they_are(monkeypatch):
    """Cast to float32, they would be multiplied at half the speed."""
    monkeypatch.setattr(products, "on_one_cpu", lambda: False)
    monkeypatch.setattr(products, "platform", lambda: "gpu")
    a, b, _ = operands("BTD,DV->BTV", jnp.bfloat16)
    text = jax.jit(lambda a, b: products.einsum_f32("BTD,DV->BTV", a, b)).lower(a, b).as_text()
    assert re.search(r"dot_general .*xbf16>, tensor<[\dx]*xbf16>\) -> tensor<[\dx]*xf32>", text)
    assert "convert" not in text


def precisions(function, *operands) -> set:
    """Return the precisions of all products in the gradient of a function."""
    text = value_and_gradients(function).lower(*operands).as_text()
    found = re.findall(r"dot_general .*precision = \[(\w+), \w+\]", text)
    assert len(found) == text.count("dot_general") >= 3
    return set(found)


FORMS = [
    functools.partial(products.einsum, "BTD,DV->BTV"), functools.partial(products.einsum_f32, "BTD,DV->BTV"),
    functools.partial(products._weight_first, "BTD,DV->BTV"),
    lambda a, b: products.with_precision(functools.partial(jnp.einsum, "BTD,DV->BTV"), a.dtype)(a, b),
]  # fmt: skip


@pytest.mark.parametrize("device", ["gpu", "tpu"])
@pytest.mark.parametrize("form", FORMS)
def test_float32_factors_are_not_rounded(form, device, monkeypatch):
    """By JAX's default, a TPU would round them to bfloat16 and a GPU to TF32, in the gradients too."""
    monkeypatch.setattr(products, "on_one_cpu", lambda: False)
    monkeypatch.setattr(products, "platform", lambda: device)
    with jax.default_matmul_precision(None):  # tests have another, see conftest.py
        assert precisions(form, *operands("BTD,DV->BTV")) == {"HIGHEST"}
        assert precisions(form, *operands("BTD,DV->BTV", jnp.bfloat16)) == {"DEFAULT"}
    with jax.default_matmul_precision("default"):
        assert precisions(form, *operands("BTD,DV->BTV")) == {"DEFAULT"}


def test_on_several_devices_a_product_stays_an_einsum():
    """The native form's reshapes would hide from the partitioner which dimension is split how."""
    spec = "BTD,DNH->BTNH"
    with mesh_context(make_mesh({"data": 8})):
        text = jax.jit(lambda a, b: products.einsum(spec, a, b)).lower(*operands(spec, jnp.bfloat16)[:2]).as_text()
    assert "reshape" not in text and text.count("dot_general") == 1


def rounded(x, dims):
    """Return float32 values of int8 with a scale for each slice along `dims`, by numpy."""
    scale = np.abs(x).max(axis=dims, keepdims=True) * np.float32(1.00394 / 127.5)
    return np.clip(np.round(x / scale), -128, 127) * scale


@pytest.mark.parametrize("spec", OF_WEIGHTS)
def test_int8_is_the_product_of_rounded_rows_and_columns(spec):
    x, weight, _ = operands(spec)
    left, right, out = re.split(",|->", spec)
    operands_rounded = [
        rounded(np.asarray(a), tuple(n for n, name in enumerate(names) if name not in out))
        for a, names in ((x, left), (weight, right))
    ]
    actual = jax.jit(lambda x, weight: products.einsum(spec, x, weight, "int8"))(x, weight)
    assert_close(actual, np.einsum(spec, *operands_rounded))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("quantization", products.QUANTIZED)
@pytest.mark.parametrize("spec", OF_WEIGHTS)
def test_a_quantised_product_and_its_gradients_are_near_those_of_the_einsum(spec, quantization, dtype):
    x, weight, direction = operands(spec, dtype)
    quantised = value_and_gradients(lambda a, b: products.einsum(spec, a, b, quantization))
    (_, y), (of_x, of_weight) = quantised(x, weight, direction)
    (_, expected), wanted = by_hand(spec, x, weight, direction)
    assert y.dtype == of_x.dtype == of_weight.dtype == dtype
    assert_close(of_weight, wanted[1], dtype)  # which is not quantised
    assert 1e-3 < relative_error(y, expected) < ROUNDED[quantization]
    assert 1e-3 < relative_error(of_x, wanted[0]) < ROUNDED[quantization]


@pytest.mark.parametrize(("quantization", "kind"), [("int8", "i8"), ("fp8", "f8E4M3FN")])
def test_two_of_three_products_multiply_8_bits(quantization, kind):
    spec = "BTD,DF->BTF"
    function = value_and_gradients(lambda a, b: products.einsum(spec, a, b, quantization))
    dots = re.findall(r"stablehlo.dot_general .*", function.lower(*operands(spec, jnp.bfloat16)).as_text())
    assert len(dots) == 3 and sum(dot.count(f"x{kind}>") == 2 for dot in dots) == 2


def test_rows_of_zeros_stay_zeros():
    x, weight, _ = operands("BTD,DF->BTF")
    for quantization in products.QUANTIZED:
        einsum = jax.jit(functools.partial(products.einsum, "BTD,DF->BTF", quantization=quantization))
        assert not np.any(einsum(np.zeros_like(x), weight))


def test_a_product_is_not_quantised_by_default():
    x, weight, _ = operands("BTD,DF->BTF", jnp.bfloat16)
    text = jax.jit(functools.partial(products.einsum, "BTD,DF->BTF")).lower(x, weight).as_text()
    explicit = jax.jit(functools.partial(products.einsum, "BTD,DF->BTF", quantization="none"))
    assert explicit.lower(x, weight).as_text() == text and "i8" not in text


@pytest.mark.parametrize("shape", [(16, 5), (7, 5), (3, 16, 10), (2, 3, 9, 4)])
def test_turned_swaps_the_last_two_dimensions(shape):
    x = np.arange(np.prod(shape)).reshape(shape)
    np.testing.assert_array_equal(products.materialized_transpose(x), x.swapaxes(-1, -2))


@pytest.mark.parametrize("devices", [1, 8])
def test_transposed_is_the_transpose_whatever_the_mesh(devices):
    x = np.arange(35.0).reshape(7, 5)
    with mesh_context(make_mesh({"data": devices}, jax.devices()[:devices])):
        np.testing.assert_array_equal(products.transposed(x), x.T)
