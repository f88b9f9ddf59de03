# SPDX-License-Identifier: Apache-2.0
"""What a run on puzzles answers about its steps."""

import contextlib
import json
import types

import pytest

import train
from checkpointing.retention import Retention
from configs import base
from configs.errors import ConfigError
from core import inspection
from tests.puzzles.test_solving import small_config


def test_the_best_checkpoint_is_ranked_by_the_losses_that_were_measured_after_it_was_saved(tmp_path, monkeypatch):
    """The record of the newest has none of its own; a step that was repeated counts by its last line."""
    lines = [
        {"kind": "train", "step": 10, "loss": 9.0},
        {"kind": "eval", "step": 10, "eval_loss": 8.0},
        {"kind": "eval", "step": 20, "eval_loss": 3.0},
        {"kind": "event", "event": "start", "step": 10},
        {"kind": "eval", "step": 20, "eval_loss": 7.5},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    records = {step: {"losses": {}} for step in (10, 20, 30)}
    fake = types.SimpleNamespace(
        damage=lambda step: [], steps=lambda: [10, 20, 30], record=records.get,
        store=types.SimpleNamespace(others=dict),
    )  # fmt: skip
    monkeypatch.setattr(inspection, "Checkpoints", lambda address, store: contextlib.nullcontext(fake))
    table, is_good = inspection.checkpoints_table("run", tmp_path, Retention(1, 0, 1))
    assert is_good and table == [
        "checkpoint 10: good  (the next save deletes it)",
        "checkpoint 20: good  (kept: best held-out loss, 7.5000)",
        "checkpoint 30: good  (kept: newest)",
        "3 of 3 good",
    ]
    (tmp_path / "metrics.jsonl").write_text('{"kind": "eval", "step": "x"}\n{}\n')
    (note, *table), is_good = inspection.checkpoints_table("run", tmp_path, Retention(1, 0, 1))
    assert is_good and len(table) == 4 and "the best checkpoint is ranked without it" in note


@pytest.mark.slow
def test_a_step_that_the_run_went_back_before_is_not_its_last(tmp_path):
    lines = [{"kind": "train", "step": 550}, {"kind": "event", "event": "start", "step": 500}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert inspection.last_logged_step(tmp_path) == 500


def test_a_step_that_trained_on_what_the_model_drew_has_no_documents(tmp_path):
    """Its rows name prompts, and it may have asked none of them."""
    config = base.get_config()
    config.train.objective = "grpo"
    with pytest.raises(ConfigError, match=r"trains on answers that the model drew, .*/rollouts\.jsonl has them"):
        inspection.explain_step(config, tmp_path, tmp_path, 1)


def test_a_step_of_puzzles_is_told_by_group_puzzle_and_example(single_device, tmp_path):
    config = small_config(tmp_path / "cache")
    train.train(config, tmp_path / "run")
    header, *rows = inspection.explain_step(config, tmp_path / "run", tmp_path / "run", 2)
    assert header.split() == ["row", "part", "document", "tokens"]
    assert [row.split()[0] for row in rows] == list("01234567")
    assert all("group " in row and ", puzzle " in row and ", example 0" in row for row in rows)
