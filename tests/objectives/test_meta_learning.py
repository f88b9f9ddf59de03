# SPDX-License-Identifier: Apache-2.0
"""Meta-learning objectives: what a task's loss is, what weighs, and that reading examples is learning."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from core import assembly
from input_pipeline.tasks.task_windows import LinearMaps
from layers.inner_loop import InnerLoop
from models import mlp_regressor
from objectives import meta_learning
from objectives.meta_learning import CROSS_ENTROPY, SQUARED, GradientBased, Prototypical
from parallelism.mesh import mesh_context
from settings import loading, validation
from tests.support import assert_close, model_config

INNER = InnerLoop("maml", num_steps=1, eval_steps=2, rate=0.1)


@functools.cache
def regressor(output_dim: int):
    """Return (graph, parameters) of a small network of three inputs."""
    config = model_config(num_layers=1, mlp_dim=6, input_dim=3, output_dim=output_dim)
    graph, state = nnx.split(mlp_regressor.make(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    return graph, nnx.to_pure_dict(state)


def outputs(params: dict, x: jax.Array) -> jax.Array:
    layers = params["layers"]
    return jax.nn.relu(x @ layers["0"]["kernel"] + layers["0"]["bias"]) @ layers["1"]["kernel"] + layers["1"]["bias"]


def test_a_query_counts_after_adaptation_and_padding_does_not():
    graph, params = regressor(1)
    objective = GradientBased(3, 7, 4, 3, SQUARED, 1, INNER)
    batch = objective.random_batch(jax.random.key(1))
    x, y = (jax.lax.bitcast_convert_type(batch[name], jnp.float32) for name in ("inputs", "targets"))
    assert batch["tasks"].tolist() == [1, 2, 0] and {k: v.shape for k, v in batch.items()} == objective.batch()

    def error(params, x, y):
        return jnp.mean(jnp.square(outputs(params, x)[:, 0] - y))

    @jax.jit
    def expected(params):
        sums = []
        for steps in (0, 1, 2):
            total = 0.0
            for task in (0, 1):
                adapted = params
                for _ in range(steps):
                    slopes = jax.grad(error)(adapted, x[task, :4], y[task, :4])
                    adapted = jax.tree.map(lambda p, g: p - 0.1 * g, adapted, slopes)
                total += 3 * error(adapted, x[task, 4:], y[task, 4:])
            sums.append(total)
        return sums

    @jax.jit
    def actual(params):
        model = nnx.merge(graph, params)
        return objective.loss(model, {}, batch, None), objective.evaluate(model, batch)

    before, after_one, after_two = expected(params)
    ((total, weight), (carry, scalars)), figures = actual(params)
    assert weight == 6 and carry == {}
    assert_close([total, scalars["loss"][0]], [after_one, after_one])
    assert_close(
        figures, {"before_adaptation": (before, 6.0), "after_adaptation": (after_two, 6.0), "loss": (after_two, 6.0)}
    )


@pytest.mark.parametrize(("method", "passes"), [("first_order_maml", 4 + 3), ("maml", 3 * 4 + 3), ("reptile", 7 + 1)])
def test_the_work_of_a_task_counts_its_inner_steps(method, passes):
    """The compiler's own count is up to a fifth apart: it has element-wise work, and no gradient of the inputs."""
    config = model_config(num_layers=2, mlp_dim=64, input_dim=16, output_dim=1)
    graph, state = nnx.split(mlp_regressor.make(config, dtype=jnp.float32, rngs=nnx.Rngs(0)))
    objective = GradientBased(8, 7, 4, 16, SQUARED, 1, dataclasses.replace(INNER, method=method))
    of_model = mlp_regressor.flops_per_token(config, 7)
    found = objective.flops_per_token(lambda: of_model, frozen=False)
    assert found == pytest.approx(of_model * passes / 7)
    twice = dataclasses.replace(objective, inner=dataclasses.replace(objective.inner, num_steps=2))
    more = twice.flops_per_token(lambda: of_model, frozen=False) - found
    assert more == pytest.approx(of_model * {"first_order_maml": 4, "maml": 12, "reptile": 7}[method] / 7)

    def minimized(params, batch):
        return objective.loss(nnx.merge(graph, params), {}, batch, None)[0][0]

    step = jax.jit(jax.grad(minimized)).lower(nnx.to_pure_dict(state), objective.random_batch(jax.random.key(0)))
    assert step.compile().cost_analysis()["flops"] / (8 * 7) == pytest.approx(found, rel=0.2)


def test_prototypes_are_class_means_and_logits_are_distances_from_them():
    graph, params = regressor(2)
    objective = Prototypical(1, 9, 6, 3, CROSS_ENTROPY, 2, INNER)
    classes = np.array([1, 0, 3, 1, 1, 0, 3, 1, 0])  # 2 has no example
    batch = objective.random_batch(jax.random.key(0)) | {"targets": classes[None].astype(np.int32), "tasks": np.ones(1)}
    x = np.asarray(jax.lax.bitcast_convert_type(batch["inputs"], jnp.float32))[0]
    embedded = np.asarray(outputs(params, x), np.float64)
    means = {c: embedded[:6][classes[:6] == c].mean(0) for c in (0, 1, 3)}
    logits = np.array([[-((e - means[c]) ** 2).sum() for c in (0, 1, 3)] for e in embedded[6:]])
    log_p = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    right = [{0: 0, 1: 1, 3: 2}[c] for c in classes[6:]]

    def total(params):
        (total, weight), (_, scalars) = objective.loss(nnx.merge(graph, params), {}, batch, None)
        return total, (weight, scalars)

    (value, (weight, scalars)), gradients = jax.jit(jax.value_and_grad(total, has_aux=True))(params)
    assert weight == 3
    assert_close(value, -log_p[range(3), right].sum())
    assert_close(scalars["accuracy"][0], np.float32((logits.argmax(1) == right).sum()))
    assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradients))


def test_prototypes_are_made_without_products_of_matrices():
    """A TPU would round the embeddings for them to bfloat16."""

    def total(support, query):
        return meta_learning.prototype_logits(support, jnp.array([0, 0, 1]), query).sum()

    program = str(jax.make_jaxpr(jax.grad(total, argnums=(0, 1)))(jnp.ones((3, 4)), jnp.ones((2, 4))))
    assert "mul" in program and "dot_general" not in program


def test_a_method_chooses_its_objective():
    config = loading.load("configs/meta_sinusoid.py", "", {}).config
    for method, kind in (("maml", "GradientBased"), ("prototypical", "Prototypical"), ("in_context", "InContext")):
        config.meta.method = method
        assert type(meta_learning.make(config)).__name__ == kind


@pytest.mark.slow
def test_a_decoder_that_reads_examples_approaches_least_squares():
    """The error of one that ignores them is the variance of y, 2; that of least squares from 4 noiseless ones is 0."""
    typed = {
        "model.input_dim": "2", "model.num_layers": "2", "model.embed_dim": "32", "model.num_heads": "2",
        "model.num_kv_heads": "2", "model.mlp_dim": "64", "train.sequence_length": "8", "meta.support": "4",
        "train.steps": "1000", "optimizer.learning_rate": "0.003", "train.global_batch": "64",
    }  # fmt: skip
    config = loading.load("configs/meta_in_context.py", "", typed).config
    validation.validate(config, 1)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    windows = {stream: LinearMaps(0, stream, 2) for stream in ("train", "heldout")}
    batches = windows["train"].read(np.arange(1000 * 64), 8)
    with mesh_context(run.mesh):
        step = functools.partial(jax.lax.scan, lambda state, batch: run.train_step(state, batch, {}))
        state, _ = jax.jit(step)(run.init(), {k: v.reshape(1000, 64, *v.shape[1:]) for k, v in batches.items()})
        figures = run.eval_step(run.eval_params(state, {}), windows["heldout"].read(np.arange(300), 8))
    means = {name: float(total / weight) for name, (total, weight) in figures.items()}
    assert means["before_adaptation"] == pytest.approx(2, rel=0.3)
    assert means["loss"] == means["after_adaptation"] < 0.25, means
