# SPDX-License-Identifier: Apache-2.0
"""What is corrupted, the loss as -log p(right text | draft), what the module sees, and what is revised."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from core import assembly
from inference import revision
from inference.revision import judge, revise
from layers.attention.attention import soft_cap
from layers.error_corrector import Findings, Sizes, points_of
from models import decoder_lm
from objectives.error_correction import BINS, MIXTURE_WEIGHT, ErrorCorrection, corrupt
from objectives.language_modeling import loss_mask
from parallelism.mesh import mesh_context
from tests import one_step
from tests.support import assert_close, model_config, one_device_mesh, packed_batch, random_weights

VOCAB, LENGTH = 37, 32
ROWS = [[12, 9, 6], [30], [5, 5, 20]]
OBJECTIVE = ErrorCorrection(
    3, LENGTH, num_chunks=4, vocab_size=VOCAB, sizes=Sizes(4, 20, 6, 2, 8, 28, 1e-5, 10_000.0), use_mixture=True,
    rate=0.25,
)  # fmt: skip


def batch() -> dict:
    """Return packed documents whose last targets are masked in one row."""
    found = packed_batch(ROWS, LENGTH, VOCAB)
    found["targets"][1, 25:] = -1
    return found


@functools.cache
def model_and_params(objective=OBJECTIVE) -> tuple[nnx.GraphDef, dict]:
    with mesh_context(one_device_mesh()):
        plain = functools.partial(decoder_lm.make, model_config(logit_soft_cap=5.0), dtype=jnp.float32, scan=True)
        model = nnx.eval_shape(lambda: objective.transform(plain(rngs=nnx.Rngs(0)), nnx.Rngs(0)))
        graph, state = nnx.split(model)
    return graph, random_weights(nnx.to_pure_dict(state))


@functools.cache
def program(objective):
    """Return the compiled (params, batch, key) -> ((total, (weight, scalars)), gradients)."""
    graph, params = model_and_params(objective)

    def loss(params, rows, key):
        (total, weight), (_, scalars) = objective.loss(nnx.merge(graph, params), {}, rows, key)
        return total, (weight, scalars)

    return jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(params, batch(), jax.random.key(0)).compile()


@functools.partial(jax.jit, static_argnums=0)
def examined(objective, params, draft, rows):
    """Return (what the module finds, log c, the mixture's log-density of each right token)."""
    model = nnx.merge(model_and_params(objective)[0], params)
    found, head_DV = objective._examine(model, draft, rows)
    log_c_BTV = jax.nn.log_softmax(soft_cap(found.states_BTD @ head_DV, model.logit_cap))
    return found, log_c_BTV, found.mixture.log_density(points_of(head_DV)[jnp.maximum(rows["targets"], 0)])


def test_a_share_of_the_targets_is_replaced_and_the_model_reads_the_draft():
    rows = batch()
    draft, counts = jax.device_get(corrupt(rows, jax.random.key(1), 0.25)), np.asarray(loss_mask(rows))
    assert 0.15 < draft.wrong_BT.sum() / counts.sum() < 0.3
    changed = draft.draft_BT != rows["targets"]
    np.testing.assert_array_equal(changed, draft.wrong_BT > 0)
    assert not changed[counts == 0].any()  # padding and masked targets stay
    assert set(draft.draft_BT[changed]) <= set(rows["targets"][counts > 0])
    for row, column in np.argwhere(rows["segments"] > 0):
        read, begins = rows["tokens"][row, column], rows["positions"][row, column] == 0
        if not begins and counts[row, column - 1]:
            read = draft.draft_BT[row, column - 1]
        assert draft.tokens_BT[row, column] == read


def test_no_masked_target_is_drawn_from_a_large_batch():
    """A sum of shares in float32 falls at some masked places, and a search in it found those."""
    rng = np.random.default_rng(0)
    targets = np.where(rng.random((128, 1024)) < 0.5, -1, rng.integers(0, 37, (128, 1024))).astype(np.int32)
    rows = {
        "tokens": np.zeros_like(targets), "targets": targets, "segments": np.ones_like(targets),
        "positions": np.broadcast_to(np.arange(1024, dtype=np.int32), targets.shape),
    }  # fmt: skip
    drawn = jax.jit(lambda rows, key: corrupt(rows, key, 1.0).draft_BT)
    for seed in (2, 3, 5):
        assert np.asarray(drawn(rows, jax.random.key(seed)))[targets >= 0].min() >= 0


def test_the_loss_is_detection_and_correction_by_their_formulas():
    _, params = model_and_params()
    rows, key = batch(), jax.random.key(2)
    (total, (weight, scalars)), _ = program(OBJECTIVE)(params, rows, key)
    draft = corrupt(rows, jax.random.split(key)[0], OBJECTIVE.rate)
    found, log_c, log_density = jax.device_get(examined(OBJECTIVE, params, draft, rows))
    wrong, counts = np.asarray(draft.wrong_BT), np.asarray(loss_mask(rows))
    p = 1 / (1 + np.exp(-np.float64(found.wrong_BT)))
    detection = -(np.log(np.where(wrong > 0, p, 1 - p)) * counts).sum()
    of_target = np.take_along_axis(np.float64(log_c), np.maximum(rows["targets"], 0)[..., None], -1)[..., 0]
    correction, surprise = -(of_target * counts).sum(), -(np.float64(log_density) * counts).sum()
    assert weight == counts.sum() and wrong.sum() > 5
    assert_close(scalars["detection"][0], detection)
    assert_close(scalars["correction"][0], correction)
    assert_close(scalars["mixture_nll"][0], surprise)
    assert_close(scalars["loss"][0], detection + correction)
    assert_close(total, detection + correction + MIXTURE_WEIGHT * surprise)


def test_the_module_alone_is_trained_unless_the_loss_is_joint():
    _, params = model_and_params()
    rows, key = batch(), jax.random.key(2)
    joint = dataclasses.replace(OBJECTIVE, joint_weight=0.5)
    for objective, wanted in ((OBJECTIVE, {"corrector"}), (joint, {"corrector", "embed", "stack", "norm", "head"})):
        graph, _ = model_and_params(objective)
        model = nnx.merge(graph, params)
        assert nnx.to_pure_dict(nnx.state(model, objective.trainable)).keys() == wanted
    (total, (_, scalars)), gradients = program(joint)(params, rows, key)
    (alone, _), of_module = program(OBJECTIVE)(params, rows, key)
    assert_close(total, scalars["language_modeling"][0] + 0.5 * alone)
    assert_close(gradients["corrector"], jax.tree.map(lambda one: 0.5 * one, of_module["corrector"]))
    largest = jax.tree.map(lambda one: float(np.abs(one).max()), of_module["corrector"])
    assert all(value > 0 for value in jax.tree.leaves(largest)), largest  # each of its weights learns


def test_both_sides_of_a_document_predict_a_token_and_only_p_sees_the_token_itself():
    _, params = model_and_params()
    rows = batch()
    clean = corrupt(rows, jax.random.key(0), 0.0)
    draft, tokens = np.array(clean.draft_BT), np.array(clean.tokens_BT)
    draft[0, 15] = tokens[0, 16] = (draft[0, 15] + 1) % VOCAB  # in the second document, places 12 to 20
    found, *_ = examined(OBJECTIVE, params, clean, rows)
    changed, *_ = examined(OBJECTIVE, params, clean._replace(draft_BT=draft, tokens_BT=tokens), rows)
    others = [*range(12, 15), *range(16, 21)]
    for one, other in (
        (found.states_BTD, changed.states_BTD),
        (found.mixture.means[..., 0], changed.mixture.means[..., 0]),
    ):
        differs = np.asarray(one != other)[0].any(axis=-1)
        assert differs[others].all() and differs.sum() == len(others)
    differs = np.asarray(found.wrong_BT != changed.wrong_BT)[0]
    assert differs[12:21].all() and differs.sum() == 9


def test_memory_is_saved_without_another_loss():
    _, params = model_and_params()
    programs = [program(OBJECTIVE), program(dataclasses.replace(OBJECTIVE, saves_memory=True))]
    results = [one(params, batch(), jax.random.key(2)) for one in programs]
    assert_close(results[1], results[0])
    sizes = [one.memory_analysis().temp_size_in_bytes for one in programs]
    assert sizes[1] < 0.75 * sizes[0], sizes


def test_calibration_is_the_mean_gap_of_each_bin():
    figures = {f"calibration_bin_{n}": 0.0 for n in range(BINS)} | {"loss": 1.0}
    figures |= {"calibration_bin_0": 0.02, "calibration_bin_9": -0.03}
    assert OBJECTIVE.summary(figures) == {"loss": 1.0, "calibration_error": pytest.approx(0.05)}


def test_evaluation_counts_what_is_restored_and_damaged():
    graph, params = model_and_params()
    rows = batch()
    objective = dataclasses.replace(OBJECTIVE, threshold=1e-9)
    sums = jax.jit(lambda *given: objective.evaluate(nnx.merge(graph, given[0]), given[1]))(params, rows)
    assert sums["damaged"][0] == sums["damaged"][1], "with no threshold every right token is lost"
    means = objective.summary({name: float(total / weight) for name, (total, weight) in sums.items()})
    assert set(means) == {
        "loss", "detection", "correction", "mixture_nll", "restored", "damaged", "calibration_error"
    }  # fmt: skip
    assert "damaged 100.00%" in objective.format_metrics(means)[1]


def test_a_confidence_is_the_share_of_repairs():
    graph, params = model_and_params()
    rng = np.random.default_rng(0)
    wrong, states = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((2, 8), (2, 8, 20)))
    draft, head = rng.integers(0, VOCAB, (2, 8)), rng.normal(size=(20, VOCAB)).astype(np.float32)
    revisions = jax.jit(lambda params: nnx.merge(graph, params).corrector.revisions(
        Findings(wrong, states, None), head, draft, num_chunks=2
    ))  # fmt: skip
    best, confidence = jax.device_get(revisions(params))
    c = np.exp(np.float64(states) @ head)
    np.put_along_axis(c, draft[..., None], 0.0, axis=-1)
    p, r = 1 / (1 + np.exp(-np.float64(wrong))), (c / c.sum(-1, keepdims=True)).max(-1)
    np.testing.assert_array_equal(best, c.argmax(-1))
    assert_close(confidence, p * r / (p * r + 1 - p))


def test_a_draft_is_revised_where_confidence_suffices_and_nowhere_else():
    graph, params = model_and_params()
    prompts, drafts = [[1, 2, 3], [4]], [[5, 6, 7, 8], [9, 10]]
    how = dict(vocab_size=30, ends=[0])
    with mesh_context(one_device_mesh()):
        same = revise(graph, params, prompts, drafts, threshold=1.0, **how)
        other = revise(graph, params, prompts, drafts, threshold=1e-12, **how)
    assert same == drafts
    for draft, revised in zip(drafts, other, strict=True):
        assert revised[0] == draft[0] and len(revised) == len(draft)
        assert all(new != old and 0 < new < 30 for new, old in zip(revised[1:], draft[1:], strict=True))


def test_the_end_of_a_draft_is_judged_with_it_and_is_not_returned():
    """Training rows have it too: without it, a module finds the last word of a complete answer wrong."""
    graph, params = model_and_params()
    how = dict(threshold=0.0, vocab_size=30, ends=[0])
    with mesh_context(one_device_mesh()):
        cut, ended, other = (revise(graph, params, [[1, 2]], [[5, 6, *end]], **how) for end in ([], [0], [7]))
    assert len(ended[0]) == len(cut[0]) == 2 and len(other[0]) == 3
    with mesh_context(one_device_mesh()):
        parts = [revision._batch([([1, 2], [5, 6, *end])]) for end in ([], [0])]
        without, with_end = (judge(graph, params, *part, 30, (0,)).wrong_BT[0, 2] for part in parts)
    assert without != with_end, "what follows the last word counts"


def test_operations_are_those_of_the_module_and_of_the_passes_of_the_model():
    objective = ErrorCorrection(3, 6, vocab_size=7, sizes=Sizes(2, 4, 2, 1, 3, 5, 1e-5, 10_000.0))
    weights_of_layer = 4 * (6 + 3 + 3 + 6) + 3 * 4 * 5
    of_module = 6 * (2 * weights_of_layer + 3 * 4 * 5 + 5 * 16) + 12 * 2 * 6 * 3
    assert objective.flops_per_token(lambda: 300.0, frozen=True) == 100 + of_module + 4 * 4 * 7
    assert objective.flops_per_token(lambda: 300.0, frozen=False) == 600 + of_module + 6 * 4 * 7


@pytest.mark.slow
def test_devices_that_share_a_batch_compute_the_step_of_one():
    """Without a replaced token, since draws depend on the mesh."""

    def step(**mesh):
        config = one_step.small_config(**mesh)
        config.train.objective = "error_correction"
        config.error_correction.update(rate=0.0, joint_weight=0.5, num_layers=1, use_mixture_density=True)
        one_step.simply_updated(config)
        run = assembly.assemble(config, devices=jax.devices()[: math.prod(mesh.values())])
        with mesh_context(run.mesh):
            rows = one_step.placed(one_step.batch(), run.abstract_batch)
            _, scalars, gradients = run.train_step_with_grads(one_step.initial_state(run, spread=0.2), rows)
        return jax.device_get((gradients, scalars))

    assert_close(step(fsdp=4), step())


def test_what_is_restored_and_damaged_are_shares_of_all_targets_that_count():
    graph, params = model_and_params()
    rows = batch()
    for threshold in (1e-9, 2.0):
        evaluate = dataclasses.replace(OBJECTIVE, threshold=threshold).evaluate
        sums = jax.jit(lambda *given, of=evaluate: of(nnx.merge(graph, given[0]), given[1]))(params, rows)
        assert sums["restored"][1] + sums["damaged"][1] == loss_mask(rows).sum()
        assert sums["restored"][0] < sums["restored"][1]
    assert sums["restored"][0] == sums["damaged"][0] == 0, "no confidence is so high"


def test_a_token_is_replaced_whose_replacement_reaches_the_threshold_exactly(monkeypatch):
    confidence = np.array([[1.0, 0.5, 0.25]], np.float32)
    judged = revision.Judgement(np.zeros((1, 3)), np.array([[6, 7, 8]]), confidence)
    monkeypatch.setattr(revision, "judge", lambda *given: judged)
    assert revise(None, None, [[1]], [[2, 3, 4]], threshold=0.5, vocab_size=9, ends=()) == [[2, 7, 4]]
