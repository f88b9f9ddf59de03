# SPDX-License-Identifier: Apache-2.0
"""A run on tasks that follow each other: which task a step trains on, and what is measured on each."""

import json
import shutil

import pytest

import train
from settings import loading, validation

SMALL = {
    "model.num_layers": "1", "model.embed_dim": "32", "model.num_heads": "2", "model.num_kv_heads": "2",
    "model.mlp_dim": "48", "model.vocab_size": "300", "model.max_length": "32", "train.sequence_length": "32",
    "train.global_batch": "8", "train.steps": "40", "train.save_every": "20", "train.eval_every": "20",
    "train.log_every": "1", "optimizer.warmup_steps": "1", "optimizer.learning_rate": "0.01",
    "evaluation.batches": "1", "evaluation.sample_tokens": "0", "data.tokenizer": "byte",
    "data.holdout_fraction": "0.2", "logging.tensorboard": "false", "logging.report": "false",
}  # fmt: skip


def trained(folder, texts):
    """Train 20 steps on the digits and 20 on the letters, and return (Result, lines of metrics.jsonl)."""
    stream = f"{texts}/digits/*.txt:160,{texts}/letters/*.txt:160"
    loaded = loading.load("configs/tiny.py", "", SMALL | {"data.stream": stream})
    validation.validate(loaded.config, 1, loaded)
    result = train.train(loaded.config, folder)
    return result, [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_tasks_follow_each_other_each_is_evaluated_and_a_resume_is_exact(tmp_path, single_device):
    for task, characters in {"digits": "0123456789", "letters": "abcdefghij"}.items():
        (tmp_path / task).mkdir()
        for number in range(20):
            text = " ".join(characters[(number + place) % 10] * 3 for place in range(60))
            (tmp_path / task / f"{number}.txt").write_text(text)
    whole, lines = trained(tmp_path / "whole", tmp_path)
    found = {line["step"]: line for line in lines if line["kind"] == "stream"}
    losses = {
        task: [
            next(found[step][key] for key in found[step] if task in key and key.endswith("/loss")) for step in (20, 40)
        ]
        for task in ("digits", "letters")
    }
    assert losses["digits"][0] < losses["letters"][0], "the first steps saw digits"
    assert losses["letters"][1] < losses["letters"][0] - 1, "the last saw letters"
    assert losses["digits"][1] > losses["digits"][0], "and the digits were forgotten"

    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "40")
    resumed, lines = trained(tmp_path / "resumed", tmp_path)
    assert resumed.step == 40 and resumed.metrics["loss"] == whole.metrics["loss"]
    again = [line for line in lines if line["kind"] == "stream"]
    assert [line["step"] for line in again] == [20, 40, 40], "step 40 was evaluated again"
    assert all(again[2][key] == found[40][key] for key in found[40] if "/" in key)
