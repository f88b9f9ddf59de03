# SPDX-License-Identifier: Apache-2.0
"""The GPU kernel, interpreted on CPU, against the reference: values, gradients, meshes, rematerialised, a whole model.

And it is lowered for a GPU, which compiles it no further. It computes blocks in another order, in float32, so
float32's tolerance holds.
"""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.interpreters.partial_eval import dce_jaxpr

from configs import base
from core import assembly
from layers.attention import gpu_kernels
from layers.attention.attention import attend, attention_mask
from models import decoder_lm
from objectives import language_modeling
from parallelism.mesh import mesh_context
from tests.layers.test_kernels import inputs, kernel_names, mesh
from tests.support import assert_close, model_config, packed_batch, random_weights
from training import platform_defaults
from training.step import Graphs, make_gradient

KINDS = ["mha_backward", "mha_forward", "mha_preprocess_backward"]
ROWS = [[100, 156], [130, 50], [256], [1, 200, 30]]
PLAIN = dict(head_dim=64, dtype=jnp.dtype("bfloat16"), sliding_window=0, score_cap=0.0)


@pytest.fixture
def interpreted(monkeypatch):
    """Run the kernel's program as plain XLA."""
    monkeypatch.setitem(gpu_kernels.HOW, "interpret", True)


@functools.partial(jax.jit, static_argnames="kernel")
def differentiated(qkv, dy, batch, kernel: bool):
    """Return what is attended where there is a token, and the gradients by q, k and v."""
    segments, positions = batch["segments"], batch["positions"]
    if kernel:
        attends = functools.partial(gpu_kernels.attend, segments_BT=segments)
    else:
        attends = functools.partial(attend, mask_BTS=attention_mask(segments, segments, positions, positions))
    y, pull = jax.vjp(attends, *qkv)
    return y * (segments > 0)[:, :, None, None], pull(dy)


@pytest.mark.parametrize(("H", "length"), [(64, 384), (40, 128)])
def test_kernel_equals_the_reference_on_packed_documents(interpreted, H, length):
    arguments = inputs([[length // 3, length // 2], [length]], length, H)
    with mesh():
        assert_close(differentiated(*arguments, kernel=True), differentiated(*arguments, kernel=False))


def test_kernel_in_bfloat16_is_as_near_to_the_exact_values_as_bfloat16_is(interpreted):
    qkv, dy, batch = inputs([[100, 90]], 256, 128)
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), (qkv, dy))
    with mesh():
        actual = differentiated(*rounded, batch, kernel=True)
    assert all(leaf.dtype == jnp.bfloat16 for leaf in jax.tree.leaves(actual))
    assert_close(actual, differentiated(qkv, dy, batch, kernel=False), "bfloat16")


def test_kernel_computes_the_same_on_a_mesh(interpreted):
    arguments = inputs(ROWS, 256, 16)
    with mesh(data=2, expert=2, model=2):
        actual = differentiated(*arguments, kernel=True)
    assert_close(actual, differentiated(*arguments, kernel=False))


def test_kernel_computes_the_same_for_one_device_of_a_mesh(interpreted):
    """Within a `jax.shard_map`, as in a step whose devices each compute their rows."""
    arguments = inputs(ROWS, 256, 16)
    expected = differentiated(*arguments, kernel=False)
    with mesh(data=2, fsdp=2):
        rows = jax.P(("data", "fsdp"))
        on_device = functools.partial(differentiated, kernel=True)
        by_device = jax.shard_map(on_device, in_specs=rows, out_specs=rows, check_vma=False)
        assert_close(jax.jit(by_device)(*arguments), expected)


@pytest.mark.parametrize(
    "refused",
    [{"head_dim": 256}, {"head_dim": 8}, {"dtype": jnp.dtype("float32")}, {"sliding_window": 100}, {"score_cap": 30.0}],
)
def test_kernel_does_not_serve_what_it_cannot_compute(refused):
    with mesh(data=4):
        assert gpu_kernels.serves((4, 256), **PLAIN)
        assert not gpu_kernels.serves((4, 256), **PLAIN | refused)


def test_kernel_serves_whole_blocks_of_an_unsplit_length():
    with mesh(data=4):
        served = {shape: gpu_kernels.serves(shape, **PLAIN) for shape in ((4, 256), (8, 128), (6, 256), (4, 300))}
    assert served == {(4, 256): True, (8, 128): True, (6, 256): False, (4, 300): False}
    with mesh(context=2):
        assert not gpu_kernels.serves((4, 256), **PLAIN)


def gradient_of(kernel: str, dtype, remat: str = "attention", **how):
    """Return gradient(params, carry, batch, key, frozen) of a decoder, and parameters."""
    config = model_config(num_layers=2, remat=remat, vocab_size=38, head_dim=16)
    make = functools.partial(decoder_lm.make, config, dtype=jnp.dtype(dtype), scan=True, kernel=kernel)
    graph, state = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))))
    loss = language_modeling.LanguageModeling(0, 0, 1, 0.0).loss
    return make_gradient(Graphs(graph, {}), loss, **how), random_weights(nnx.to_pure_dict(state))


def test_a_model_with_the_kernel_has_the_same_loss_and_gradients(interpreted, monkeypatch):
    """On a mesh too, in groups whose gradients are summed once a step; in float32, which it refuses, to compare."""
    monkeypatch.setattr(gpu_kernels, "serves", lambda shape, **_: True)
    batch = packed_batch(ROWS, 256, 38)
    of_batch, params = gradient_of("", "float32", "none")
    expected = jax.jit(of_batch)(params, {}, batch, jax.random.key(0), {})
    of_batch, _ = gradient_of("gpu", "float32", num_microbatches=2, groups={"data": 2})
    with mesh(data=2, model=2):
        assert_close(jax.jit(of_batch)(params, {}, batch, jax.random.key(0), {}), expected)


@pytest.mark.parametrize(("remat", "forward"), [("none", 1), ("attention", 1), ("full", 2)])
def test_remat_that_keeps_what_was_attended_runs_the_forward_kernel_once(remat, forward):
    of_batch, params = gradient_of("gpu", "bfloat16", remat)
    with mesh(data=2, model=2):
        batch = packed_batch([[100], [256]], 256, 38)
        program = jax.make_jaxpr(of_batch)(params, {}, batch, jax.random.key(0), {})
        program, _ = dce_jaxpr(program.jaxpr, [True] * len(program.jaxpr.outvars))
    assert sorted(kernel_names(program)) == sorted(KINDS + ["mha_forward"] * (forward - 1))


def test_kernels_are_lowered_for_a_gpu():
    """Forward and backward, for grouped queries; a GPU's own compiler takes it from there."""
    (q, k, v), dy, batch = inputs([[100, 156]], 256, 64)
    rounded = jax.tree.map(lambda x: jnp.asarray(x, jnp.bfloat16), ((q, k, v), dy))
    gpu = jax.sharding.AbstractDevice("NVIDIA H100 80GB HBM3", num_cores=None, platform="gpu")
    with mesh(), jax.sharding.use_abstract_mesh(jax.sharding.get_abstract_mesh().update(abstract_device=gpu)):
        traced = differentiated.trace(*rounded, batch, kernel=True)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@__gpu$xla.gpu.triton(") == 3
    assert all(f'name = "{kind}"' in text for kind in KINDS)


@pytest.mark.parametrize(("capability", "used"), [("7.5", ""), ("8.0", "gpu"), ("9.0", "gpu")])
def test_a_gpu_before_ampere_has_no_triton_and_uses_plain_attention(capability, used):
    """XLA refuses such a kernel for a T4, which many free notebooks have."""
    device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
    mesh = types.SimpleNamespace(devices=np.array([device]))
    assert platform_defaults.kernel(base.get_config(), mesh) == used


@pytest.mark.parametrize(
    ("platform", "attention", "used"), [("gpu", "auto", True), ("gpu", "reference", False), ("cpu", "auto", False)]
)
def test_a_run_on_gpus_uses_the_kernel(monkeypatch, platform, attention, used):
    monkeypatch.setattr(platform_defaults, "platform", lambda mesh: platform)
    config = base.get_config()
    config.model.update(dict(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=32))
    config.model.update(dict(attention=attention, dtype="bfloat16"))
    config.train.update(dict(global_batch=8, sequence_length=256, steps=4))
    config.mesh.fsdp = 8
    run = assembly.assemble(config)
    with mesh_context(run.mesh):
        program = jax.make_jaxpr(run.train_step)(run.abstract_state, run.abstract_batch)
    assert set(kernel_names(program.jaxpr)) == (set(KINDS) if used else set())
