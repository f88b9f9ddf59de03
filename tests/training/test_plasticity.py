# SPDX-License-Identifier: Apache-2.0
"""Methods of plasticity replace the units that they should, on any mesh, and leave everything else as it was."""

import functools
import importlib
import json
import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict

import train
from configs import digits
from core import assembly
from core.callbacks import Callback
from core.evaluations.effective_rank import of_matrix, triangles
from layers.axes import declared_axes, declared_stddevs
from models import mlp_classifier
from parallelism.mesh import mesh_context
from settings.validation import validate
from tests.one_step import batch, initial_state, placed, small_config
from tests.support import ROOT, one_device_mesh
from training.optimizers import Weights, reset_moments
from training.plasticity import replacement
from training.plasticity.methods import METHODS
from training.step_transform import StepChange, StepContext
from training.transforms import plasticity, plasticity_measures

ROWS, PIXELS, UNITS, CLASSES = 6, 5, 8, 3
FIRST, SECOND, LAST = (("layers", str(n), "kernel") for n in range(3))


def after(steps: int, method: str, num_microbatches: int = 1, **mesh):
    """Return (state, scalars) after steps on one batch, with a method that acts in each step."""
    config = small_config(**mesh)
    config.model.num_layers = 1
    config.train.gradient_accumulation = num_microbatches
    config.optimizer.update(schedule="constant", learning_rate=1e-3)
    config.plasticity.update(method=method, rate=0.05, maturity=0, measure=5, decay=0.5, dormant_below=0.5)
    run = assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])
    state, rows = initial_state(run), placed(batch(), run.abstract_batch)
    with mesh_context(run.mesh):
        for _ in range(steps):
            state, scalars = run.train_step(state, rows)
    return jax.device_get((state, scalars))


@pytest.mark.slow
def test_a_method_does_the_same_on_another_mesh():
    """Each device has its own tokens and units, and the measures of microbatches and devices add up."""
    expected, scalars = after(2, "continual_backprop")
    found, others = after(2, "continual_backprop", num_microbatches=2, data=2, fsdp=2, model=2)
    assert scalars["units_replaced"] == others["units_replaced"] > 0
    for name in ("dormant_share", "weight_norm"):
        np.testing.assert_allclose(others[name], scalars[name], rtol=1e-4)
    names = ("plasticity", "plasticity_measures")
    found, expected = (flatten_dict({"params": s.params} | {n: s.extra[n] for n in names}) for s in (found, expected))
    for path, leaf in expected.items():
        scale = np.abs(leaf).max() + 1e-6
        np.testing.assert_allclose(found[path] / scale, leaf / scale, atol=3e-3, err_msg=str(path))


@functools.cache
def classifier():
    """Return (weights, parameters, forward) of a small classifier with random biases."""
    config = digits.get_config()
    config.model.update(num_layers=2, mlp_dim=UNITS, max_length=PIXELS, vocab_size=CLASSES, dtype="float32")
    with mesh_context(one_device_mesh()):
        model = mlp_classifier.make(config.model, dtype=jnp.float32, scan=False, rngs=nnx.Rngs(1))
        graph, state = nnx.split(model)
        axes = {path: names for path, (_, names) in declared_axes(state).items()}
        weights = Weights(axes, stddevs=declared_stddevs(state), units=mlp_classifier.hidden_units(config.model))

    def forward(params, inputs):
        with mesh_context(one_device_mesh()):
            return nnx.merge(graph, params)(inputs)

    return weights, nnx.to_pure_dict(state), forward


def keys(**changes):
    given = dict(rate=0.5 / UNITS, maturity=0, decay=0.9, every=1, dormant_below=0.025, strength=0.1)
    return types.SimpleNamespace(**given | {"shrink": 0.25, "perturb": 0.5} | changes)


@functools.cache
def compiled(method: str, **changes):
    """Return (the method, its update of (step, change, memory, measures) as one program)."""
    transform = METHODS[method](classifier()[0], keys(**changes), 7)

    def update(step, change, memory, measured):
        context = StepContext(types.SimpleNamespace(step=step), {}, {}, 0.0, {}, None, None, 0, measured)
        return transform.update(context, change, memory)

    return transform, jax.jit(update)


def updated(method: str, measured: dict, steps=1, *, with_moments: bool = True, accepted: bool = True, **changes):
    """Return (change, memory, scalars) after updates with the same measures [2, UNITS] and no gradient."""
    _, params, _ = classifier()
    (transform, update), state = compiled(method, **changes), optax.adam(1e-3).init(params)
    moments = jax.tree.map(lambda leaf: leaf + with_moments if leaf.ndim else leaf, state)
    memory, change = transform.init(params), StepChange(params, moments, jnp.bool_(accepted))
    for step in range(steps):
        change, memory, scalars = update(jnp.int32(step), change._replace(optimizer=moments), memory, measured)
    return jax.device_get((change, memory, scalars))


@pytest.mark.parametrize("method", METHODS)
def test_the_memory_has_the_types_of_the_arrays_that_replace_it(method):
    """A weak type would change after the first step, and the second one would be compiled again."""
    weights, params, _ = classifier()
    memory = METHODS[method](weights, keys(), 7).init(params)
    assert not [array for array in jax.tree.leaves(memory) if jnp.asarray(array).weak_type]


def constant_activations():
    """Return (inputs that are all the same, what is measured on them)."""
    _, params, _ = classifier()
    inputs_BT = jnp.full((ROWS, PIXELS), 9)
    x_BF, found = inputs_BT / 16, []
    for layer in "01":
        x_BF = jax.nn.relu(x_BF @ params["layers"][layer]["kernel"] + params["layers"][layer]["bias"])
        found.append(x_BF)
    h_LBF = jnp.stack(found)
    measured = {"mean": h_LBF.mean(axis=1), "square": (h_LBF**2).mean(axis=1), "size": jnp.abs(h_LBF).mean(axis=1)}
    return inputs_BT, {f"mlp_hidden.{name}": array for name, array in measured.items()}


@pytest.mark.slow
def test_continual_backprop_keeps_the_function_and_zeroes_weights_and_moments():
    """With constant inputs the mean of a unit is its value, so its contribution moves to the next bias."""
    weights, params, forward = classifier()
    inputs, measured = constant_activations()
    change, memory, scalars = updated("continual_backprop", measured, steps=2)
    replaced = [np.squeeze(flatten_dict(memory["age"])[units.outgoing[0]], 1) == 0 for units in weights.units]
    assert [mask.sum() for mask in replaced] == [1, 1] and scalars["units_replaced"] == 2
    np.testing.assert_allclose(forward(change.params, inputs), forward(params, inputs), atol=1e-6)
    flat, moments = flatten_dict(change.params), change.optimizer[0]
    for mask, incoming, outgoing in zip(replaced, (FIRST, SECOND), (SECOND, LAST), strict=True):
        assert not flat[outgoing][mask].any()
        assert (flat[incoming][:, mask] != flatten_dict(params)[incoming][:, mask]).all()
        for moment in map(flatten_dict, (moments.mu, moments.nu)):
            assert not moment[outgoing][mask].any() and not moment[incoming][:, mask].any()
    np.testing.assert_array_equal(flat[LAST][~replaced[1]], flatten_dict(params)[LAST][~replaced[1]])
    assert flatten_dict(moments.mu)[LAST][~replaced[1]].all()


def test_the_least_useful_mature_unit_is_replaced_at_the_rate():
    """The reference computes the published recurrences with numpy, one unit at a time."""
    rng = np.random.default_rng(0)
    mean = rng.uniform(0.1, 1, (2, UNITS)).astype(np.float32)
    square = mean**2 + rng.uniform(0.01, 1, (2, UNITS)).astype(np.float32)
    measured = {"mlp_hidden.mean": jnp.asarray(mean), "mlp_hidden.square": jnp.asarray(square)}
    _, params, _ = classifier()
    incoming = np.abs(flatten_dict(params)[FIRST]).mean(axis=0)
    outgoing = np.abs(flatten_dict(params)[SECOND]).mean(axis=1)
    utilities = np.sqrt(square[0] - mean[0] ** 2) * outgoing / incoming
    for steps, number in ((3, 0), (4, 1), (5, 1)):  # two steps to mature, then half a unit a step
        _, memory, scalars = updated("redraw", measured, steps, maturity=2)
        young = np.squeeze(flatten_dict(memory["age"])[SECOND], 1) < steps
        assert young.sum() == number
        assert number == 0 or young.argmax() == utilities.argmin()
        assert scalars["units_replaced"] == 2 * number
    np.testing.assert_allclose(np.squeeze(flatten_dict(memory["due"])[SECOND]), 7 / 16, rtol=1e-6)  # seven are mature


@pytest.mark.parametrize("method, when", [("redraw", {"maturity": 0, "rate": 0.2}), ("redo", {"every": 1})])
def test_a_rejected_update_replaces_no_units(method, when):
    size = np.ones((2, UNITS), np.float32)
    size[:, 3] = 0
    measured = {f"mlp_hidden.{name}": jnp.asarray(size) for name in ("mean", "square", "size")}
    taken, rejected = (updated(method, measured, accepted=accepted, **when)[2] for accepted in (True, False))
    assert taken["units_replaced"] > 0 and rejected["units_replaced"] == 0


def test_the_norm_of_a_step_is_that_of_the_weights_that_it_leaves():
    """A rejected update, as one that is not finite, leaves those of before."""
    weights, params, _ = classifier()
    measures = plasticity_measures.PlasticityMeasures(weights, 0.5, 0.1)
    state = types.SimpleNamespace(step=jnp.int32(0), params=params)
    for factor, accepted, expected in ((2.0, True, 2.0), (np.nan, False, 1.0)):
        measured = {"mlp_hidden.size": jnp.full((2, UNITS), factor)}
        context = StepContext(state, {}, {}, 0.0, {}, None, None, 0, measured)
        change = StepChange(jax.tree.map(lambda leaf, factor=factor: factor * leaf, params), (), jnp.bool_(accepted))
        _, _, scalars = measures.update(context, change, measures.init(params))
        np.testing.assert_allclose(scalars["weight_norm"], expected * optax.tree.norm(params), rtol=1e-6)
        assert scalars["dormant_share"] == (0.0 if accepted else 1.0), "an activity of 0, as before the first step"


def test_redraw_draws_both_sides_of_a_unit_from_their_initial_distributions():
    _, measured = constant_activations()
    change, memory, _ = updated("redraw", measured, steps=2)
    _, params, _ = classifier()
    replaced = np.squeeze(flatten_dict(memory["age"])[LAST], 1) == 0
    new, old = (flatten_dict(tree)[LAST][replaced] for tree in (change.params, params))
    assert new.shape == (1, CLASSES) and new.all() and not np.isclose(new, old).any()
    draws = replacement.Surgeon(
        StepChange({"a": {"w": jnp.zeros((400, 4, 300))}}, (), True), {("a", "w"): 0.3}, jax.random.key(0)
    )._drawn(("a", "w"), 2, jnp.ones((400, 1, 4), bool))
    assert draws.shape == (400, 4, 300)
    np.testing.assert_allclose([draws.mean(), draws.std()], [0.0, 0.3], atol=2e-3)


def test_redo_replaces_dormant_units_every_so_many_steps():
    """A unit is dormant if its share of the layer's mean activation is at most the threshold (arXiv:2302.12902)."""
    size = np.ones((2, UNITS), np.float32)
    size[0, 3], size[1, 5] = 0.02, 0.03  # of a mean of nearly 1: one below 0.025, the other above it
    measured = {"mlp_hidden.size": jnp.asarray(size)}
    _, params, _ = classifier()
    change, _, scalars = updated("redo", measured, steps=2, every=3)
    assert scalars["units_replaced"] == 0
    jax.tree.map(np.testing.assert_array_equal, change.params, params)
    change, memory, scalars = updated("redo", measured, steps=3, every=3)
    assert scalars["units_replaced"] == 1
    new, old = flatten_dict(change.params), flatten_dict(params)
    assert not new[SECOND][3].any() and (new[FIRST][:, 3] != old[FIRST][:, 3]).all()
    np.testing.assert_array_equal(new[LAST], old[LAST])
    assert not flatten_dict(change.optimizer[0].mu)[SECOND][3].any()
    assert np.squeeze(flatten_dict(memory["activity"])[SECOND])[3] > 0.1  # it is not dormant again


def test_l2_init_adds_the_gradient_of_the_distance_from_the_start():
    weights, params, _ = classifier()
    transform = METHODS["l2_init"](weights, keys(), 7)
    moved = jax.tree.map(lambda leaf: leaf + 0.5, params)
    state = types.SimpleNamespace(params=moved, extra={"plasticity": transform.init(params)})

    def term(theta):
        return 0.1 * optax.tree.norm(jax.tree.map(jnp.subtract, theta, params), squared=True)

    zeros = jax.tree.map(jnp.zeros_like, params)
    found, wanted = jax.jit(lambda: (transform.change_gradients(zeros, state), jax.grad(term)(moved)))()
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5), found, wanted)


def test_shrink_perturb_shrinks_weights_and_adds_initial_ones():
    weights, params, _ = classifier()
    change, memory, _ = updated("shrink_perturb", {}, steps=1)
    new, old = flatten_dict(change.params), flatten_dict(params)
    draws = (new[SECOND] - 0.75 * old[SECOND]) / 0.5
    assert memory == {} and 0.5 < draws.std() / weights.stddevs[SECOND] < 1.5
    np.testing.assert_array_equal(new[("layers", "0", "bias")], old[("layers", "0", "bias")])


def test_shrink_perturb_leaves_the_constants_of_a_recursive_model_alone():
    path, params = ("initial", "high"), {"initial": {"high": jnp.ones(4)}}
    weights = Weights({path: ("constant",)}, stddevs={path: 1.0})
    change = StepChange(params, (), jnp.bool_(True))
    context = StepContext(types.SimpleNamespace(step=jnp.int32(0)), {}, {}, 0.0, {}, None, None, 0, {})
    change, _, _ = METHODS["shrink_perturb"](weights, keys(), 7).update(context, change, {})
    np.testing.assert_array_equal(change.params["initial"]["high"], params["initial"]["high"])


def test_a_method_that_replaces_units_needs_a_model_that_names_some():
    config = small_config(fsdp=1)
    config.plasticity.method = "redo"
    with pytest.raises(ValueError, match="redo replaces hidden units, and"):
        plasticity.make(config, Weights({}), None)


def test_the_effective_rank_counts_directions():
    """k equal singular values have rank k; one has rank 1; none has rank 0."""
    basis, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((9, 9)))
    for count in (1, 4):
        x = basis[:, :count] @ basis[:, :count].T
        assert of_matrix(x) == pytest.approx(count, rel=1e-4)
    assert of_matrix(np.zeros((3, 3))) == 0.0


def test_the_effective_rank_of_collapsed_layers_is_that_of_their_exact_singular_values():
    """Rounding must not pass for directions: one direction is rank 1, and the mean of all units dominates another."""
    rng = np.random.default_rng(0)
    single = np.outer(rng.standard_normal(512), rng.standard_normal(1024))
    nearly = 10 + 0.001 * rng.standard_normal((512, 1024))
    found = list(map(of_matrix, np.asarray(triangles(jnp.stack([single, nearly]).astype(jnp.float32)))))
    assert found == pytest.approx([1.0, of_matrix(nearly)], abs=1e-3)


def images(path):
    """Write rows whose label is which half of the pixels is brighter, and return a configuration to train on them."""
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 17, (200, 8))
    labels = pixels[:, :4].sum(axis=1) > pixels[:, 4:].sum(axis=1)
    np.savetxt(path, np.column_stack([pixels, labels]), "%d", ",")
    config = digits.get_config()
    config.data.path = str(path)
    config.model.update(num_layers=2, mlp_dim=16, max_length=8, vocab_size=2, dtype="float32")
    config.train.update(sequence_length=8, global_batch=8, steps=6, save_every=0, eval_every=0, log_every=1)
    config.plasticity.update(method="continual_backprop", rate=0.05, maturity=1, measure=3)
    config.logging.tensorboard = config.logging.report = False
    return config


@pytest.mark.slow
def test_a_resumed_run_replaces_the_same_units_and_reports_them(tmp_path):
    """Memory and draws continue bit for bit, and the diagnostics are in metrics.jsonl."""

    class Last(Callback):
        def on_step(self, job, state, step):
            self.state, self.shardings = jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, state)

    def run(folder, steps):
        config, last = images(tmp_path / "images.csv"), Last()
        config.train.steps = steps
        config.mesh.update(data=2, fsdp=4)
        validate(config, 8)
        train.train(config, tmp_path / folder, callbacks=[last])
        return last

    whole = run("whole", 6)
    run("parts", 3)
    jax.tree.map(np.testing.assert_array_equal, whole.state, run("parts", 6).state)
    assert whole.shardings.extra["plasticity"]["age"]["layers"]["1"]["kernel"].spec[0] is not None
    found = list(map(json.loads, (tmp_path / "whole/metrics.jsonl").read_text().splitlines()))
    trained = [line for line in found if line["kind"] == "train"][-1]
    assert trained["units_replaced"] > 0 and 0 <= trained["dormant_share"] <= 1 and trained["weight_norm"] > 0
    ranks = {line["step"]: line["effective_rank"] for line in found if line["kind"] == "plasticity"}
    assert set(ranks) == {3, 6} and all(1 <= rank <= 16 for rank in ranks.values())


@pytest.mark.parametrize("name", ["plasticity", "plasticity_decoder"])
def test_the_gate_of_a_benchmark_passes_by_its_recorded_figures_and_fails_if_no_method_acts(monkeypatch, name):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = importlib.import_module(name)
    section = (ROOT / "benchmarks" / "RESULTS.md").read_text().partition(f"\n## {name}\n")[2].partition("\n## ")[0]
    figures = {key: float(value) for key, value in re.findall(r"^\| (\w+) \| ([\d.]+) \|$", section, re.M)}
    benchmark.judge(figures)
    base = "adam" if name == "plasticity" else "plain"
    alike = {key: figures.get(f"{base}_{key.rpartition('_')[2]}", value) for key, value in figures.items()}
    with pytest.raises(SystemExit, match="continual_backprop"):
        benchmark.judge(alike)


def test_directions_count_by_their_singular_values_and_not_by_the_squares():
    assert of_matrix(np.diag([3.0, 1.0])) == pytest.approx(math.exp(-0.75 * math.log(0.75) - 0.25 * math.log(0.25)))


def test_second_moments_by_row_and_column_stay_where_entries_are_replaced():
    params = {"w": jnp.ones((128, 256))}
    optimizer = optax.scale_by_factored_rms()
    state = optimizer.update({"w": jnp.ones((128, 256))}, optimizer.init(params), params)[1]
    after = reset_moments(state, {("w",): jnp.zeros((128, 256), bool).at[3].set(True)})
    jax.tree.map(np.testing.assert_array_equal, after, state)
