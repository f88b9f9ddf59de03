# SPDX-License-Identifier: Apache-2.0
"""Votes on ARC grids: ranked as the reference ranks them, the same table however it came together."""

import gzip
import itertools
from fractions import Fraction

import numpy as np
import pytest

from input_pipeline.errors import DataError
from input_pipeline.puzzles import arc
from puzzles import voting
from puzzles.voting import Votes
from tests.support import FIXTURES

PERMUTED = "0314967285"
TASKS = {
    "one": {"test": [{"input": [[1, 2]], "output": [[3]]}, {"input": [[2, 1]], "output": [[4, 4]]}]},
    "two": {"test": [{"input": [[5], [6]], "output": [[7]]}]},
}


@pytest.fixture(scope="module")
def numbers():
    with np.load(FIXTURES / "trm_public_aux.npz", allow_pickle=False) as file:
        return dict(file)


def grid(*rows) -> np.ndarray:
    return np.array(rows, np.uint8)


def tokens(rows: np.ndarray) -> np.ndarray:
    """The canvas of a grid at its top left, with its border."""
    canvas, (height, width) = np.zeros((30, 30), np.uint8), rows.shape
    canvas[height : height + 1, :width] = canvas[:height, width : width + 1] = 1
    canvas[:height, :width] = rows + 2
    return canvas.ravel()


def version(rows: np.ndarray, which: int) -> np.ndarray:
    """A grid recoloured by `PERMUTED`, then turned."""
    return arc.dihedral(np.array([int(colour) for colour in PERMUTED], np.uint8)[rows], which)


def many(seed: int, number: int) -> list[tuple]:
    rng = np.random.default_rng(seed)
    tasks = rng.choice(["one", "two"], number)
    return [(task, grid([1, 2]), rng.integers(0, 3, (1, 2), np.uint8), rng.random()) for task in tasks]


def table(rows) -> Votes:
    votes = Votes()
    for row in rows:
        votes.add(*row)
    return votes


def test_ranking_is_that_of_the_fixtures(numbers):
    votes = Votes()
    for which, probability in zip(numbers["vote/prediction_id"], numbers["vote/halt_prob"], strict=True):
        votes.add("task", grid([0]), grid([which]), probability)
    ranked = votes.ranked("task", grid([0]))
    assert [candidate.grid.item() for candidate in ranked] == numbers["vote/ranked_id"].tolist()
    assert [candidate.count for candidate in ranked] == numbers["vote/ranked_count"].tolist()
    found = [candidate.probability for candidate in ranked]
    np.testing.assert_allclose(found, numbers["vote/ranked_mean_prob"], rtol=1e-12)


def test_votes_are_counted_before_they_are_believed():
    """Two that are unsure outvote a sure one; the surer comes first where as many voted."""
    votes = table([("one", grid([1]), grid([which]), sure) for which, sure in ((2, 0.1), (2, 0.1), (3, 0.8), (4, 0.9))])
    assert [candidate.grid.item() for candidate in votes.ranked("one", grid([1]))] == [2, 4, 3]


def test_a_prediction_is_cropped_as_in_the_fixtures(numbers):
    cases = sorted({key.split("/")[1] for key in numbers if key.startswith("arc_crop/")})
    assert cases
    for case in cases:
        votes = Votes()
        votes.add_batch(["task"], [tokens(grid([1]))], [numbers[f"arc_crop/{case}/tokens"]], [0.0])
        (candidate,) = votes.ranked("task", grid([1]))
        np.testing.assert_array_equal(candidate.grid, numbers[f"arc_crop/{case}/grid"])


def test_versions_vote_for_one_grid_and_blank_rows_for_none():
    given, wanted = grid([1, 2, 3], [4, 5, 6]), grid([9, 8], [0, 7], [1, 1])
    names = ["one"] + [f"one|||t{which}|||{PERMUTED}" for which in range(8)] + [voting.BLANK]
    inputs = [given, *(version(given, which) for which in range(8)), given]
    predictions = [wanted, *(version(wanted, which) for which in range(8)), given]
    votes, logits = Votes(), np.arange(10, dtype=np.float32) - 4
    votes.add_batch(names, [tokens(rows) for rows in inputs], [tokens(rows) for rows in predictions], logits)
    (candidate,) = votes.ranked("one", given)
    np.testing.assert_array_equal(candidate.grid, wanted)
    assert (candidate.count, len(votes)) == (9, 9)
    assert candidate.probability == pytest.approx(np.mean(1 / (1 + np.exp(4.0 - np.arange(9)))), rel=1e-12)


def test_the_table_does_not_depend_on_order_or_on_who_counted():
    rows = many(0, 200)
    whole = table(rows)
    parts = [table(rows[start::3]) for start in range(3)]
    for order in itertools.permutations(parts):
        merged = Votes().merge(order)
        assert merged == whole and merged.to_bytes() == whole.to_bytes()
    assert parts[0].merge([parts[1].merge([parts[2]])]) == whole
    assert table(reversed(rows)) == whole and parts[0] == table(rows[::3])
    order = np.random.default_rng(1).permutation(len(rows))
    for task in ("one", "two"):
        pairs = zip(
            table(rows[i] for i in order).ranked(task, grid([1, 2])), whole.ranked(task, grid([1, 2])), strict=True
        )
        assert all(a.grid.tolist() == b.grid.tolist() and a[1:] == b[1:] for a, b in pairs)


def test_what_nobody_knows_is_not_wrong():
    right = table([("one", grid([1, 2]), grid([3]), 1.0)])
    unknown = {"test": [{"input": [[1, 2]]}]}
    half = {"one": {"test": [TASKS["one"]["test"][0], {"input": [[2, 1]]}]}}
    assert voting.passes(right, half | {"two": unknown}, [1]) == {"pass@1": 1.0}
    assert voting.num_known(half | {"two": unknown}) == 1
    assert voting.results(right, {"one": unknown}, [right]) == {}


def test_probabilities_are_summed_without_rounding():
    probabilities = [0.1] * 10 + [1e-300, 1.0]
    votes = table(("one", grid([1]), grid([2]), probability) for probability in probabilities)
    ((_, total),) = next(iter(votes.table.values())).values()
    assert total == sum(map(Fraction, probabilities))


def test_a_file_gives_the_same_table_back(tmp_path):
    votes = table(many(2, 50))
    votes.add("one", grid([1, 2]), np.zeros((0, 0), np.uint8), 0.5)
    votes.save(tmp_path / "votes")
    assert Votes.load(tmp_path / "votes") == votes
    assert [path.name for path in tmp_path.iterdir()] == ["votes"]


@pytest.mark.parametrize("content", [b"", b"no votes", "cut", "other"])
def test_what_is_no_table_is_one_line(tmp_path, content):
    if content == "cut":
        content = table(many(3, 50)).to_bytes()[:-20]
    if content == "other":
        content = gzip.compress(b'{"format": 99, "votes": []}')
    (tmp_path / "votes").write_bytes(content)
    with pytest.raises(DataError, match=r"votes: .*; evaluate that checkpoint again"):
        Votes.load(tmp_path / "votes")
    with pytest.raises(DataError, match="No such file"):
        Votes.load(tmp_path / "absent")


def test_a_pass_is_the_truth_among_the_first_and_a_task_counts_its_test_inputs():
    votes = Votes()
    for predicted, times in ((3, 5), (8, 2), (9, 1)):
        for _ in range(times):
            votes.add("one", grid([1, 2]), grid([predicted]), 0.5)
    votes.add("two", grid([5], [6]), grid([0]), 0.9)
    votes.add("two", grid([5], [6]), grid([1]), 0.8)
    votes.add("two", grid([5], [6]), grid([7]), 0.7)
    found = voting.passes(votes, TASKS)
    assert found == {
        "pass@1": 0.25,
        "pass@2": 0.25,
        "pass@5": 0.75,
        "pass@10": 0.75,
        "pass@100": 0.75,
        "pass@1000": 0.75,
    }
    assert voting.passes(Votes(), TASKS, [2]) == {"pass@2": 0.0}


def test_an_empty_prediction_is_right_for_no_truth():
    votes = table([("one", grid([1]), np.zeros((0, 0), np.uint8), 0.5)])
    assert voting.passes(votes, {"one": {"test": [{"input": [[1]]}]}}, [1]) == {}
    assert voting.passes(votes, {"one": {"test": [{"input": [[1]], "output": [[1]]}]}}, [1]) == {"pass@1": 0.0}


def test_votes_of_earlier_checkpoints_are_told_apart():
    now, before = table([("two", grid([5], [6]), grid([1]), 0.5)]), table([("two", grid([5], [6]), grid([7]), 0.9)])
    alone, both = voting.results(now, TASKS), voting.results(now, TASKS, [before])
    assert {name for name in both if name not in alone} == {f"pooled/pass@{k}" for k in voting.PASSES}
    assert both["pass@1"] == alone["pass@1"] == 0.0 and both["pooled/pass@1"] == 0.5
    assert len(now) == len(before) == 1


def test_a_submission_has_two_grids_for_every_test_input():
    votes = Votes()
    for predicted in (3, 3, 8, 8, 8, 9):
        votes.add("one", grid([1, 2]), grid([predicted]), 0.5)
    votes.add("two", grid([5], [6]), grid([7, 7]), 0.5)
    assert voting.submission(votes, TASKS) == {
        "one": [
            {"attempt_1": [[8]], "attempt_2": [[3]]},
            {"attempt_1": voting.NO_ANSWER, "attempt_2": voting.NO_ANSWER},
        ],
        "two": [{"attempt_1": [[7, 7]], "attempt_2": [[7, 7]]}],
    }


def test_no_task_is_no_score():
    with pytest.raises(DataError, match="no task"):
        voting.passes(Votes(), {})
    with pytest.raises(DataError, match="task one has no test input"):
        voting.passes(Votes(), {"one": {"test": []}})


def test_sigmoid_neither_overflows_nor_spreads_what_is_no_number():
    np.testing.assert_array_equal(voting.sigmoid([-1e30, 0.0, 1e30, np.nan]), [0.0, 0.5, 1.0, 0.0])


def test_the_votes_of_each_step_are_scored_alone():
    right, wrong, truth = Votes(), Votes(), [[1, 2]]
    for votes, answer in ((right, truth), (wrong, [[3]])):
        votes.add("task", np.array([[5]], np.uint8), np.array(answer, np.uint8), 0.5)
    tasks = {"task": {"test": [{"input": [[5]], "output": truth}]}}
    found = voting.of_steps({"10": right, "20": wrong}, tasks, "pass@2")
    assert found == {"at_step/10/pass@2": 1.0, "at_step/20/pass@2": 0.0}
