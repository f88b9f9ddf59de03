# SPDX-License-Identifier: Apache-2.0
"""ARC: what is done to grids can be undone, versions differ, and pairs go where they belong."""

import json

import numpy as np
import pytest

from input_pipeline.errors import DataError
from input_pipeline.puzzles import arc, build

GENERATOR = np.random.default_rng(0)


def grid(rows: int, columns: int) -> np.ndarray:
    return GENERATOR.integers(0, 10, (rows, columns), dtype=np.uint8)


@pytest.mark.parametrize("turn", range(8))
def test_an_augmentation_can_be_undone_by_its_name(turn):
    for _ in range(20):
        colours = np.concatenate([[0], GENERATOR.permutation(np.arange(1, 10))]).astype(np.uint8)
        one = grid(*GENERATOR.integers(1, 31, 2))
        name = arc.version_name("abc", turn, colours)
        task, *changes = arc.parse_name(name)
        assert task == "abc" and name.startswith(f"abc|||t{turn}|||0")
        np.testing.assert_array_equal(arc.restore(arc.dihedral(colours[one], turn), *changes), one)
    assert arc.parse_name("abc")[:2] == ("abc", 0) and arc.parse_name("abc")[2].tolist() == list(range(10))


def test_what_is_encoded_is_cropped_again():
    for rows in range(1, 31):
        for columns in range(1, 31):
            shown = grid(rows, columns)
            np.testing.assert_array_equal(arc.crop(arc.encode(shown[None], np.zeros((1, 2), int))[0]), shown)


@pytest.mark.parametrize("token", [0, 1, 12])
def test_nothing_is_cropped_where_the_corner_is_no_colour(token):
    assert arc.crop(np.full(900, token)).shape == (0, 0)


def task(name="one", pairs=3, held_out=False):
    return arc.Task(name, [(grid(3, 4), grid(5, 2)) for _ in range(pairs)], [(grid(2, 2), grid(1, 3))], held_out)


def test_versions_differ_and_there_may_be_few():
    found = arc.draw_versions(task(), 200, np.random.default_rng(0))
    assert len(found.turns) == 201 and found.turns[0] == 0 and found.colours[0].tolist() == list(range(10))
    assert not found.colours[:, 0].any() and (np.sort(found.colours, axis=1) == np.arange(10)).all()
    black = arc.Task("black", [(np.zeros((1, 2), np.uint8), np.zeros((2, 2), np.uint8))], [], False)
    found = arc.draw_versions(black, 200, np.random.default_rng(0))
    assert len(found.turns) == 2  # lying and standing


def test_one_pair_of_each_version_begins_in_the_corner_and_all_stay_on_the_canvas():
    shown = task().train
    found = arc.draw_versions(task(), 300, np.random.default_rng(0))
    offsets = arc.draw_offsets(shown, found.turns, np.random.default_rng(1))
    assert (offsets == 0).all(axis=2).any(axis=1).all() and offsets.shape == (301, 3, 2)
    assert offsets.max() > 20
    inputs, labels = arc.sequences(shown, found, offsets)
    for nth in range(0, 903, 31):
        version, pair = divmod(nth, 3)
        moved = [arc.dihedral(found.colours[version][one], found.turns[version]) for one in shown[pair]]
        for one, sequence in zip(moved, (inputs[nth], labels[nth]), strict=True):
            np.testing.assert_array_equal(arc.encode(one[None], offsets[version, pair][None])[0], sequence)


@pytest.fixture
def folder(tmp_path):
    """The files of ARC-1, two tasks a subset."""
    for subset in arc.SUBSETS["arc1"][0]:
        challenges, solutions = {}, {}
        for name in (f"{subset}-a", f"{subset}-b"):
            one = task(pairs=2)
            pairs = [{"input": given.tolist(), "output": made.tolist()} for given, made in one.train]
            challenges[name] = {"train": pairs, "test": [{"input": one.test[0][0].tolist()}]}
            solutions[name] = [one.test[0][1].tolist()]
        (tmp_path / f"arc-agi_{subset}_challenges.json").write_text(json.dumps(challenges))
        (tmp_path / f"arc-agi_{subset}_solutions.json").write_text(json.dumps(solutions))
    return tmp_path


@pytest.fixture
def built(folder, section):
    return build.arc_tasks(section(puzzle_augmentations=6), str(folder), 0, lambda line: None)


def test_pairs_go_where_they_belong(built, folder):
    train, test = built
    assert (train.num_groups, test.num_groups) == (6, 2)
    assert train.num_identifiers == len(train.identifiers) == 1 + 6 * 7 and train.identifiers[0] == "<blank>"
    assert train.num_examples(900) == 4 * 3 + 2 * 2 and test.num_examples(900) == 2 * 7
    stored = test.read(np.arange(14), 900)
    tests = test.test_puzzles
    assert set(tests) == {"evaluation-a", "evaluation-b"}
    for place in range(14):
        name, *changes = arc.parse_name(test.identifiers[stored["puzzle_identifiers"][place]])
        (pair,) = tests[name]["test"]
        for key, column in (("input", "inputs"), ("output", "labels")):
            tokens = np.maximum(stored[column][place], 0)
            np.testing.assert_array_equal(arc.restore(arc.crop(tokens), *changes), pair[key])
    assert set(np.unique(stored["labels"])) <= {-100, *range(1, 12)}


def test_held_out_tasks_are_shown_in_training_with_the_identifiers_of_the_test(built):
    train, test = built
    shown = train.read(train.order(np.arange(16 * 50), 900, 0), 900)["puzzle_identifiers"]
    asked = test.read(np.arange(14), 900)["puzzle_identifiers"]
    assert set(asked.tolist()) <= set(shown.tolist())
    name = train.document_name(int(train.order(np.array([3]), 900, 0)[0]))
    assert name.startswith("group ") and ", example " in name and ("-a" in name or "-b" in name)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "training_challenges.json: is not valid JSON"),
        ("[]", "training_challenges.json: should be an object, but is []"),
        ("{}", "training_challenges.json: has no tasks"),
        ('{"x": {"train": []}}', "training_challenges.json: x.test is missing"),
        (
            '{"x": {"train": [{"input": [[1]]}], "test": [{"input": [[1]]}]}}',
            "task x: a train pair has no 'outp",
        ),
        ('{"x": {"train": [{"input": [[1.5]]}], "test": []}}', "x.train.0.input.0.0: should be a valid integer"),
        ('{"a|||b": {"train": [], "test": []}}', "task a|||b: has ||| in its name"),
        ('{"x": {"train": [], "test": [{"input": [[1]]}]}}', "task x: has no train pairs"),
        (
            '{"x": {"train": [{"input": [[1, 2], [3]], "output": [[1]]}], "test": [{"input": [[1]]}]}}',
            "task x: a grid ",
        ),
        (
            '{"x": {"train": [{"input": [[10]], "output": [[1]]}], "test": [{"input": [[1]]}]}}',
            "task x: a grid must be ",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named(folder, section, content, message):
    (folder / "arc-agi_training_challenges.json").write_text(content)
    with pytest.raises(DataError) as caught:
        build.arc_tasks(section(), str(folder), 0, lambda line: None)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert not list((folder / "cache" / "puzzles").glob("*.part"))


def test_answers_that_nobody_knows_count_for_nothing(folder, section):
    path = folder / "arc-agi_evaluation_solutions.json"
    path.write_text(json.dumps({"evaluation-b": json.loads(path.read_text())["evaluation-b"]}))
    _, test = build.arc_tasks(section(puzzle_augmentations=6), str(folder), 0, lambda line: None)
    tasks, stored = test.test_puzzles, test.read(np.arange(14), 900)
    assert {name: ["output" in pair for pair in task["test"]] for name, task in tasks.items()} == {
        "evaluation-a": [False], "evaluation-b": [True],
    }  # fmt: skip
    for label, number in zip(stored["labels"], stored["puzzle_identifiers"], strict=True):
        assert (label != -100).any() == test.identifiers[number].startswith("evaluation-b")


def test_an_answer_that_is_to_be_trained_on_is_not_made_up(folder, section):
    (folder / "arc-agi_training_solutions.json").unlink()
    with pytest.raises(
        DataError, match=r"task training-a: test pair 0 has no answer to train on; add it as 'output' or"
    ):
        build.arc_tasks(section(), str(folder), 0, lambda line: None)


def test_a_missing_subset_is_named(folder, section):
    (folder / "arc-agi_concept_challenges.json").unlink()
    with pytest.raises(DataError, match=r"has no file \*_concept_challenges.json"):
        build.arc_tasks(section(), str(folder), 0, lambda line: None)


def test_two_files_of_solutions_are_not_chosen_from(folder, section):
    (folder / "a_evaluation_solutions.json").write_text("{}")
    with pytest.raises(DataError, match=r"has 2 files \*_evaluation_solutions.json; it needs at most one"):
        build.arc_tasks(section(), str(folder), 0, lambda line: None)


@pytest.mark.parametrize("grid", [[[1], [2, 3]], [[300]], [[]]])
def test_the_tasks_of_a_published_data_set_are_checked_before_training(built, section, grid):
    """They are needed at the votes, which may be hours later."""
    place = built[1].folder
    assert build.published(section(), str(place))[1].num_groups == 2
    file = place / "test_puzzles.json"
    tasks = json.loads(file.read_text())
    tasks["evaluation-a"]["test"][0]["input"] = grid
    file.write_text(json.dumps(tasks))
    with pytest.raises(DataError, match=r"test_puzzles\.json: task evaluation-a: a grid must be a rectangle"):
        build.published(section(), str(place))


def test_both_parts_of_a_data_set_have_puzzles_of_one_size(built, section):
    place = built[1].folder
    file = place / "test" / "dataset.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"seq_len": 1}))
    for name in ("inputs", "labels"):
        file = next((place / "test").glob(f"*__{name}.npy"))
        np.save(file, np.load(file)[:, :1])
    with pytest.raises(DataError, match="puzzles of train have 900 cells, those of test 1; build it again"):
        build.published(section(), str(place))
