# SPDX-License-Identifier: Apache-2.0
"""Rollouts with a real model: groups, rewards, advantages, and a run that resumes in the middle."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import train
from configs.errors import ConfigError
from input_pipeline.countdown import CountdownRollouts
from input_pipeline.packing import IGNORED
from reasoning import rollouts
from settings import loading, validation

SMALL = {
    "model.dtype": "float32", "model.num_layers": "1", "model.embed_dim": "32", "model.mlp_dim": "64",
    "train.global_batch": "8", "grpo.group_size": "4", "train.steps": "4", "train.save_every": "2",
    "train.log_every": "1", "train.eval_every": "0", "evaluation.batches": "1", "logging.tensorboard": "false",
    "tot.use_tot": "false",
}  # fmt: skip
SAMPLER = rollouts.Sampler("countdown_rollouts", "byte", 4, 1.0, True, "task", 128)


def small(**changes):
    typed = SMALL | {key.replace("__", "."): value for key, value in changes.items()}
    loaded = loading.load("configs/countdown_grpo.py", "", typed)
    loaded.config.mesh.fsdp = 1
    validation.validate(loaded.config, 1, loaded)
    return loaded.config


def test_a_run_trains_on_what_the_live_model_draws_and_resumes_bit_for_bit(tmp_path, single_device):
    """The generator's log-probabilities are the trainer's to 1e-5, so that nothing is clipped."""
    whole = train.train(small(grpo__reward="random"), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    resumed = train.train(small(grpo__reward="random"), tmp_path / "resumed")
    assert resumed.step == 4 and resumed.metrics == whole.metrics
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    trained = [line for line in lines if line["kind"] == "train"]
    assert [line["step"] for line in trained] == [1, 2, 3, 4]
    for line in trained:
        assert line["mismatch"] < 1e-5 and line["clipped"] == 0 and 0 <= line["reward"] <= 1
    assert any(0 < line["reward"] < 1 for line in trained) and any(line["gradient_norm"] > 1e-3 for line in trained)


def test_advantages_are_relative_to_the_group():
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 1], np.float32)
    advantages = SAMPLER._advantages(rewards)
    np.testing.assert_allclose(advantages[:4], np.array([3, -1, -1, -1]) / np.sqrt(3), rtol=1e-3)  # EPSILON
    assert (advantages[4:] == 0).all(), "a group whose answers are equally good teaches nothing"
    mean = dataclasses.replace(SAMPLER, divides=False)._advantages(rewards)
    np.testing.assert_allclose(mean, [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0])


def test_rows_are_prompts_with_answers_and_their_log_probabilities():
    asked, answers = [[1, 2, 3], [4]], [([5, 6], [-0.5, -0.25]), ([7, 8, 9, 10, 11], [-1.0, -2.0, -3.0, -4.0, -5.0])]
    batch = rollouts._arrays(asked, answers, np.array([1, 0], np.float32), np.array([0.5, -0.5], np.float32), 4)
    assert batch["tokens"].tolist() == [[1, 2, 3, 5], [4, 7, 8, 9]]
    assert batch["targets"].tolist() == [[IGNORED, IGNORED, 5, 6], [7, 8, 9, 10]], "the second answer is cut off"
    assert batch["positions"].tolist() == [[0, 1, 2, 3]] * 2 and (batch["segments"] == 1).all()
    assert batch["old_log_probs"].view(np.float32).tolist() == [[0, 0, -0.5, -0.25], [-1, -2, -3, -4]]
    assert batch["rewards"].view(np.float32).tolist() == [1, 0]


def test_prompts_are_the_problems_of_the_data():
    rows = CountdownRollouts(0, "train").read(np.arange(20), 80)
    for tokens, targets in zip(rows["tokens"], rows["targets"], strict=True):
        text = bytes(rollouts.prompt_of(tokens, targets)).decode()
        assert text.endswith(":") and text.count("=") == 1
    assert not rows["old_log_probs"].any() and rows["advantages"].shape == (20,)


@pytest.mark.parametrize("changes, said", [
    ({"grpo__group_size": "3"}, r"train\.global_batch=8 is not a multiple of grpo\.group_size=3; use "),
    ({"data__source": "countdown"}, r"needs data\.source=countdown_rollouts, not countdown"),
    ({"grpo__kl": "0.1"}, r"grpo\.kl=0\.1 needs train\.init_from"),
])  # fmt: skip
def test_keys_that_cannot_work_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        small(**changes)
