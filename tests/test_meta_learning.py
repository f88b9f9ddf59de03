# SPDX-License-Identifier: Apache-2.0
"""A run of meta-learning, by the loop that trains everything."""

import json
import shutil

import pytest

import train
from configs.errors import ConfigError
from core.start import prepare_corpus
from settings import loading, validation

SMALL = {
    "model.mlp_dim": "8", "train.steps": "6", "train.save_every": "3", "train.eval_every": "3", "train.log_every": "1",
    "train.global_batch": "4", "evaluation.batches": "2", "logging.tensorboard": "false", "meta.learn_rates": "true",
    "logging.report": "false",
}  # fmt: skip


def small(**changes):
    loaded = loading.load("configs/meta_sinusoid.py", "", SMALL | {k.replace("__", "."): v for k, v in changes.items()})
    validation.validate(loaded.config, 1, loaded)
    return loaded.config


@pytest.mark.slow
def test_a_run_on_tasks_reports_adaptation_and_resumes_exactly(tmp_path, single_device):
    whole = train.train(small(), tmp_path / "whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "6")
    resumed = train.train(small(), tmp_path / "resumed")
    assert resumed.step == 6 and resumed.metrics["loss"] == whole.metrics["loss"]
    assert resumed.evaluations == whole.evaluations
    lines = [json.loads(line) for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()]
    evaluated = [line for line in lines if line["kind"] == "eval"]
    assert [line["step"] for line in evaluated] == [3, 6]
    after = [line["eval_after_adaptation"] for line in evaluated]
    assert after == [line["eval_loss"] for line in evaluated]
    assert all(line["eval_before_adaptation"] > line["eval_after_adaptation"] for line in evaluated)
    assert "query loss" in (tmp_path / "whole" / "summary.txt").read_text()


def test_inputs_of_another_size_than_the_models_are_refused():
    with pytest.raises(ConfigError, match=r"model.input_dim=3 is not the 1 numbers .*; use --config.model.input_dim=1"):
        prepare_corpus(small(model__input_dim="3"), vocab_size_typed=False)
