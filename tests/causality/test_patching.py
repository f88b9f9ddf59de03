# SPDX-License-Identifier: Apache-2.0
"""Sites of a decoder: each is restored as a run by hand would, and a planted circuit is found."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from causality import ablation, interchange, patching, tracing
from causality.sites import NAMES, difference, run, sources_of
from layers import products, taps
from layers.axes import declared_axes
from parallelism import axis_rules
from parallelism.mesh import make_mesh, mesh_context
from tests.causality import circuits
from tests.support import assert_close, compilations, make_model, model_config, relative_error

L, T, N, V = 3, 7, 6, 40
RNG = np.random.default_rng(0)
CLEAN = RNG.integers(1, V, T)
CORRUPT = np.where(np.arange(T) == 2, (CLEAN + 3) % V, CLEAN)
EIGHT = {"dcn_data": 1, "data": 1, "fsdp": 2, "context": 2, "expert": 1, "model": 2}


@functools.cache
def model():
    return make_model(model_config(vocab_size=V))


@functools.cache
def pair():
    return patching.contrast(*model(), CLEAN, CORRUPT)


@functools.cache
def restored():
    return patching.restore(*model(), pair())


@functools.cache
def planted():
    """Return (layer, head, graph, params, contrast, position of the name) of a planted circuit."""
    layer, head = 1, 2
    graph, params = circuits.planted(layer, head)
    clean, corrupt, position = circuits.prompts()
    return layer, head, graph, params, patching.contrast(graph, params, clean, corrupt), position


def test_a_contrast_compares_the_likeliest_tokens_of_the_two_prompts():
    logits = np.asarray(jax.jit(run, static_argnums=0)(*model(), np.stack([CLEAN, CORRUPT])))
    others = np.where(np.arange(V) == pair().answer, -np.inf, logits[1])
    assert (pair().answer, pair().other) == (logits[0].argmax(), others.argmax())
    assert_close(np.array([pair().clean, pair().corrupt]), logits[:, pair().answer] - logits[:, pair().other])
    with pytest.raises(ValueError, match="have 7 and 6 tokens; give prompts of equal length"):
        patching.contrast(*model(), CLEAN, CORRUPT[1:])


@pytest.mark.parametrize("name, layer, place", [("block", 1, 4), ("attention", 0, 3), ("mlp", 2, 6), ("heads", 1, 5)])
def test_a_restored_site_is_that_of_a_run_by_hand(name, layer, place):
    """One site at a time, with taps alone."""
    sources = sources_of(*model(), CLEAN[None])

    def put(x, number):
        at = (slice(None), slice(None), place) if name == "heads" else (slice(None), place)
        return jnp.where(number == layer, x.at[at].set(sources[name][layer][at]), x)

    @functools.partial(jax.jit, static_argnums=0)
    def by_hand(graph, params):
        with taps.replace(name, put):
            return difference(run(graph, params, CORRUPT[None]), pair().tokens_PK)

    expected = pair().normalized(np.asarray(by_hand(*model())))[0]
    assert abs(restored()[name][layer, place] - expected) < 1e-4


def test_restoring_everything_gives_the_clean_run_and_what_is_equal_changes_nothing():
    assert abs(restored()["block"][-1, -1] - 1) < 1e-4  # the stream that the logits are read from
    for name in ("block", "attention", "mlp"):
        assert np.abs(restored()[name][:, :2]).max() < 1e-4  # before the first difference


def test_all_sites_are_one_program_whatever_their_number():
    restored()  # with another number of rows; compiles what does not depend on it
    with compilations() as found:
        patching.restore(*model(), pair(), num_rows=17)
    assert len(found) == 1
    with compilations() as found:
        patching.restore(*model(), patching.contrast(*model(), CORRUPT, CLEAN), num_rows=17)
    assert not found


def test_groups_of_sites_of_another_size_give_the_same():
    for name, table in patching.restore(*model(), pair(), num_rows=1).items():
        np.testing.assert_allclose(table, restored()[name], atol=1e-4)


def test_attribution_is_the_derivative_of_patching():
    """For a small change of the prompt's embedding, both have the same figures."""
    graph, params = model()
    near = jax.tree.map(np.copy, params)
    near["embed"]["embedding"][CORRUPT[2]] = 0.998 * params["embed"]["embedding"][CLEAN[2]]
    close = patching.contrast(graph, near, CLEAN, CORRUPT, (pair().answer, pair().other))
    exact, estimate = patching.restore(graph, near, close), patching.attribute(graph, near, close)
    for name in NAMES:
        np.testing.assert_allclose(estimate[name], exact[name], atol=0.05)
        assert relative_error(estimate[name], exact[name]) < 0.05


def test_a_planted_circuit_is_found_by_patching_attribution_tracing_and_ablation():
    layer, head, graph, params, found, position = planted()
    assert found.answer == found.clean_T[position] and found.other == found.corrupt_T[position]
    traced = tracing.trace(
        graph, params, found.clean_T, found.clean_T != found.corrupt_T, found.answer, key=jax.random.key(0)
    )
    assert traced.clean > 0.5 > traced.corrupt
    prompts = [circuits.prompts(seed) for seed in range(6)]
    clean_PT = np.stack([clean for clean, _, _ in prompts])
    answers_PK = np.array([[clean[at], corrupt[at]] for clean, corrupt, at in prompts])
    tables = [patching.restore(graph, params, found), patching.attribute(graph, params, found), traced.effects]
    for kind in ablation.KINDS:
        tables.append(ablation.ablate(graph, params, clean_PT, answers_PK, kind, key=jax.random.key(0)))
    for table in tables:
        assert np.unravel_index(table["heads"].argmax(), table["heads"].shape) == (layer, head)
        assert np.unravel_index(table["attention"].argmax(), table["attention"].shape) == (layer, circuits.LENGTH - 1)
    stream = tables[0]["block"]
    assert stream[:layer, position].min() > 0.8 > 0.2 > np.abs(stream[layer:, position]).max()
    assert stream[layer:, -1].min() > 0.8 > 0.2 > np.abs(stream[:layer, -1]).max()


def test_the_logit_lens_sees_the_copied_name_from_the_copying_layer_on():
    layer, _, graph, params, found, _ = planted()
    lens = patching.logit_lens(graph, params, found.clean_T, found.answer)
    assert (lens.likeliest_LT[layer:, -1] == found.answer).all() and lens.likeliest_LT[0, -1] != found.answer
    assert (lens.answer_LT[layer:, -1] > 0.5).all() and (lens.probability_LT >= lens.answer_LT).all()


def test_after_the_last_layer_the_logit_lens_is_the_prediction_of_the_model():
    (logits,) = np.asarray(jax.jit(run, static_argnums=0)(*model(), CLEAN[None]), np.float64)
    lens = patching.logit_lens(*model(), CLEAN, pair().answer)
    assert lens.likeliest_LT[-1, -1] == logits.argmax()
    assert_close(lens.answer_LT[-1, -1], np.exp(logits[pair().answer]) / np.exp(logits).sum())


def test_interchanging_the_stream_of_the_name_gives_the_name_of_the_source():
    """Above the copying layer, the stream of the name's position no longer matters."""
    layer, _, graph, params, found, position = planted()
    base, source = found.clean_T[None], found.corrupt_T[None]
    labels = tuple(circuits.NAMES)
    for above, expected in ((layer - 1, found.other), (layer, found.answer)):
        given = interchange.labels_after(graph, params, base, source, above, position, labels)
        assert interchange.accuracy(given, [expected]) == 1.0


@pytest.mark.parametrize(("layer", "position", "said"), [(-1, 0, "layer=-1 is not one of"), (0, 99, "position=99")])
def test_a_place_that_does_not_exist_is_not_interchanged(layer, position, said):
    with pytest.raises(ValueError, match=said):
        interchange.labels_after(*model(), CLEAN[None], CORRUPT[None], layer, position, (1, 2))


def test_a_place_that_only_the_base_has_is_not_interchanged():
    with pytest.raises(ValueError, match="position=6 is not one of the 6"):
        interchange.labels_after(*model(), CLEAN[None], CORRUPT[None, 1:], 0, 6, (1, 2))


@pytest.mark.parametrize("prompt", [[V], [-1], [1.7], []])
def test_what_is_no_token_is_not_compared(prompt):
    with pytest.raises(ValueError, match=f"at least one token, each a whole number from 0 to {V - 1}"):
        patching.contrast(*model(), prompt, prompt)
    for look in (patching.logit_lens, functools.partial(tracing.trace, is_noised_T=[True], key=jax.random.key(0))):
        with pytest.raises(ValueError, match="give at least one token"):
            look(*model(), prompt, answer=1)
    with pytest.raises(ValueError, match="give at least one token"):
        interchange.labels_after(*model(), np.array([prompt]), CLEAN[None, :1], 0, 0, (1, 2))


@pytest.mark.parametrize("noised", [[True], [1, 2, 3, 4, 5, 6, 0]])
def test_noise_is_for_each_token_or_not(noised):
    """One value would count for all tokens, and other numbers would scale the noise."""
    with pytest.raises(ValueError, match=r"is_noised_T is .*; give a bool for each token"):
        tracing.trace(*model(), CLEAN, noised, 1, key=jax.random.key(0))


def test_the_accuracy_of_an_interchange_is_the_share_of_right_labels():
    assert interchange.accuracy([1, 2, 3, 4], [1, 2, 0, 4]) == 0.75


def test_a_rotation_is_found_that_interchanges_only_the_name():
    """Its subspace has 8 of 32 dimensions, and gives the source's name for pairs that it was not found on."""
    layer, _, graph, params, found, position = planted()
    rng = np.random.default_rng(1)
    base, source = (np.tile(found.clean_T, (80, 1)) for _ in range(2))
    base[:, position], source[:, position] = rng.integers(0, 8, (2, 80))
    how = dict(layer=layer - 1, position=position)
    rotation = interchange.align(
        graph, params, base[:60], source[:60], source[:60, position], size=8, steps=60, batch=30,
        key=jax.random.key(0), learning_rate=0.05, **how,
    )  # fmt: skip
    np.testing.assert_allclose(rotation.T @ rotation, np.eye(8), atol=1e-5)
    labels = tuple(circuits.NAMES)
    given = interchange.labels_after(graph, params, base[60:], source[60:], labels=labels, rotation_DR=rotation, **how)
    assert interchange.accuracy(given, source[60:, position]) == 1.0


def test_a_tpu_rounds_no_rotation(monkeypatch):
    """A product of factors in bfloat16 would leave columns that are not orthonormal, in the gradient too."""
    monkeypatch.setattr(products, "platform", lambda: "tpu")

    def total(x_PD, free_DR):
        return interchange._projected(x_PD, interchange._orthonormal(free_DR)).sum()

    mesh = mesh_context(make_mesh({"data": 8}))
    with mesh, jax.default_matmul_precision(None):  # tests have another, see conftest.py
        gradient = jax.jit(jax.value_and_grad(total, argnums=(0, 1)))
        program = gradient.lower(jnp.ones((3, 8), jnp.bfloat16), jnp.ones((8, 4))).as_text()
    assert set(re.findall(r"dot_general .*precision = \[(\w+), (\w+)\]", program)) == {("HIGHEST", "HIGHEST")}


@pytest.mark.parametrize(
    "kind, prompts, match",
    [("none", 2, "the kinds are zero"), ("mean", 1, "at least two"), ("resample", 2, "give key=")],
)
def test_ablation_says_what_is_wrong(kind, prompts, match):
    with pytest.raises(ValueError, match=match):
        ablation.ablate(*model(), np.tile(CLEAN, (prompts, 1)), np.zeros((prompts, 2)), kind)


def test_eight_devices_find_what_one_finds():
    """With sharded weights; 7 tokens and one prompt do not divide among the devices."""
    graph, params = model()
    with mesh_context(make_mesh(EIGHT)) as mesh:
        declared = declared_axes(nnx.state(nnx.merge(graph, params)))
        sharded = jax.device_put(params, axis_rules.weight_shardings(declared, mesh))
        found = patching.contrast(graph, sharded, CLEAN, CORRUPT)
        of_eight = patching.restore(graph, sharded, found), patching.attribute(graph, sharded, found)
    assert found[2:4] == pair()[2:4]
    for actual, expected in zip(of_eight, (restored(), patching.attribute(graph, params, pair())), strict=True):
        for name in NAMES:
            np.testing.assert_allclose(actual[name], expected[name], atol=1e-4)


def test_the_noise_is_of_three_deviations_of_the_embedded_tokens():
    """The model multiplies its embedding by a scale, so that its entries are smaller than what the blocks read."""
    graph, params = make_model(model_config())
    noise = np.asarray(tracing._noise(graph, params, jax.random.key(0), np.arange(65) < 64))
    model = nnx.merge(graph, params)
    embedded = np.asarray(model.embed(jnp.arange(37)[None], jnp.float32))
    assert np.std(noise[:, :64]) == pytest.approx(tracing.NOISE * np.std(embedded), rel=0.03)
    assert not noise[:, 64].any()


@pytest.mark.parametrize("count", [2, 5])
def test_a_resampled_activation_is_that_of_another_prompt(count):
    """With its own, a prompt would lose nothing, and every site would seem to matter less."""
    for seed in range(10):
        others = np.asarray(ablation._others(jax.random.key(seed), count))
        assert sorted(others) == list(range(count)) and (others != np.arange(count)).all()
