# SPDX-License-Identifier: Apache-2.0
"""Each optimizer against its paper, what decays, clipping, what muP multiplies, and where its state lies."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from configs import base
from core import assembly
from layers import error_corrector
from layers.adapters import INPUTS, LoRA, add_adapters
from layers.axes import declared_axes
from models import decoder_lm, vector_decoder
from parallelism.mesh import mesh_context
from tests.one_step import batch, placed, small_config
from tests.support import assert_close, make_model, model_config
from training import optimizers

# A stack of 2 layers of a matrix, a bias of it, and an embedding: every kind of parameter there is.
AXES = {
    ("blocks", "kernel"): ("layers", "embed", "mlp"), ("blocks", "bias"): ("layers", "mlp"),
    ("blocks", "scale"): ("layers", "norm"), ("embedding",): ("vocab", "embed"),
}  # fmt: skip
SHAPES = {
    ("blocks", "kernel"): (2, 3, 5),
    ("blocks", "bias"): (2, 5),
    ("blocks", "scale"): (2, 3),
    ("embedding",): (7, 3),
}
RATES = (0.0, 0.1, 0.07)


def random_tree(seed: int) -> dict:
    rng = np.random.default_rng(seed)
    return unflatten_dict({path: rng.standard_normal(shape).astype(np.float32) for path, shape in SHAPES.items()})


def trajectory(name: str, width_multiplier: float = 1.0, **changes) -> list[dict]:
    """Return the parameters after each of three steps, by the optimizer as a run makes it."""
    config = base.get_config().optimizer
    config.update(dict(clip_norm=0.0, weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-3) | changes)
    weights = optimizers.Weights(AXES, width_multiplier)
    direction = getattr(optimizers, name)(config, weights)
    optimizer = optimizers.make(direction, config, lambda step: jnp.array(RATES)[step], weights)
    params = random_tree(0)
    state, path, update = optimizer.init(params), [], jax.jit(optimizer.update)
    for step in range(3):
        updates, state = update(random_tree(1 + step), state, params)
        params = optax.apply_updates(params, updates)
        path.append(params)
    return path


def by_hand(direction, decay=0.3) -> list[dict]:
    """The same with numpy: w <- w - rate * (direction + decay * w), where `direction` keeps a state a weight."""
    params, states = flatten_dict(jax.tree.map(np.float64, random_tree(0))), {path: {} for path in SHAPES}
    path = []
    for step, rate in enumerate(RATES):
        gradients = flatten_dict(random_tree(1 + step))
        for keys, w in params.items():
            update = direction(keys[-1], w, np.float64(gradients[keys]), states[keys], step + 1)
            params[keys] = w - rate * (update + decay * (keys[-1] == "kernel") * w)
        path.append(unflatten_dict(params))
    return path


def adam(name, w, g, state, t):
    m, v = state.get("m", 0.0), state.get("v", 0.0)
    state["m"], state["v"] = m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g**2
    return m / (1 - 0.8**t) / (np.sqrt(v / (1 - 0.9**t)) + 1e-3)


def lion(name, w, g, state, t):
    m = state.get("m", 0.0)
    state["m"] = 0.9 * m + 0.1 * g
    return np.sign(0.8 * m + 0.2 * g)


def sgd(name, w, g, state, t):
    state["m"] = 0.8 * state.get("m", 0.0) + g
    return state["m"]


def adafactor(name, w, g, state, t):
    """Algorithm 4 with second moments unfactored, as they are for small weights; a layer at a time."""
    beta = 1 - t**-0.8
    state["v"] = v = beta * state.get("v", 0.0) + (1 - beta) * (g**2 + 1e-30)
    u = g / np.sqrt(v)
    dims = tuple(range(1, w.ndim)) if name != "embedding" else None

    def rms(x):
        return np.sqrt(np.mean(x**2, axis=dims, keepdims=True))

    return u / np.maximum(1, rms(u)) * np.maximum(1e-3, rms(w))


@pytest.mark.parametrize("direction", [adam, lion, sgd, adafactor], ids=lambda f: f.__name__)
def test_an_optimizer_is_the_algorithm_of_its_paper_with_decay_on_matrices_alone(direction):
    name = {"adam": "adamw"}.get(direction.__name__, direction.__name__)
    assert_close(trajectory(name), by_hand(direction))


def test_adafactor_keeps_second_moments_of_large_matrices_by_row_and_column():
    """Equation 4 of arXiv:1804.04235: their outer product over the sum, for each layer of the stack."""
    axes = {("kernel",): ("layers", "embed", "mlp")}
    config, rng = base.get_config().optimizer, np.random.default_rng(0)
    optimizer = optimizers.adafactor(config, optimizers.Weights(axes))
    weight, gradient = (rng.standard_normal((2, 128, 130)) for _ in range(2))
    state = optimizer.init({"kernel": weight})
    held = [leaf.shape for leaf in jax.tree.leaves(state) if leaf.size > 2]
    assert sorted(held) == [(2, 128), (2, 130)]
    updates, _ = jax.jit(optimizer.update)({"kernel": gradient}, state, {"kernel": weight})
    for layer in range(2):
        squares, w = gradient[layer] ** 2, weight[layer]
        second = squares.mean(1, keepdims=True) * squares.mean(0, keepdims=True) / squares.mean()
        u = gradient[layer] / np.sqrt(second)
        u /= max(1, np.sqrt((u**2).mean()))
        assert_close(updates["kernel"][layer], u * np.sqrt((w**2).mean()))


def test_adafactor_takes_a_model_without_stacked_layers():
    """Such as an MLP, a recursive model or a value head."""
    optimizer = optimizers.adafactor(base.get_config().optimizer, optimizers.Weights({("kernel",): ("embed", "mlp")}))
    params = {"kernel": np.eye(3, dtype=np.float32)}
    updates, _ = jax.jit(optimizer.update)(params, optimizer.init(params), params)
    assert np.isfinite(updates["kernel"]).all() and np.abs(updates["kernel"]).max() > 0


def test_muon_orthogonalises_each_layers_matrix_and_leaves_the_rest_to_adam():
    """The update of a matrix has near-equal singular values, of 0.2 * sqrt(its longer side) each."""
    path, expected = trajectory("muon", weight_decay=0.0), by_hand(adam, decay=0.0)
    before = random_tree(0)["blocks"]["kernel"]
    for layer in range(2):
        update = (path[1]["blocks"]["kernel"] - path[0]["blocks"]["kernel"])[layer] / RATES[1]
        singular = np.linalg.svd(update, compute_uv=False) / (0.2 * np.sqrt(5))
        assert 0.6 < singular.min() <= singular.max() < 1.3, singular
    np.testing.assert_array_equal(path[0]["blocks"]["kernel"], before)  # at a rate of 0
    for name in ("bias", "scale"):
        assert_close(path[2]["blocks"][name], expected[2]["blocks"][name])
    assert_close(path[2]["embedding"], expected[2]["embedding"])


def test_the_momentum_of_muon_is_that_of_the_configuration():
    """Without momentum an update depends on its own gradient alone."""
    config, weights = base.get_config().optimizer, optimizers.Weights({("kernel",): ("embed", "mlp")})
    config.beta1 = 0.0
    first, second = ({"kernel": random_tree(seed)["blocks"]["kernel"][0]} for seed in (1, 2))
    optimizer = optimizers.muon(config, weights)
    begun = optimizer.init(first)
    alone, _ = optimizer.update(second, begun, first)
    after, _ = optimizer.update(second, optimizer.update(first, begun, first)[1], first)
    assert_close(after, alone)


def test_muon_treats_heads_as_one_side_of_their_matrix():
    matrix = optax.contrib.MuonDimensionNumbers
    assert optimizers.matrix_dims(("layers", "embed", "heads", "head_dim")) == matrix((1,), (2, 3))
    assert optimizers.matrix_dims(("layers", "heads", "head_dim", "embed")) == matrix((3,), (1, 2))
    assert optimizers.matrix_dims(("mlp", "embed")) == matrix((1,), (0,))


VARIANTS = [{}, {"tie_embeddings": True, "qk_norm": True}, {"biases": "all"}]


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "-".join(changes) or "plain")
def test_norms_biases_and_embeddings_do_not_decay_and_every_matrix_does(changes):
    _, params = make_model(model_config(**changes))
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("stack.blocks."): flag
        for path, flag in jax.tree_util.tree_leaves_with_path(optimizers.is_decayed(params))
    }
    matrices = {f"attention.{name}" for name in ("query", "key", "value", "out")}
    matrices |= {f"mlp.{name}" for name in ("gate", "up", "down")} | ({"head.kernel"} & decayed.keys())
    assert {name for name, flag in decayed.items() if flag} == matrices
    assert any(name.endswith("bias") for name in decayed) == ("biases" in changes)


@pytest.mark.parametrize("changes", VARIANTS, ids=lambda changes: "-".join(changes) or "plain")
def test_the_kinds_of_a_decoders_parameters_follow_from_their_axes(changes):
    config = small_config()
    config.model.update(changes)
    trained = assembly.assemble(config, devices=jax.devices()[:1]).models.trained
    for path, (_, axes) in declared_axes(trained).items():
        expected = "matrix" if path[-1] in ("query", "key", "value", "out", "gate", "up", "down") else "vector"
        expected = "vocab" if path[-1] in ("embedding", "kernel") else expected
        assert optimizers.kind(axes) == optimizers.mup_role(axes) == expected, path


def test_muon_takes_each_expert_for_a_matrix_and_adam_the_router():
    dims = optimizers.matrix_dims(("layers", "experts", "expert_embed", "expert_mlp"))
    assert (dims.reduction_axis, dims.output_axis) == ((2,), (3,))
    assert optimizers.kind(("layers", "norm", "router")) == "vector"
    assert not optimizers.is_usual(("layers", "balance"))


def test_muon_takes_what_has_the_width_of_the_stream_and_another_dimension():
    """Of LoRA's pairs that is one factor. A run's state depends on this: it must not change."""
    declared = declared_axes(nnx.state(nnx.eval_shape(adapted), nnx.LoRAParam))
    kinds = {".".join(path[-2:]): optimizers.kind(names) for path, (_, names) in declared.items()}
    taken = {name for name, kind in kinds.items() if kind == "matrix"}
    assert taken == {"query.a", "key.a", "value.a", "gate.a", "up.a", "out.b", "down.b"}
    for of_recursive_model in ((None, "embed"), ("embed", None)):  # positions, halting
        assert optimizers.kind(of_recursive_model) == "matrix"
    assert optimizers.kind((None, "mlp")) == "vector"  # its convolution


WIDENED = {  # factors on the update of a model 4 times as wide: matrix, embedding, vectors
    "adamw": (1 / 4, 1 / 2, 1), "lion": (1 / 4, 1 / 2, 1), "muon": (1 / 2, 1 / 2, 1),
    "adafactor": (1 / 2, 1, 1), "sgd": (1, 1, 4),
}  # fmt: skip


@pytest.mark.parametrize("name", WIDENED)
def test_mup_multiplies_the_update_of_each_kind_of_parameter_but_not_its_decay(name):
    plain, wide, before = trajectory(name), trajectory(name, width_multiplier=4.0), random_tree(0)
    matrix, embedding, vector = WIDENED[name]
    decay = RATES[1] * 0.3 * before["blocks"]["kernel"]  # step 0 has a rate of 0

    def change(path, section, leaf):
        return (path[1][section][leaf] if leaf else path[1][section]) - (
            before[section][leaf] if leaf else before[section]
        )

    assert_close(change(wide, "blocks", "kernel") + decay, matrix * (change(plain, "blocks", "kernel") + decay))
    assert_close(change(wide, "embedding", None), embedding * change(plain, "embedding", None))
    assert_close(change(wide, "blocks", "scale"), vector * change(plain, "blocks", "scale"))


def test_the_state_of_each_kind_of_parameter_keeps_its_structure_in_checkpoints():
    """Orbax restores a state only into the containers that it was saved from; it refuses a chain in place of a part."""
    axes = {
        ("kernel",): ("embed", "mlp"), ("table",): ("puzzles", "embed"), ("bias",): ("balance",),
        ("fixed",): ("constant",),
    }  # fmt: skip
    params = {path[-1]: np.zeros([2] * len(dims), np.float32) for path, dims in axes.items()}
    config, weights = base.get_config().optimizer, optimizers.Weights(axes)
    made = optimizers.make(optimizers.lion(config, weights), config, optax.constant_schedule(0.1), weights)
    of_kind = {kind: inner.inner_state for kind, inner in made.init(params).inner_states.items()}
    nothing = optax.EmptyState()
    assert of_kind["balance"] == of_kind["constant"] == nothing
    assert of_kind["puzzles"] == (nothing, nothing, optax.ScaleByScheduleState(0), nothing)


def adapted(**changes):
    config, lora = model_config(**changes), LoRA(2, 2.0, tuple(INPUTS))
    return add_adapters(decoder_lm.make(config, dtype=jnp.float32, scan=True, rngs=nnx.Rngs(0)), lora, nnx.Rngs(0))


def corrector():
    sizes = error_corrector.Sizes(1, 16, 2, 2, 8, 24, 1e-6, 1e4)
    return error_corrector.ErrorCorrector(sizes, scan=True, saves_memory=False, use_mixture=True, rngs=nnx.Rngs(0))


def reader():
    return vector_decoder.make(model_config(input_dim=5, vocab_size=1), dtype=jnp.float32, scan=True, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("name", WIDENED)
@pytest.mark.parametrize(("make", "growing_inputs", "growing_outputs", "both_growing"), [
    (adapted, [f"{name}.a" for name in INPUTS], [f"{name}.b" for name in INPUTS], []),
    (corrector, ["detect", "mixture.kernel"], ["from_features"], ["correct", "from_joined", "mlp.down"]),
    (reader, [], ["embed.kernel"], ["attention.query", "attention.out"]),
], ids=["lora", "error_correction", "vector_decoder"])  # fmt: skip
def test_mup_tells_which_side_of_a_weight_grows_with_the_width(
    make, growing_inputs, growing_outputs, both_growing, name
):  # fmt: skip
    """arXiv:2203.03466, table 3: Adam's rate is divided by the inputs' growth, SGD's by that over the outputs'."""
    matrix, _, vector = WIDENED[name]
    readout = {"adafactor": 1 / 2}.get(name, 1 / 4)
    expected = dict.fromkeys(growing_inputs, readout) | dict.fromkeys(growing_outputs, vector)
    expected |= dict.fromkeys(both_growing, matrix)
    axes = {path: names for path, (_, names) in declared_axes(nnx.state(nnx.eval_shape(make), nnx.Param)).items()}
    params = unflatten_dict({path: np.ones([2] * len(names), np.float32) for path, names in axes.items()})
    config, found = base.get_config().optimizer, {}
    for width_multiplier in (1.0, 4.0):
        direction = getattr(optimizers, name)(config, optimizers.Weights(axes, width_multiplier))
        updates, _ = direction.update(params, direction.init(params), params)
        found[width_multiplier] = flatten_dict(updates)
    ratios = {".".join(map(str, path)): (found[4.0][path] / found[1.0][path]).mean() for path in axes}
    for end, factor in expected.items():
        of_end = [ratio for path, ratio in ratios.items() if path.endswith(end)]
        assert of_end and np.allclose(of_end, factor), (end, of_end)


@pytest.mark.parametrize(("clip_norm", "factor"), [(1.0, 1 / 13), (13.0, 1.0), (26.0, 1.0), (0.0, 1.0)])
def test_clipping_scales_a_larger_global_norm_down_and_nothing_else(clip_norm, factor):
    gradients = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[12.0]])}
    config = base.get_config().optimizer
    config.update(clip_norm=clip_norm, weight_decay=0.0)
    optimizer = optimizers.make(optax.identity(), config, lambda step: 1.0, optimizers.Weights({}))
    updates, _ = optimizer.update(gradients, optimizer.init(gradients), gradients)
    assert_close(updates, jax.tree.map(lambda g: -factor * g, gradients))


def test_the_gradient_is_clipped_and_not_the_update_or_the_decay():
    weights, gradients = {"kernel": jnp.array([30.0, 40.0])}, {"kernel": jnp.array([3.0, 4.0])}
    config = base.get_config().optimizer
    config.update(clip_norm=1.0, weight_decay=0.1)
    optimizer = optimizers.make(optax.scale(10.0), config, lambda step: 1.0, optimizers.Weights({}))
    updates, _ = optimizer.update(gradients, optimizer.init(weights), weights)
    assert_close(updates, {"kernel": -jnp.array([6.0 + 3.0, 8.0 + 4.0])})


def test_a_learned_factor_does_not_decay():
    """It is a number and no matrix, as the one that weighs the mixture of an error corrector."""
    assert optimizers.is_decayed({"corrector": {"kernel": 0, "mixture_factor": 0}}) == {
        "corrector": {"kernel": True, "mixture_factor": False}
    }


def averaged(name: str) -> assembly.Run:
    """Return a run on a mesh that keeps an average of the parameters too."""
    config = small_config(fsdp=2, context=2, model=2)
    config.optimizer.update(name=name, ema_decay=0.9)
    return assembly.assemble(config)


@pytest.mark.parametrize("name", ["adamw", "adafactor", "lion", "muon", "sgd"])
def test_what_an_optimizer_keeps_of_a_weights_shape_lies_where_the_weight_does(name):
    state = averaged(name).abstract_state
    weights = {leaf.shape: leaf.sharding for leaf in jax.tree.leaves(state.params)}
    kept = [leaf for leaf in jax.tree.leaves((state.optimizer, state.extra.get("average"))) if leaf.size > 200]
    assert len(kept) >= len([shape for shape in weights if np.prod(shape) > 200])
    for leaf in kept:
        assert leaf.sharding == weights[leaf.shape] and not leaf.sharding.is_fully_replicated, leaf.shape


def test_a_step_leaves_all_of_the_state_where_it_was_to_lie():
    """Of an optimizer that keeps something else of matrices than of other weights."""
    run = averaged("muon")
    with mesh_context(run.mesh):
        state, _ = run.train_step(run.init(), placed(batch(), run.abstract_batch))
    for abstract, actual in zip(jax.tree.leaves(run.abstract_state), jax.tree.leaves(state), strict=True):
        assert actual.sharding.is_equivalent_to(abstract.sharding, actual.ndim)
