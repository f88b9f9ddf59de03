# SPDX-License-Identifier: Apache-2.0
"""Which puzzle a slot holds, when it halts, and what counts; by a model that says what a test wants."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from objectives import recursive
from objectives.recursive import IGNORED, Recursive

CELLS, VOCAB = 3, 5
ROWS = 4


class Told:
    """A model whose states count its calls, with prepared halt logits and answers.

    Args:
      halts: halt logits, one a slot.
      answers: tokens [rows, cells] that have the largest logit.
    """

    def __init__(self, halts, answers=None):
        self.halts = np.asarray(halts, np.float32)
        self.answers = np.zeros((len(self.halts), CELLS), np.int32) if answers is None else np.asarray(answers)

    def start(self, rows):
        return jnp.full((rows, 2), 10.0), (jnp.full((rows, 2), 20.0),)

    def __call__(self, states, inputs, puzzles):
        logits = 3.0 * jax.nn.one_hot(self.answers, VOCAB)
        return jax.tree.map(lambda x: x + 1, states), logits, jnp.stack([self.halts, -self.halts], axis=1)


def batch(number: int, rows: int = ROWS) -> dict:
    """A batch in which every number identifies its place."""
    cells = np.full((rows, CELLS), number, np.int32)
    return {"inputs": cells, "labels": cells, "puzzle_identifiers": np.full(rows, number, np.int32)}


@functools.partial(jax.jit, static_argnames=("objective", "model"))
def loss(objective, model, carry, batch) -> tuple:
    """Return ((total, weight), (carry, scalars))."""
    return objective.loss(model, carry, batch, None)


drawn = jax.jit(recursive._drawn, static_argnums=(1, 2))


def empty(objective, model) -> dict:
    """Return the carry of a run that begins."""
    return jax.jit(lambda: objective.init_carry(model, objective.rows, jax.random.key(0)))()


def test_a_slot_keeps_its_puzzle_until_it_halts_and_then_takes_the_next():
    objective, model = Recursive(ROWS, CELLS, max_steps=3, exploration=0.0), Told([1, -1, -1, 1])
    carry = empty(objective, model)
    for number in range(1, 5):
        carry = jax.device_get(loss(objective, model, carry, batch(number))[1][0])
        kept = 1 if number <= 3 else 4
        held = [number, kept, kept, number]
        for name in ("inputs", "labels", "puzzle_identifiers"):
            np.testing.assert_array_equal(carry[name].reshape(ROWS, -1)[:, 0], held)
        calls = [1, (number - 1) % 3 + 1, (number - 1) % 3 + 1, 1]
        np.testing.assert_array_equal(carry["steps"], calls)
        np.testing.assert_array_equal(carry["halted"], [True, number == 3, number == 3, True])
        high, (low,) = carry["states"]  # both begin again with the puzzle
        np.testing.assert_array_equal(high[:, 0], [10 + count for count in calls])
        np.testing.assert_array_equal(low[:, 0], [20 + count for count in calls])


def test_who_explores_goes_on_for_two_to_all_steps_and_whoever_is_drawn_afresh_each_step():
    rows, objective = 4000, Recursive(4000, CELLS, max_steps=4, exploration=0.3)
    draws = empty(objective, Told(np.ones(rows)))["draws"]
    seen = []
    for _ in range(2):
        draws, least = drawn(draws, 0.3, 4)
        seen.append(np.asarray(least))
    for least in seen:  # three standard deviations of so many draws
        assert (least > 0).mean() == pytest.approx(0.3, abs=0.022)
        assert set(least) == {0, 2, 3, 4}
        assert all((least == steps).mean() == pytest.approx(0.1, abs=0.015) for steps in (2, 3, 4))
    both = (seen[0] > 0) & (seen[1] > 0)
    assert both.mean() == pytest.approx(0.09, abs=0.015)


def test_exploring_delays_halting_and_never_beyond_the_last_step():
    model, objective = Told(np.ones(64)), Recursive(64, CELLS, max_steps=3, exploration=1.0)
    carry, longest = empty(objective, model), 0
    for number in range(12):
        carry = jax.device_get(loss(objective, model, carry, batch(number, 64))[1][0])
        assert not (carry["halted"] & (carry["steps"] == 1)).any()  # all want to, none may
        assert (carry["halted"] | (carry["steps"] < 3)).all()
        longest = max(longest, int(carry["steps"].max()))
    assert longest == 3


def test_a_slot_that_explores_halts_at_the_step_that_was_drawn_for_it():
    model, objective = Told(np.ones(64)), Recursive(64, CELLS, max_steps=5, exploration=1.0)
    carry = empty(objective, model)
    for number in range(4):
        _, least = drawn(carry["draws"], 1.0, 5)
        carry = jax.device_get(loss(objective, model, carry, batch(number, 64))[1][0])
        np.testing.assert_array_equal(carry["halted"], carry["steps"] >= least)
    assert (carry["steps"] == least).any()


def test_a_slot_draws_the_same_whatever_slots_are_beside_it():
    """So that no layout of slots on devices changes what is drawn."""
    draws = np.random.default_rng(0).integers(0, 2**32, (ROWS, 2), np.uint32)
    together = jax.device_get(drawn(draws, 0.5, 9))
    for slot in range(ROWS):
        alone = jax.device_get(drawn(draws[slot : slot + 1], 0.5, 9))
        for one, every in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], every[slot])


def test_an_evaluation_makes_all_steps_even_where_the_model_wants_to_halt():
    objective = Recursive(ROWS, CELLS, max_steps=5)
    sums = jax.jit(lambda: objective.evaluate(Told(np.ones(ROWS)), batch(0)))()
    assert sums["steps"] == (5 * ROWS, ROWS)


def labelled(*labels) -> dict:
    rows = np.array(labels, np.int32)
    return {"inputs": np.zeros_like(rows), "labels": rows, "puzzle_identifiers": np.zeros(len(rows), np.int32)}


EXAMPLES = labelled((0, 0, 0), (0, 1, IGNORED), (IGNORED,) * 3)  # right, half right, nothing to learn


def test_losses_are_means_over_the_cells_that_are_learned_and_sums_over_slots():
    objective, model = Recursive(3, CELLS, max_steps=1, exploration=0.0, cell_loss="softmax"), Told([2.0, 2.0, 2.0])
    (total, weight), (_, scalars) = jax.device_get(loss(objective, model, empty(objective, model), EXAMPLES))
    p = np.exp(3) / (np.exp(3) + VOCAB - 1)
    wrong = np.exp(0) / (np.exp(3) + VOCAB - 1)
    cells = -np.log(p) + (-np.log(p) - np.log(wrong)) / 2
    halting = np.log1p(np.exp(-2)) * 2 + np.log1p(np.exp(2))  # right, wrong, and what has no cells is right
    np.testing.assert_allclose(scalars["lm_loss"][0], cells, rtol=1e-6)
    np.testing.assert_allclose(scalars["halt_loss"][0], halting, rtol=1e-6)
    np.testing.assert_allclose(total / weight, (cells + halting / 2) / 3, rtol=1e-6)
    assert weight == 3 * CELLS and scalars["loss"][1] == 3


@pytest.mark.parametrize("training", [True, False])
def test_rows_without_labels_count_for_nothing(training):
    objective, model = Recursive(3, CELLS, max_steps=1, exploration=0.0), Told([2.0, 2.0, 2.0])
    if training:
        scalars = loss(objective, model, empty(objective, model), EXAMPLES)[1][1]
    else:
        scalars = jax.jit(objective.evaluate, static_argnums=0)(model, EXAMPLES)
    assert scalars["accuracy"] == (1.5, 2)
    assert scalars["exact_accuracy"] == (1, 2)
    assert scalars["halt_accuracy"] == (1, 2)  # it claims to be done with both


def test_where_no_slot_halts_nothing_is_reported():
    objective, model = Recursive(3, CELLS, max_steps=9, exploration=0.0), Told([-2.0, -2.0, -2.0])
    scalars = loss(objective, model, empty(objective, model), EXAMPLES)[1][1]
    assert scalars["exact_accuracy"] == (0, 0) and scalars["steps"] == (0, 0) and scalars["lm_loss"][1] == 3


def test_exploration_moves_in_equal_parts_to_its_end_and_stays_there():
    objective = Recursive(ROWS, CELLS, exploration=0.3, final_exploration=0.1, num_updates=5, max_steps=4)
    carry, seen = empty(objective, model := Told(np.ones(ROWS))), []
    for number in range(7):
        seen.append(float(objective._explorations(carry)[0]))
        carry = loss(objective, model, carry, batch(number))[1][0]
    np.testing.assert_allclose(seen, [0.3, 0.25, 0.2, 0.15, 0.1, 0.1, 0.1], rtol=1e-6)
    assert "updates" not in empty(Recursive(ROWS, CELLS), model)


def test_slots_explore_with_the_probability_of_the_update():
    rows = 4000
    draws = empty(Recursive(rows, CELLS), Told(np.ones(rows)))["draws"]
    chances = jnp.where(jnp.arange(rows) < rows // 2, 0.0, 0.5)
    _, least = jax.jit(recursive._drawn, static_argnums=2)(draws, chances, 4)
    assert not least[: rows // 2].any() and 0.45 < float((least[rows // 2 :] > 0).mean()) < 0.55


class Guessing:
    """A model whose logits are its states: of the shape [rows, CELLS, VOCAB], scaled by a parameter."""

    def __init__(self, scale=1.0):
        self.scale = scale

    def start(self, rows):
        return jnp.zeros((rows, CELLS, VOCAB)), (jnp.zeros((rows, CELLS, VOCAB)),)

    def __call__(self, states, inputs, puzzles):
        high, (low,) = states
        halts = jnp.arange(len(high), dtype=jnp.float32)
        return (high + 1, (low + 2,)), self.scale * high, jnp.stack([halts, halts], axis=1)


@pytest.mark.slow
def test_of_latents_in_parallel_the_best_alone_has_the_gradient_and_hands_on_its_high():
    """Loss and gradient are those of the latents with the lowest loss, each slot's own; all keep their low ones."""
    objective = Recursive(ROWS, CELLS, exploration=0.0, parallel=3, random_start=1.0)
    carry = empty(objective, Guessing())
    labels = np.arange(ROWS * CELLS, dtype=np.int32).reshape(ROWS, CELLS) % VOCAB
    of_batch = batch(1) | {"labels": labels}
    states = jax.device_get(objective.start(Guessing(), carry["draws"])[0]).reshape(ROWS, 3, CELLS, VOCAB)

    def total(scale):
        return objective.loss(Guessing(scale), carry, of_batch, None)[0][0]

    (value, (after, _)) = jax.device_get(loss(objective, Guessing(), carry, of_batch))
    losses = np.asarray(
        recursive.stablemax_loss(jnp.asarray(states), jnp.broadcast_to(labels[:, None], states.shape[:3]))
    )
    best = losses.mean(axis=-1).argmin(axis=1)
    alone = Recursive(ROWS, CELLS, exploration=0.0)
    halts = jnp.arange(ROWS * 3, dtype=jnp.float32).reshape(ROWS, 3)[np.arange(ROWS), best]

    def of_best(scale):
        held = {"labels": jnp.asarray(labels), "steps": jnp.ones(ROWS)}
        sums = alone._sums(held, scale * states[np.arange(ROWS), best], halts)
        return CELLS * (sums["lm_loss"].sum() + 0.5 * sums["halt_loss"].sum())

    assert value[0] == pytest.approx(float(of_best(1.0)), rel=1e-5)
    assert jax.grad(total)(1.0) == pytest.approx(float(jax.grad(of_best)(1.0)), rel=1e-4)
    assert len(set(best.tolist())) > 1, "not the same one of all slots"
    high, (low,) = after["states"]
    for slot, place in enumerate(best):
        np.testing.assert_allclose(high[slot], np.repeat(states[slot, place : place + 1] + 1, 3, axis=0), rtol=1e-6)
    assert len({latent.tobytes() for latent in low.reshape(ROWS * 3, -1)}) == ROWS * 3


def test_evaluation_has_one_latent_and_starts_at_random_if_training_does():
    objective = Recursive(ROWS, CELLS, max_steps=2, exploration=0.0, parallel=3, random_start=1.0, path_noise=0.1)
    answers, _ = objective.predict(Guessing(), batch(1))
    assert answers.shape == (ROWS, CELLS) and len({row.tobytes() for row in np.asarray(answers)}) > 1
    same, _ = Recursive(ROWS, CELLS, max_steps=2).predict(Guessing(), batch(1))
    assert not np.asarray(same).any(), "and else with the model's own vectors, here zeros"


@pytest.mark.parametrize("name", ["stablemax", "softmax"])
def test_a_smoothed_label_is_the_cross_entropy_with_a_target_that_is_spread(name):
    """With 1 - s on the label and s / V on all, in training alone."""
    logits = jnp.asarray(np.random.default_rng(0).normal(size=(ROWS, CELLS, VOCAB)), jnp.float32)
    labels = jnp.asarray(np.random.default_rng(1).integers(0, VOCAB, (ROWS, CELLS)))
    of = recursive.LOSSES[name]
    each = jnp.stack([of(logits, jnp.full_like(labels, token)) for token in range(VOCAB)], axis=-1)
    target = 0.7 * jax.nn.one_hot(labels, VOCAB) + 0.3 / VOCAB
    np.testing.assert_allclose(of(logits, labels, 0.3), (target * each).sum(axis=-1), rtol=1e-5)
    plain, smoothed = Recursive(ROWS, CELLS), Recursive(ROWS, CELLS, label_smoothing=0.3)
    model, answers = Told(np.zeros(ROWS)), batch(0)
    (by_plain, _), (by_smoothed, _) = (loss(of, model, empty(of, model), answers) for of in (plain, smoothed))
    assert by_smoothed[0] > by_plain[0]
    evaluated = [of.evaluate(model, answers)["loss"][0] for of in (plain, smoothed)]
    assert evaluated[0] == evaluated[1]


def test_the_best_latents_are_judged_by_cells_that_have_a_label():
    """The first of two is right where the label is known, and far from the 0 that stands for the unknown one."""
    objective = Recursive(1, 2, cell_loss="softmax", parallel=2)
    logits = jnp.array([[[[3.0, 0.0], [0.0, 9.0]], [[1.0, 0.0], [9.0, 0.0]]]])
    high = jnp.arange(2.0).reshape(1, 2, 1, 1)
    carry = {"labels": jnp.array([[0, recursive.IGNORED]]), "states": (high, ())}
    after, found, halts = objective._best(carry, logits, jnp.array([[5.0, 7.0]]))
    np.testing.assert_array_equal(found, logits[:, 0])
    assert halts.tolist() == [5.0] and after["states"][0].ravel().tolist() == [0.0, 0.0]


def test_each_latent_of_a_slot_takes_the_operations_of_a_step():
    objective = Recursive(1, 2, parallel=3)
    assert objective.flops_per_token(lambda: 7.0, frozen=False) == 21
