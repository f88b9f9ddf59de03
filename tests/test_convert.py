# SPDX-License-Identifier: Apache-2.0
"""Weights of the reference go into a workdir and out of it to the last bit, and a run takes up what was imported."""

import shutil

import jax
import numpy as np
import pytest

import train
from checkpointing.checkpoints import CheckpointError, Checkpoints
from configs.trm import sudoku_mini
from core import assembly
from core.evaluators import evaluate_newest
from migration import trm_reference
from parallelism.mesh import mesh_context
from reporting import metrics
from settings.keys import flat
from tests.puzzles.test_solving import small_config
from tests.support import random_weights
from tests.test_train import command, finish, lines_of


def config_of(place):
    """Return the configuration of a model of one cycle; its run ends with the weights that it began with."""
    config = small_config(place)
    config.model.update(high_cycles=1, low_cycles=1)
    config.optimizer.update(learning_rate=1e-30, table_learning_rate=0.0)
    return config


def typed(config) -> list[str]:
    """Return the recipe on the command line, and what differs from it."""
    recipe = flat(sudoku_mini.get_config())
    changes = {key: value for key, value in flat(config).items() if value != recipe[key] and "mesh" not in key}
    return ["--config=configs/trm/sudoku_mini.py", *(f"--config.{key}={value}" for key, value in changes.items())]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A file of weights, imported by the command into `imported`."""
    place = tmp_path_factory.mktemp("convert")
    params = random_weights(assembly.assemble(config_of(place), devices=jax.devices()[:1]).abstract_state.params)
    trm_reference.save(place / "theirs.safetensors", params)
    files = [f"--trm={place}/theirs.safetensors", f"--workdir={place}/imported"]
    status, out, err = finish(command("convert.py", "import", *files, *typed(config_of(place)), cache=place))
    assert status == 0 and "are the checkpoint of step 0 in" in out, err
    return place


def test_what_is_exported_is_what_was_imported_bit_for_bit(place):
    files = [f"--trm={place}/ours.safetensors", f"--workdir={place}/imported"]
    for wanted in (0, 2):  # the second time the file is there
        status, _, err = finish(command("convert.py", "export", *files, cache=place))
        assert status == wanted, err
    assert "exists already; name another file" in err and len(err.strip().splitlines()) == 1
    assert (place / "ours.safetensors").read_bytes() == (place / "theirs.safetensors").read_bytes()


@pytest.mark.slow
def test_a_run_takes_up_the_weights_and_their_average(single_device, place, tmp_path):
    config = config_of(place)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    wanted = trm_reference.load(place / "theirs.safetensors", run.abstract_state.params)
    with Checkpoints(place / "imported") as checkpoints, mesh_context(run.mesh):
        state = checkpoints.restore(0, run.abstract_state)
    jax.tree.map(np.testing.assert_array_equal, state.params, wanted)
    jax.tree.map(np.testing.assert_array_equal, state.extra["average"], wanted)
    assert int(state.step) == int(state.examples) == 0
    shutil.copytree(place / "imported", tmp_path / "run")
    train.train(config, tmp_path / "run")
    assert sorted(lines_of(tmp_path / "run", "train")) == [1, 2]
    events = metrics.read_lines(tmp_path / "run" / "metrics.jsonl")
    [account] = [line for line in events if line.get("event") == "goodput"]
    assert account["seconds"]["idle"] == 0  # the time since the import is not part of the run's
    with Checkpoints(tmp_path / "run") as checkpoints, mesh_context(run.mesh):
        params = checkpoints.restore_params(2, run.abstract_state.params, "params")
    jax.tree.map(lambda found, weight: np.testing.assert_allclose(found, weight, rtol=0, atol=1e-20), params, wanted)


def test_a_batch_of_another_size_is_refused_where_its_rows_hold_puzzles_but_evaluates(single_device, place, capsys):
    config = config_of(place)
    config.train.global_batch = 16
    with pytest.raises(CheckpointError, match=r"train\.global_batch=8, now 16"):
        train.train(config, place / "imported")
    corpus = train.prepare_corpus(config, vocab_size_typed=True)
    evaluate_newest(config, place / "imported", place / "imported", corpus)
    assert "held-out exact: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["import", "--trm=PLACE/theirs.safetensors", "RECIPE", "--config.model.mlp_dim=96"], "but the model needs ["),
        (
            ["import", "--trm=PLACE/theirs.safetensors", "--config=configs/trm/sudoku_mini.py"],
            "use the configuration",
        ),
        (
            ["import", "--trm=PLACE/theirs.safetensors", "RECIPE", "--workdir=PLACE/imported"],
            "has checkpoint 0 already",
        ),
        (["export", "--trm=PLACE/no/new.safetensors", "--workdir=PLACE/imported"], "does not exist"),
        (
            ["import", "--trm=PLACE/theirs.safetensors", "RECIPE", "--config.model.update_rate=0.5"],
            "the reference has no model.update_rate=0.5, only model.update_rate=1.0",
        ),
    ],
)
def test_a_mistake_is_one_line_and_nothing_is_written(place, tmp_path, arguments, what):
    given = [f"--workdir={tmp_path}/new"]
    for argument in arguments:
        given += typed(config_of(place)) if argument == "RECIPE" else [argument.replace("PLACE", str(place))]
    verbs = [word for word in given if not word.startswith("--")]
    others = [word for word in given if word.startswith("--")]
    status, _, err = finish(command("convert.py", *verbs, *others, cache=place))
    assert status == 2 and what in err and len(err.strip().splitlines()) == 1, err
    assert not (tmp_path / "new").exists() and not list(place.glob("new*"))
