# SPDX-License-Identifier: Apache-2.0
"""Tasks are scored while a run trains: into metrics.jsonl, at their steps and at the end, and can be interrupted."""

import json
import signal

import pytest

import train
from cluster.interruption import Interrupted
from configs import base
from configs.errors import ConfigError
from core import evaluators
from scoring import questions
from tests.support import write_sums
from tests.test_train import lines_of

SMALL = {
    "model.num_layers": 1, "model.embed_dim": 16, "model.num_heads": 1, "model.num_kv_heads": 1, "model.mlp_dim": 16,
    "model.vocab_size": 256, "model.max_length": 32, "train.sequence_length": 32, "train.global_batch": 8,
    "train.save_every": 0, "train.eval_every": 0, "evaluation.sample_tokens": 0, "mesh.fsdp": 1, "train.steps": 3,
    "optimizer.name": "sgd", "optimizer.schedule": "constant", "logging.tensorboard": False, "data.tokenizer": "byte",
    "logging.report": False,
    "evaluation.tasks_every": 2, "data.holdout_fraction": 0.3,
}  # fmt: skip
ITEMS = [{"question": "6 is 2 times", "choices": ["3", "9"], "answer": 0}, {"text": "12 is 3 times 4; " * 4}]


@pytest.fixture
def config(single_device, tmp_path):
    write_sums(tmp_path / "texts", 12)
    (tmp_path / "sums.jsonl").write_text("\n".join(map(json.dumps, ITEMS)))
    (tmp_path / "more.jsonl").write_text(json.dumps(ITEMS[1]))
    config = base.get_config()
    changes = {"data.path": f"{tmp_path}/texts/*.txt", "data.cache_dir": f"{tmp_path}/cache"}
    changes["evaluation.tasks"] = f"{tmp_path}/sums.jsonl, {tmp_path}/more.jsonl"
    for key, value in (SMALL | changes).items():
        section, name = key.split(".")
        config[section][name] = value
    return config


def test_tasks_are_scored_at_their_steps_and_at_the_end(config, tmp_path, capsys):
    result = train.train(config, tmp_path / "run")
    lines = lines_of(tmp_path / "run", "tasks")
    assert list(lines) == [2, 3]
    assert {"sums/acc", "sums/acc_norm", "sums/bits_per_byte", "more/bits_per_byte"} <= lines[3].keys()
    assert lines[3]["sums/bits_per_byte"] == lines[3]["more/bits_per_byte"] != lines[2]["more/bits_per_byte"]
    assert result.evaluations["tasks"]["sums/acc"] == lines[3]["sums/acc"]
    assert f"more/bits_per_byte: {lines[3]['more/bits_per_byte']:.4f}\n" in capsys.readouterr().out


def test_the_files_of_tasks_are_read_once(config, tmp_path, monkeypatch):
    read, calls = questions.read_files, []
    monkeypatch.setattr(questions, "read_files", lambda *given: calls.append(given) or read(*given))
    train.train(config, tmp_path / "run")
    assert len(calls) == 1


def test_a_stop_during_the_scoring_saves_the_step_and_the_resumed_run_scores_it(config, tmp_path, monkeypatch):
    """The stop arrives while the first batch of the tasks is computed, when the held-out loss is there already."""
    config.train.eval_every, evaluate = 2, evaluators.Tasks.evaluate

    def stopped(self, context):
        signal.raise_signal(signal.SIGTERM)
        return evaluate(self, context)

    with monkeypatch.context() as patch, pytest.raises(Interrupted, match=r"^saved at step 2;"):
        patch.setattr(evaluators.Tasks, "evaluate", stopped)
        train.train(config, tmp_path / "run")
    assert lines_of(tmp_path / "run", "tasks") == {}
    train.train(config, tmp_path / "run")
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert list(lines_of(tmp_path / "run", "tasks")) == [2, 3] and kinds.count("eval") == 2, "none is repeated"


def test_batches_of_the_caller_have_no_epochs(config, tmp_path):
    config.evaluation.tasks, config.train.epochs = "", 2.0
    with pytest.raises(ConfigError, match=r"train\.epochs=2\.0: batches of the caller have no epochs; set it to 0"):
        train.train(config, tmp_path / "run", iter(()))


def test_batches_of_the_caller_have_no_tokenizer_for_tasks(config, tmp_path):
    with pytest.raises(ConfigError, match="a run on batches of the caller has no tokenizer; leave it out"):
        train.train(config, tmp_path / "run", iter(()))
    assert not (tmp_path / "run").exists()
