# SPDX-License-Identifier: Apache-2.0
"""The TPU kernel, interpreted on CPU, against the reference: values, gradients, meshes, rematerialised, a whole model.

It computes blocks in another order and with another softmax, in float32, so float32's tolerance holds. Lengths are
multiples of 128, the one restriction that it has.
"""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.interpreters.partial_eval import dce_jaxpr

from configs import base
from core import assembly
from layers import products
from layers.attention import kernels
from layers.attention.attention import attend, attention_mask
from models import decoder_lm
from objectives import language_modeling
from parallelism.mesh import make_mesh, mesh_context
from tests.support import assert_close, model_config, packed_batch, random_weights
from training import platform_defaults
from training.step import Graphs, make_gradient

N, K = 4, 2


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Run the kernel's program as plain XLA."""
    make = functools.partial(kernels.splash.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernels.splash, "make_splash_mha", make)


def mesh(**axes):
    """Return a context with a mesh of these axes."""
    devices = jax.devices()[: math.prod(axes.values())]
    return mesh_context(make_mesh(dict.fromkeys(base.MESH_AXES, 1) | axes, devices))


def inputs(rows, length: int, H: int):
    """Return (q, k, v), the gradient of what is attended, 0 in padding, and the packed batch."""
    rng, B = np.random.default_rng(0), len(rows)
    q, k, v, dy = (rng.standard_normal((B, length, heads, H), np.float32) for heads in (N, K, K, N))
    batch = packed_batch(rows, length, 11)
    return (2 * q, k, v), dy * (batch["segments"] > 0)[:, :, None, None], batch


@functools.partial(jax.jit, static_argnames=("kernel", "window", "cap"))
def differentiated(qkv, dy, batch, kernel: bool, window: int = 0, cap: float = 0.0):
    """Return what is attended where there is a token, and the gradients by q, k and v."""
    segments, positions = batch["segments"], batch["positions"]
    if kernel:
        attends = functools.partial(kernels.attend, segments_BT=segments, sliding_window=window, score_cap=cap)
    else:
        mask = attention_mask(segments, segments, positions, positions, window)
        attends = functools.partial(attend, mask_BTS=mask, score_cap=cap)
    y, pull = jax.vjp(attends, *qkv)
    return y * (segments > 0)[:, :, None, None], pull(dy)


@pytest.mark.parametrize(
    ("H", "length", "window", "cap"), [(128, 256, 100, 3.0), (40, 256, 0, 5.0), (64, 640, 130, 0.0)]
)
def test_kernel_equals_the_reference_on_packed_documents(H, length, window, cap):
    arguments = inputs([[length // 3, length // 2], [length]], length, H)
    expected = differentiated(*arguments, kernel=False, window=window, cap=cap)
    assert_close(differentiated(*arguments, kernel=True, window=window, cap=cap), expected)


def test_the_kernel_does_not_round_float32_in_either_direction(monkeypatch):
    """By JAX's default, a TPU's matrix unit would round the factors to bfloat16."""
    monkeypatch.setattr(products, "platform", lambda: "tpu")
    arguments = inputs([[100, 156]], 256, 128)
    with mesh(data=1):
        expected = differentiated(*arguments, kernel=True)
        with jax.default_matmul_precision(None):  # tests have another, see conftest.py
            text = differentiated.lower(*arguments, kernel=True).as_text()
            assert_close(differentiated(*arguments, kernel=True), expected)
    found = re.findall(r"dot_general .*precision = \[(\w+), \w+\]", text)
    assert len(found) == text.count("dot_general") >= 7 and set(found) == {"HIGHEST"}


def test_kernel_in_bfloat16_is_as_near_to_the_exact_values_as_bfloat16_is():
    qkv, dy, batch = inputs([[100, 90]], 256, 128)
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (qkv, dy))
    actual = differentiated(*rounded, batch, kernel=True)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(actual))
    assert_close(actual, differentiated(qkv, dy, batch, kernel=False), "bfloat16")


def test_kernel_of_very_many_keys_has_the_same_gradient(monkeypatch):
    """Where the fused backward kernel would write dq too often, another computes it."""
    monkeypatch.setattr(kernels, "DQ_PARTS", 0)
    arguments = inputs([[100, 201]], 384, 16)
    expected = differentiated(*arguments, kernel=False, window=120, cap=2.0)
    assert_close(differentiated(*arguments, kernel=True, window=120, cap=2.0), expected)


def test_kernel_computes_the_same_on_a_mesh():
    """Of the other axes; a whole model is on one of data, context and model."""
    arguments = inputs([[100, 156], [130, 50], [256], [1, 200, 30]], 256, 16)
    expected = differentiated(*arguments, kernel=False, window=90)
    with mesh(fsdp=2, expert=2, model=2):
        assert kernels.serves((4, 256))
        assert_close(differentiated(*arguments, kernel=True, window=90), expected)


def test_kernel_computes_the_same_for_one_device_of_a_mesh():
    """Within a `jax.shard_map`, as in a step whose devices each compute their rows."""
    arguments = inputs([[100, 156], [130, 50], [256], [1, 200, 30]], 256, 16)
    expected = differentiated(*arguments, kernel=False, window=90)
    with mesh(data=2, fsdp=2):
        rows = jax.P(("data", "fsdp"))
        on_device = functools.partial(differentiated, kernel=True, window=90)
        by_device = jax.shard_map(on_device, in_specs=rows, out_specs=rows, check_vma=False)
        assert_close(jax.jit(by_device)(*arguments), expected)


def test_kernel_serves_whole_blocks_on_every_device():
    with mesh(data=4, context=2):
        served = {shape: kernels.serves(shape) for shape in ((4, 256), (8, 512), (6, 256), (4, 128), (4, 300))}
    assert served == {(4, 256): True, (8, 512): True, (6, 256): False, (4, 128): False, (4, 300): False}


@pytest.mark.parametrize(
    ("length", "limit", "block"),
    [(128, 512, 128), (4096, 512, 512), (640, 512, 128), (640, 1024, 640), (1408, 1024, 128), (256, 64, 128)],
)
def test_blocks_divide_the_length(length, limit, block):
    assert kernels._block(length, limit) == block


def gradient_of(kernel: str, remat: str = "attention", **how):
    """Return gradient(params, carry, batch, key, frozen) of a decoder of alternating layers, and parameters."""
    config = model_config(sliding_window=90, global_every=2, num_layers=2, remat=remat, vocab_size=38)
    make = functools.partial(decoder_lm.make, config, dtype=jnp.float32, scan=True, kernel=kernel)
    graph, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    loss = language_modeling.LanguageModeling(0, 0, 1, 0.0).loss
    return make_gradient(Graphs(graph, {}), loss, **how), random_weights(nnx.to_pure_dict(state))


@pytest.mark.slow
def test_a_model_with_the_kernel_has_the_same_loss_and_gradients():
    """On a mesh too, in groups whose gradients are summed once a step."""
    batch = packed_batch([[100, 156], [130, 50], [256], [1, 200, 30]], 256, 38)
    of_batch, params = gradient_of("", "none")
    expected = jax.jit(of_batch)(params, {}, batch, jax.random.key(0), {})
    of_batch, _ = gradient_of("tpu", num_microbatches=2, groups={"data": 2})
    with mesh(data=2, context=2, model=2):
        assert_close(jax.jit(of_batch)(params, {}, batch, jax.random.key(0), {}), expected)


@pytest.mark.parametrize(("remat", "forward"), [("none", 1), ("attention", 1), ("full", 2)])
def test_remat_that_keeps_what_was_attended_runs_the_forward_kernel_once(remat, forward):
    """For each of two kinds of layers."""
    of_batch, params = gradient_of("tpu", remat)
    with mesh(data=2, model=2):
        batch = packed_batch([[100], [256]], 256, 38)
        program = jax.make_jaxpr(of_batch)(params, {}, batch, jax.random.key(0), {})
        program, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    names = [name.split("_")[2] for name in kernel_names(program)]
    assert sorted(names) == 2 * ["dkv"] + 2 * forward * ["fwd"]


@pytest.mark.parametrize(("platform", "length", "used"), [("tpu", 256, True), ("tpu", 192, False), ("cpu", 256, False)])
def test_a_run_on_tpus_uses_the_kernel_where_it_serves(monkeypatch, platform, length, used):
    monkeypatch.setattr(platform_defaults, "platform", lambda mesh: platform)
    config = base.get_config()
    config.model.update(dict(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=32))
    config.train.update(dict(global_batch=8, sequence_length=length, steps=4))
    config.mesh.fsdp = 8
    run = assembly.assemble(config)
    with mesh_context(run.mesh):
        program = jax.make_jaxpr(run.eval_step)(run.abstract_state.params, run.abstract_batch)
    assert bool(kernel_names(program.jaxpr)) == used


def kernel_names(program: Jaxpr) -> list[str]:
    """Return the names of the kernels that a program calls."""
    names = []
    for equation in program.eqns:
        if equation.primitive.name == "pallas_call":
            names.append(str(equation.params.get("name") or equation.params["name_and_src_info"].name))
            continue
        for value in jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, Jaxpr | ClosedJaxpr)):
            if isinstance(value, Jaxpr | ClosedJaxpr):
                names += kernel_names(value.jaxpr if isinstance(value, ClosedJaxpr) else value)
    return names
