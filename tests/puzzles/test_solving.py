# SPDX-License-Identifier: Apache-2.0
"""A puzzle solved step by step is what evaluation finds, and no answer is called right that is not."""

import dataclasses
import types

import jax
import numpy as np
import pytest

from configs.errors import ConfigError
from configs.trm import sudoku_mini
from core import assembly
from objectives.breadth import Breadth
from parallelism.mesh import mesh_context
from puzzles import solving
from puzzles.puzzle_file import Puzzle
from puzzles.voting import sigmoid
from tests.support import random_weights

STEPS = 3
GIVEN = np.array([[2, 1, 1, 5], [1, 1, 1, 1], [1, 1, 1, 1], [5, 1, 1, 2]], np.int32)
SOLVED = np.array([[2, 3, 4, 5], [4, 5, 2, 3], [3, 2, 5, 4], [5, 4, 3, 2]], np.int32)
PUZZLE = Puzzle("sudoku", GIVEN)
MAZE = Puzzle("maze", np.array([[3, 2, 2], [1, 1, 2], [4, 2, 2]], np.int32))
ROUND = np.array([[3, 5, 5], [1, 1, 5], [4, 5, 5]])


def small_config(cache):
    config = sudoku_mini.get_config()
    config.model.update(num_layers=1, embed_dim=16, mlp_dim=24, num_heads=2, num_kv_heads=2, dtype="float32")
    config.model.update(high_cycles=1, low_cycles=1, layer_loop="unroll")
    config.data.update(puzzle_count=16, puzzle_augmentations=2, puzzle_heldout=16, cache_dir=str(cache))
    config.train.update(steps=2, global_batch=8, log_every=1)
    config.mesh.update(data=1)
    config.supervision.max_steps = STEPS
    config.logging.tensorboard = config.logging.report = False
    return config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return assembly.assemble(small_config(tmp_path_factory.mktemp("cache")), devices=jax.devices()[:1])


@pytest.fixture(scope="module")
def params(run):
    return random_weights(run.abstract_state.params, spread=0.1)  # larger ones amplify rounding


@pytest.mark.parametrize("changes", [{}, {"parallel": 2}, {"path_noise": 0.3}])
def test_steps_taken_one_at_a_time_end_where_evaluation_ends(run, params, changes):
    """Whatever the training adds: several latents of a slot, or noise."""
    given = np.random.default_rng(0).integers(1, 6, (8, 16)).astype(np.int32)
    objective = dataclasses.replace(run.objective, **changes)
    with mesh_context(run.mesh):
        last = [solving.solve(objective, run.graph, params, row, STEPS)[-1] for row in given]
        labels = np.stack([answer.cells for answer in last])
        batch = {"inputs": given, "labels": labels, "puzzle_identifiers": np.zeros(8, np.int32)}
        figures = jax.device_get(run.eval_step(params, batch))
        predict = jax.jit(lambda params, batch: run.objective.predict(run.model(params), batch))
        predictions, halt_logits = jax.device_get(predict(params, batch))
    np.testing.assert_array_equal(predictions, labels)
    np.testing.assert_allclose(sigmoid(halt_logits), [answer.halt for answer in last], rtol=1e-3)
    assert figures["exact_accuracy"] == (8, 8)
    assert figures["steps"] == (8 * STEPS, 8)
    sure = [answer.halt >= 0.5 for answer in last]
    assert figures["halt_accuracy"][0] == sum(sure), "all are right, so that who is sure is right"


def test_each_step_is_told_and_a_random_model_solves_nothing(run, params):
    with mesh_context(run.mesh):
        answers = solving.solve(run.objective, run.graph, params, GIVEN, STEPS + 2)
    assert len(answers) == STEPS + 2 and all(0 <= answer.halt <= 1 for answer in answers)
    lines = solving.report(PUZZLE, answers)
    assert [line for line in lines if line.startswith("step ")][-1].startswith(f"step {STEPS + 2}: probability of halt")
    assert lines[-1].startswith("NOT a solution: it changes ")


def test_the_answer_of_several_trajectories_is_one_of_theirs_and_says_how_it_was_chosen(run, params):
    """The first is that of a model that is asked once; a choice takes the trajectory that it prefers."""
    how = Breadth(4, STEPS, noise=1.0)
    with mesh_context(run.mesh):
        alone = solving.solve(run.objective, run.graph, params, GIVEN, STEPS)
        found = solving.solve_broadly(run.objective, run.graph, params, GIVEN, how, "q_head", seed=1)
        again = solving.solve_broadly(run.objective, run.graph, params, GIVEN, how, "q_head", seed=1)
    assert len(found.answers) == STEPS and found.last.shape == (4, 16)
    np.testing.assert_array_equal(found.last[0], alone[-1].cells)
    np.testing.assert_array_equal(found.answers[-1].cells, found.last[found.trajectory])
    np.testing.assert_array_equal(found.last, again.last)
    assert found.answers[-1].halt >= alone[-1].halt - 1e-6, "the likeliest to halt"
    lines = solving.report_choice(PUZZLE, found, "q_head")
    assert lines[0].startswith(f"chosen by q_head: trajectory {found.trajectory + 1} of 4; ")
    assert lines[1] == "by the rules (which did not choose): 0 of 4 trajectories solve it"
    solved = solving.Chosen(found.answers, 1, np.stack([GIVEN.ravel(), SOLVED.ravel(), SOLVED.ravel()]))
    lines = solving.report_choice(PUZZLE, solved, "vote")
    assert lines[0].endswith("trajectory 2 of 3; 1 other has the same answer")
    assert "2 of 3 trajectories solve it" in lines[1]


@pytest.mark.parametrize("random_start", [0.0, 1.0])
def test_the_seed_is_that_of_random_latents(run, params, random_start):
    objective = dataclasses.replace(run.objective, random_start=random_start)
    with mesh_context(run.mesh):
        zero, one, again = (
            solving.solve(objective, run.graph, params, GIVEN, 1, seed=seed)[0].halt for seed in (0, 1, 0)
        )
    assert zero == again and (zero != one) == bool(random_start)


def test_a_puzzle_that_nobody_waits_for_ends_after_its_step(run, params):
    asked = iter([True, False])
    with mesh_context(run.mesh):
        answers = solving.solve(run.objective, run.graph, params, GIVEN, 10_000, lambda: next(asked))
    assert len(answers) == 2


def test_what_is_said_of_a_sudoku():
    assert solving.problem(PUZZLE, SOLVED) == ""
    assert "row, column or box" in solving.problem(PUZZLE, np.where(SOLVED == 3, 4, SOLVED))
    other = np.array([0, 1, 3, 2, 4, 5])[SOLVED]  # valid, of other givens
    assert solving.problem(PUZZLE, other) == "it changes 2 of the 4 givens"
    assert "row, column or box" in solving.problem(PUZZLE, GIVEN)
    right = [solving.Answer(GIVEN.ravel(), 0.25), solving.Answer(SOLVED.ravel(), 0.75)]
    lines = solving.report(PUZZLE, right)
    assert lines[3] == "step 1: probability of halting 0.250; nothing changed"
    assert "(1, 2) (1, 3) (2, 1)" in "\n".join(lines) and lines[-1].startswith("a valid solution")


def test_cells_that_are_wrong_whatever_the_solution_is():
    """Givens that were changed, and digits that occur twice; nothing else is known without the solution."""
    assert not solving.mistakes(PUZZLE, SOLVED).any() and not solving.mistakes(PUZZLE, GIVEN).any()
    row, column = np.argwhere(GIVEN != 1)[0]
    answer = GIVEN.copy()
    answer[row, column] = SOLVED[row, column] % 4 + 2
    assert np.argwhere(solving.mistakes(PUZZLE, answer)).tolist() == [[row, column]]
    twice = np.where(SOLVED == 3, 4, SOLVED)
    assert np.array_equal(solving.mistakes(PUZZLE, twice), twice == 4)
    changed = np.array([[3, 5, 5], [5, 1, 5], [4, 5, 5]])
    assert np.array_equal(solving.mistakes(MAZE, changed), (MAZE.tokens == 1) & (changed != 1))


@pytest.mark.parametrize(
    ("answer", "what"),
    [
        (ROUND, ""),
        (MAZE.tokens, "do not lead from S to G"),
        ([[3, 5, 5], [1, 1, 2], [4, 5, 5]], "do not lead"),
        ([[3, 5, 5], [5, 1, 5], [4, 5, 5]], "it changes 1 of the 9"),
        ([[3, 5, 5], [1, 1, 5], [3, 5, 5]], "it changes 1 of the 9"),
    ],
)
def test_what_is_said_of_a_maze(answer, what):
    found = solving.problem(MAZE, np.array(answer))
    assert what in found and bool(what) == bool(found)


def test_a_path_through_a_maze_is_the_shortest_and_nothing_else():
    open_maze = Puzzle("maze", np.where(MAZE.tokens == 1, 2, MAZE.tokens))
    assert solving.problem(open_maze, np.where(ROUND == 1, 2, ROUND)) == "its path has 6 steps, the shortest 2"
    assert "does not need" in solving.problem(open_maze, np.where(ROUND == 1, 5, ROUND))
    assert solving.problem(open_maze, np.array([[3, 2, 2], [5, 2, 2], [4, 2, 2]])) == ""


@pytest.mark.parametrize(
    ("puzzle", "changes", "what"),
    [
        (Puzzle("sudoku", np.ones((9, 9), np.int32)), {}, "model.max_length=16"),
        (Puzzle("maze", np.ones((4, 4), np.int32)), {}, "data.source=sudoku"),
        (PUZZLE, {"source": "arc"}, "data.source=arc"),
        (PUZZLE, {"source": "puzzles", "vocab_size": 11}, "model.vocab_size=11"),
    ],
)
def test_a_puzzle_of_another_kind_is_refused_in_a_line(tmp_path, puzzle, changes, what):
    config = small_config(tmp_path)
    config.data.source = changes.get("source", "sudoku")
    config.model.vocab_size = changes.get("vocab_size", 6)
    with pytest.raises(ConfigError, match=what):
        solving.check_fits(puzzle, config)
    roomy = small_config(tmp_path)  # more tokens than the data have, as training allows
    roomy.model.vocab_size = 7
    for fits in (roomy, small_config(tmp_path)):
        solving.check_fits(PUZZLE, fits)


def test_a_maze_of_as_many_cells_in_another_shape_is_refused():
    """Cells of one row would be read as those of two."""
    config = types.SimpleNamespace(
        data=types.SimpleNamespace(source="maze"), model=types.SimpleNamespace(max_length=36, vocab_size=6)
    )
    solving.check_fits(Puzzle("maze", np.ones((6, 6), np.int32)), config)
    with pytest.raises(ConfigError, match=r"the puzzle is a maze of 4 x 9, but .*use a puzzle of the size"):
        solving.check_fits(Puzzle("maze", np.ones((4, 9), np.int32)), config)
