# SPDX-License-Identifier: Apache-2.0
"""Real runs of a tiny recursive model on Sudokus of 4 x 4 made on the spot, by the loop that trains everything."""

import json
import os
import pathlib
import signal

import jax
import numpy as np
import pytest

import assembly
import train
from configs.trm import sudoku_mini
from configs.validation import validate
from parallelism.mesh import mesh_context
from training.checkpoints import Checkpoints
from training.interruption import Interrupted
from training.step_log import StepLog

SMALL = {
    "model.num_layers": 1, "model.embed_dim": 16, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 24,
    "model.dtype": "float32",
    "model.high_cycles": 2, "model.low_cycles": 2, "model.puzzle_dim": 16, "model.prefix_length": 1,
    "model.layer_loop": "scan", "supervision.max_steps": 5, "supervision.exploration": 0.5, "train.global_batch": 16,
    "train.steps": 6, "train.log_every": 1, "train.eval_every": 0, "train.save_every": 0, "data.puzzle_count": 24,
    "data.puzzle_augmentations": 3, "data.puzzle_heldout": 20, "optimizer.warmup_steps": 2,
    "optimizer.table_learning_rate": 0.01, "logging.tensorboard": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> pathlib.Path:
    """Where puzzles are kept, made once."""
    return tmp_path_factory.mktemp("cache")


def tiny(cache: pathlib.Path, **changes):
    """Return a validated run on the devices of this process."""
    config = sudoku_mini.get_config()
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in (SMALL | {"data.cache_dir": str(cache)} | changes).items():
        section, name = key.split(".")
        config[section][name] = value
    validate(config, jax.device_count())
    return config


def lines_of(workdir: pathlib.Path, kind: str) -> dict[int, dict]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if line["kind"] == kind}


def last_state(config, workdir: pathlib.Path):
    run = assembly.assemble(config)
    with Checkpoints(workdir) as checkpoints, mesh_context(run.mesh):
        return jax.device_get(checkpoints.restore(config.train.steps, run.abstract_state))


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory) -> pathlib.Path:
    """The workdir of a run that was never stopped."""
    workdir = tmp_path_factory.mktemp("whole")
    train.train(tiny(cache), workdir)
    return workdir


def test_a_stopped_run_goes_on_bit_for_bit(cache, whole, tmp_path, monkeypatch):
    """With what every slot holds: after step 4 of 5 on a puzzle all are at work, and take the next after one more."""
    usual = StepLog.add

    def stopping(log, step, scalars, rows):
        usual(log, step, scalars, rows)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(StepLog, "add", stopping)
    with pytest.raises(Interrupted):
        train.train(tiny(cache), tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["4"]
    monkeypatch.setattr(StepLog, "add", usual)
    train.train(tiny(cache), tmp_path)
    stopped, uninterrupted = (last_state(tiny(cache), workdir) for workdir in (tmp_path, whole))
    jax.tree.map(np.testing.assert_array_equal, stopped, uninterrupted)
    assert (stopped.carry["steps"] == 1).all()
    for key in ("loss", "gradient_norm", "exact_accuracy"):
        ours, theirs = (lines_of(workdir, "train") for workdir in (tmp_path, whole))
        assert [ours[step][key] for step in range(1, 7)] == [theirs[step][key] for step in range(1, 7)]


def test_metrics_hold_what_is_held_out_and_what_slots_did(whole):
    trained, evaluated = lines_of(whole, "train"), lines_of(whole, "eval")
    wanted = {"exact_accuracy", "accuracy", "halt_accuracy", "steps", "lm_loss", "halt_loss", "loss"}
    assert wanted <= trained[6].keys()
    assert {f"eval_{name}" for name in wanted} <= evaluated[6].keys()
    assert evaluated[6]["eval_steps"] == 5 and 0 <= evaluated[6]["eval_exact_accuracy"] <= 1


@pytest.mark.parametrize(("batch", "steps", "eval_every"), [(6144, 8138, 813), (768, 65104, 6510)])
def test_published_epochs_come_to_the_published_steps(cache, batch, steps, eval_every):
    """50,000 passes over 1,000 puzzles, and an evaluation each 5,000."""

    class Windows:
        def num_examples(self, length):
            return 1000

    class Corpus:
        train = Windows()

    config = tiny(cache, train__steps=0, train__epochs=50_000.0, train__global_batch=batch)
    config.evaluation.every_epochs = 5000.0
    assert train.set_steps(config, Corpus(), None) == (0, steps)
    assert config.train.eval_every == eval_every


def test_a_pass_has_each_puzzle_once_however_many_versions_it_is_in(cache, tmp_path):
    """24 puzzles in 4 versions are 24 examples: 3 passes are 4 batches of 16 and a half."""
    config = tiny(cache, train__steps=0, train__epochs=3.0)
    assert train.set_steps(config, train.prepare_corpus(config, True), None) == (0, 4)


def test_a_few_boards_are_learned_and_then_take_fewer_steps(cache, tmp_path):
    config = tiny(
        cache, train__steps=120, model__embed_dim=32, model__mlp_dim=64, data__puzzle_count=4,
        data__puzzle_augmentations=0, optimizer__learning_rate=5e-3, supervision__max_steps=3,
        supervision__exploration=0.1, model__puzzle_dim=0, model__prefix_length=0, optimizer__warmup_steps=10,
    )  # fmt: skip
    train.train(config, tmp_path)
    trained = lines_of(tmp_path, "train")
    last = [trained[step] for step in range(max(trained) - 20, max(trained))]
    assert trained[3]["steps"] == 3 and trained[3]["exact_accuracy"] < 0.5
    assert min(line["exact_accuracy"] for line in last) == 1.0
    assert np.mean([line["steps"] for line in last]) < 2
