# SPDX-License-Identifier: Apache-2.0
"""Search spaces are read from Python files; what is wrong with one is said in a line that names file and entry."""

import pathlib
import re

import pytest

pytest.importorskip("optuna", reason="studies need `make setup EXTRAS=studies`")

from configs.errors import ConfigError
from configs.space import Choice, Range
from settings import loading, validation
from studies.search import spaces


def written(tmp_path, text: str) -> str:
    path = tmp_path / "mine.py"
    path.write_text("from configs.space import Choice, Range\n" + text)
    return str(path)


@pytest.mark.parametrize("name", ["lr", "architecture"])
def test_every_corner_of_the_spaces_of_the_workspace_is_a_valid_configuration(name):
    space = spaces.read(f"spaces/{name}.py")
    found = spaces.distributions(space)
    ends = {key: list(one.choices) if hasattr(one, "choices") else [one.low, one.high] for key, one in found.items()}
    for place in range(max(map(len, ends.values()))):
        point = {key: values[place % len(values)] for key, values in ends.items()}
        typed = {key: str(value) for key, value in spaces.changes(space, point).items()}
        loaded = loading.load("configs/tiny.py", "", typed | {"train.steps": "10"})
        validation.resolve_mesh(loaded.config, 1, loaded)
        validation.validate(loaded.config, 1, loaded)


def test_a_named_choice_changes_all_its_keys():
    space = {"width": Choice({"a": {"model.embed_dim": 64, "model.num_heads": 2}, "b": {}}), "train.seed": Range(0, 9)}
    assert spaces.changes(space, {"width": "a", "train.seed": 3}) == {
        "model.embed_dim": 64, "model.num_heads": 2, "train.seed": 3,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'SPACE = {"optimizer.lr": Range(1e-4, 1e-2)}',
            "optimizer.lr is not .*optimizer.learning_rate",
        ),
        ('SPACE = {"model.num_layers": 3}', "model.num_layers is 3, which is neither a Range nor a Choice"),
        ('SPACE = {"model.num_layers": Range(3, 1)}', "a range from 3 to 1 is empty"),
        ('SPACE = {"optimizer.learning_rate": Range(0, 1.0, log=True)}', "begins above 0"),
        (
            'SPACE = {"model.num_layers": Range(1, 9, step=0.5)}',
            "a range of whole numbers is 0.5; give 1.0",
        ),
        ('SPACE = {"model.num_layers": Choice((1, 1))}', "at least two different values"),
        ("SPACE = {}", "SPACE must be a dictionary"),
        ('SPACE = {"width": Choice({"small": 64, "big": 128})}', "width names values that are not sets"),
        ("SPACE = {3: Range(1, 2)}", "3 is not a key, which is a text"),
        ('SPACE = {"width": Choice({"a": {}, "b": {4: 1}})}', "4 is not a key, which is a text"),
        ('SPACE = {5: Choice({"a": {}, "b": {"model.num_layers": 1}})}', "5 is not a key, which is a text"),
        (
            'SPACE = {"model.num_layers": Range(1, 3), "size": Choice({"a": {"model.num_layers": 2}, "b": {}})}',
            "model.num_layers is set by model.num_layers and by size; leave one out",
        ),
        ("space = 1", "no attribute 'SPACE'"),
        ("SPACE = (", "never closed"),
    ],
)
def test_mistakes_are_one_line(tmp_path, text, message):
    path = written(tmp_path, text)
    with pytest.raises(ConfigError, match=rf"^--space={re.escape(path)}(, line \d)?: .*{message}") as error:
        spaces.read(path)
    assert "\n" not in str(error.value)


def test_a_space_in_the_home_folder_is_named_by_a_tilde(tmp_path, monkeypatch):
    path = pathlib.Path(written(tmp_path, 'SPACE = {"model.num_layers": Range(1, 3)}'))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert list(spaces.read(f"~/{path.relative_to(tmp_path)}")) == ["model.num_layers"]


def test_a_file_that_is_not_there_is_answered_with_those_that_are(tmp_path):
    with pytest.raises(ConfigError, match=r"--space=spaces/lrr\.py is not a Python file .* spaces/lr\.py"):
        spaces.read("spaces/lrr.py")
