# SPDX-License-Identifier: Apache-2.0
"""Tasks in language modelling: which tokens adapt, which count, and the same gradient on every mesh."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from core import assembly
from layers.attention import cpu_attention, kernels
from layers.inner_loop import InnerLoop
from objectives.language_modeling import LanguageModeling
from objectives.meta_language_modeling import MetaLanguageModeling, halves
from parallelism.mesh import mesh_context
from tests import one_step
from tests.support import assert_close, forward, make_model, model_config, packed_batch
from training import platform_defaults

INNER = InnerLoop("maml", num_steps=1, eval_steps=1, rate=0.05)
ROWS = [[9, 3], [4, 6], [6, 6], [5]]  # documents of a window of 12 tokens


def test_support_and_query_are_of_the_document_in_the_middle():
    batch = packed_batch(ROWS, 12, 37)
    kept = []
    for row in range(4):
        support, query = halves({name: array[row] for name, array in batch.items()})
        assert support["tokens"].shape == query["tokens"].shape == (1, 6)
        assert (np.concatenate([support["tokens"][0], query["tokens"][0]]) == batch["tokens"][row]).all()
        kept.append([int((part["segments"] > 0).sum()) for part in (support, query)])
    assert kept == [[6, 3], [2, 4], [6, 0], [0, 0]]


def test_the_loss_is_that_of_plain_rows_and_of_queries_after_a_step_on_the_support():
    graph, params = make_model(model_config(num_layers=1))
    batch = packed_batch(ROWS, 12, 37)
    objective = MetaLanguageModeling(4, 12, vocab_size=37, share=0.5, inner=INNER)

    def mean_loss(params, part):
        log_p = jax.nn.log_softmax(forward(graph, params, part))
        of_token = jnp.take_along_axis(log_p, part["targets"][..., None], axis=-1)[..., 0]
        return -jnp.sum(of_token * (part["segments"] > 0)) / jnp.maximum(1, (part["segments"] > 0).sum())

    @jax.jit
    def expected(params):
        total = 0.0
        for row, count in ((0, 3), (1, 4)):
            support, query = halves({name: array[row] for name, array in batch.items()})
            adapted = jax.tree.map(lambda p, g: p - 0.05 * g, params, jax.grad(mean_loss)(params, support))
            total += count * mean_loss(adapted, query)
        plain = {name: array[2:] for name, array in batch.items()}
        (of_plain, _), _ = LanguageModeling(2, 12).loss(nnx.merge(graph, params), {}, plain, None)
        return total, of_plain

    queries, plain = expected(params)
    loss = jax.jit(lambda params: objective.loss(nnx.merge(graph, params), {}, batch, None))
    (total, weight), (_, scalars) = loss(params)
    assert weight == 3 + 4 + 12 + 5
    assert_close(total, queries + plain)
    assert_close(scalars, {"loss": (plain, 17.0), "after_adaptation": (queries, 7.0)})


def test_halves_that_the_chunks_of_a_sequence_do_not_divide_have_chunks_of_their_own():
    """A sequence of 10 in 2 chunks has halves of 5."""
    graph, params = make_model(model_config(num_layers=1))
    batch = packed_batch([[10], [10]], 10, 37)
    whole, parts = (MetaLanguageModeling(2, 10, num_chunks=n, vocab_size=37, inner=INNER) for n in (1, 2))
    results = [jax.jit(lambda params, o=one: o.loss(nnx.merge(graph, params), {}, batch, None)[0])(params)
               for one in (whole, parts)]  # fmt: skip
    assert_close(*results)


def test_evaluation_reports_queries_before_and_after_adaptation():
    graph, params = make_model(model_config(num_layers=1))
    objective = MetaLanguageModeling(2, 12, vocab_size=37, share=1.0, inner=dataclasses.replace(INNER, eval_steps=3))
    row = packed_batch([[12]], 12, 37)
    batch = {name: np.concatenate([array, array[:, [*range(6), *range(6)]]]) for name, array in row.items()}
    figures = jax.jit(lambda params: objective.evaluate(nnx.merge(graph, params), batch))(params)
    assert figures.keys() == {"loss", "before_adaptation", "after_adaptation"}
    assert figures["before_adaptation"][1] == figures["after_adaptation"][1] == 12
    assert figures["after_adaptation"][0] < figures["before_adaptation"][0]  # its second row is the same text twice


def assembled(
    rows: int, length: int, *, method="maml", attention="reference", steps=1, share=1.0, learn_rates=False,
    dtype="float32", **mesh,
) -> assembly.Run:  # fmt: skip
    """Return a run in which the first `share` of the rows of each device are tasks."""
    config = one_step.small_config(**mesh)
    config.model.update(num_layers=1, attention=attention, dtype=dtype)
    config.train.update(objective="meta_language_modeling", global_batch=rows, sequence_length=length)
    config.meta.update(method=method, share=share, inner_rate=0.1, inner_steps=steps, learn_rates=learn_rates)
    one_step.simply_updated(config)
    return assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])


def test_the_work_counts_tasks_by_their_inner_steps_and_plain_rows_once():
    whole, half, plain = (
        assembled(8, 16, method=method, share=share, steps=2).flops_per_step
        for method, share in (("maml", 1.0), ("first_order_maml", 0.5), ("first_order_maml", 0.125))
    )
    assert whole / half == pytest.approx(3.5 / (0.5 * 1.5 + 0.5)) and plain / half == pytest.approx(1.0625 / 1.25)


def gradients(batch=None, **how) -> tuple:
    """Return gradients, scalars and figures of evaluation, always from the same weights."""
    batch = one_step.batch() if batch is None else batch
    run = assembled(*batch["tokens"].shape, **how)
    with mesh_context(run.mesh):
        batch = one_step.placed(batch, run.abstract_batch)
        _, scalars, found = run.train_step_with_grads(one_step.initial_state(run), batch)
        figures = run.eval_step(one_step.initial_state(run).params, batch)
    return jax.device_get((found, scalars, figures))


@functools.cache
def long_gradients(method: str, attention: str, **mesh) -> tuple:
    """Return those of windows whose halves are as long as both kernels need, after two steps on each task."""
    batch = packed_batch([[100, 156], [70, 140, 30]], 256, one_step.VOCAB)
    return gradients(batch, method=method, attention=attention, steps=2, **mesh)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "platform", "kernel"),
    [("first_order_maml", "tpu", kernels), ("reptile", "tpu", kernels), ("reptile", "cpu", cpu_attention)],
)
def test_methods_without_second_derivatives_compute_the_same_with_fused_attention(
    method, platform, kernel, monkeypatch
):
    """The TPU's is interpreted, on two devices, whose rows are in a shard_map in training and in none in evaluation."""
    expected, attend, served = long_gradients(method, "reference"), kernel.attend, []
    interpreted = functools.partial(kernels.splash.make_splash_mha, interpret=True)
    monkeypatch.setattr(kernels.splash, "make_splash_mha", interpreted)
    monkeypatch.setattr(kernel, "attend", lambda *qkv, **how: served.append(qkv) or attend(*qkv, **how))
    monkeypatch.setattr(platform_defaults, "platform", lambda mesh: platform)
    assert_close(long_gradients(method, "auto", fsdp=2 if platform == "tpu" else 1), expected)
    assert served


@pytest.mark.slow
def test_no_task_adapts_to_the_tasks_of_other_devices():
    """The weights are sharded, but a task's own gradient is never reduced over devices: loss, gradients, evaluation."""
    assert_close(gradients(data=2, fsdp=4), gradients())


@pytest.mark.slow
def test_tasks_and_plain_rows_of_all_devices_have_the_gradients_of_one_device():
    """The first row of each device is a task; one device has all tasks first. Learned step sizes have gradients too."""
    batch = one_step.batch()
    tasks_first = {name: np.concatenate([rows[::2], rows[1::2]]) for name, rows in batch.items()}
    on_mesh = gradients(batch, share=0.5, learn_rates=True, data=2, fsdp=4)
    assert_close(on_mesh[:2], gradients(tasks_first, share=0.5, learn_rates=True)[:2])


def test_in_bfloat16_tasks_and_plain_rows_have_one_gradient_in_float32():
    run = assembled(16, 24, method="first_order_maml", share=0.5, dtype="bfloat16", fsdp=4)
    with mesh_context(run.mesh):
        *_, found = jax.eval_shape(run.train_step_with_grads, run.abstract_state, run.abstract_batch)
    assert {gradient.dtype for gradient in jax.tree.leaves(found)} == {np.dtype(np.float32)}
