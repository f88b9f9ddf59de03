# SPDX-License-Identifier: Apache-2.0
"""Learning from the scores of reasoning-gym, and from its answers: real runs of a tiny model on two generators."""

import json
import shutil
import sys

import pytest

import train
from configs.errors import ConfigError
from input_pipeline.tasks import questions
from settings import loading, validation

SMALL = {
    "model.dtype": "float32", "model.num_layers": "1", "model.embed_dim": "32", "model.mlp_dim": "64",
    "model.vocab_size": "256", "model.max_length": "256", "train.sequence_length": "256", "train.global_batch": "8",
    "train.steps": "4", "train.save_every": "2", "train.log_every": "1", "train.eval_every": "2",
    "evaluation.batches": "1", "evaluation.sample_tokens": "0", "logging.tensorboard": "false",
    "logging.report": "false",
    "data.tokenizer": "byte", "data.source": "reasoning_gym_rollouts", "train.objective": "grpo",
}  # fmt: skip
REASON = "reasoning-gym is not installed here: make setup EXTRAS=reasoning"


def small(name: str, **changes):
    typed = SMALL | {"grpo.group_size": "4", "data.path": name}
    typed |= {key.replace("__", "."): value for key, value in changes.items()}
    typed = {key: value for key, value in typed.items() if value is not None}
    if typed["train.objective"] != "grpo":
        del typed["grpo.group_size"]
    loaded = loading.load("configs/tiny.py", "", typed)
    loaded.config.mesh.fsdp = 1
    validation.validate(loaded.config, 1, loaded)
    return loaded.config


def lines_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["basic_arithmetic", "letter_counting"])
def test_a_run_learns_from_the_scores_of_a_generator_and_resumes_bit_for_bit(
    name, single_device, tmp_path, monkeypatch
):
    """The true scores of such a small model are 0, so a score of its letters replaces them."""
    pytest.importorskip("reasoning_gym", reason=REASON)
    scored = []

    def score(self, number, answer):
        entry = self.entry(number)
        scored.append((entry["question"], answer, usual(self, number, answer)))
        return sum(letter.islower() for letter in answer) / 256

    usual = questions.Generator.score
    monkeypatch.setattr(questions.Generator, "score", score)
    whole = train.train(small(name), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "4")
    resumed = train.train(small(name), tmp_path / "resumed")
    assert resumed.step == 4 and resumed.metrics == whole.metrics, "bit for bit"

    rollouts = lines_of(tmp_path / "whole" / "rollouts.jsonl")
    assert len(rollouts) == 32 and any(one["reward"] > 0 for one in rollouts)
    for one, (question, answer, truth) in zip(rollouts, scored, strict=False):
        assert question in one["prompt"] and one["answer"] == answer, "an answer is scored for its own question"
        assert 0 <= truth <= 1 and not questions.is_heldout(question)
    trained = [line for line in lines_of(tmp_path / "whole" / "metrics.jsonl") if line["kind"] == "train"]
    assert all(line["mismatch"] < 1e-5 and line["gradient_norm"] > 0 for line in trained)


@pytest.mark.slow
def test_answers_are_learned_as_conversations_are(single_device, tmp_path):
    pytest.importorskip("reasoning_gym", reason=REASON)
    changes = {"train__objective": "language_modeling", "data__source": "reasoning_gym", "train__steps": "3"}
    train.train(small("basic_arithmetic", **changes), tmp_path / "run")
    losses = [line["loss"] for line in lines_of(tmp_path / "run" / "metrics.jsonl") if line["kind"] == "train"]
    assert len(losses) == 3 and losses[2] < losses[0]


@pytest.mark.parametrize("changes, said", [
    ({"data__path": None}, r"data\.source=reasoning_gym_rollouts needs data\.path \(a generator of reasoning-gym"),
    ({"train__objective": "language_modeling"}, r"data\.source=reasoning_gym_rollouts needs train\.objective=grpo"),
    ({"data__source": "reasoning_gym"}, r"needs data\.source=countdown_rollouts, reasoning_gym_rollouts or chat, not"),
])  # fmt: skip
def test_keys_that_cannot_work_are_refused(changes, said):
    with pytest.raises(ConfigError, match=said):
        small("leg_counting", **changes)


def test_a_missing_package_is_said_in_a_line(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match="needs the package reasoning-gym: run `make setup EXTRAS=reasoning`"):
        questions.Generator("leg_counting")
