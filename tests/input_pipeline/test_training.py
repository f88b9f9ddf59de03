# SPDX-License-Identifier: Apache-2.0
"""What the training loop is fed: the weights of a mixture change on resume, and nothing comes twice or never."""

import shutil

import numpy as np
import pytest

import train
from checkpointing.checkpoints import CheckpointError, Checkpoints
from configs import base
from core import evaluators, job

SMALL = {
    "model.num_layers": 1, "model.embed_dim": 16, "model.num_heads": 1, "model.num_kv_heads": 1, "model.mlp_dim": 16,
    "model.vocab_size": 256, "model.max_length": 32, "train.sequence_length": 32, "train.global_batch": 8,
    "train.save_every": 0, "train.eval_every": 0, "evaluation.sample_tokens": 0, "mesh.fsdp": 1,
    "optimizer.name": "sgd", "optimizer.schedule": "constant",  # one program for runs of any length
    "logging.tensorboard": False, "logging.report": False, "data.tokenizer": "byte",
}  # fmt: skip


@pytest.fixture
def run(single_device, tmp_path, monkeypatch):
    """Train up to a step on part a and part b, and return the documents of each step that was made.

    A document with its end is a window long, and everything is trained on.
    """
    for part in "ab":
        (tmp_path / part).mkdir()
        for number in range(64):
            (tmp_path / part / f"{number}.txt").write_text(f"{part}{number:03d}" + "." * 27)
    (tmp_path / "validation.txt").write_text("validation\n" * 30)
    fed, placed = [], job.place

    def place(batches, sharding, rows):
        for batch in placed(batches, sharding, rows):
            fed.append([bytes(row).decode()[:4] for row in np.asarray(batch["targets"], np.uint8)])
            yield batch

    monkeypatch.setattr(job, "place", place)
    monkeypatch.setattr(evaluators, "evaluate_heldout", lambda *arguments: ({"loss": 1.0}, 1))

    def run(weight_a: str, weight_b: str, steps: int, **changes) -> list[list[str]]:
        fed.clear()
        config = base.get_config()
        mixture = f"{weight_a} {tmp_path / 'a'}; {weight_b} {tmp_path / 'b'}"
        data = {"data.mixture": mixture, "data.validation_path": str(tmp_path / "validation.txt")}
        data |= {"data.cache_dir": str(tmp_path / "cache"), "train.steps": steps}
        for key, value in (SMALL | data | {name.replace("__", "."): value for name, value in changes.items()}).items():
            section, name = key.split(".")
            config[section][name] = value
        train.train(config, tmp_path / "run")
        return [list(step) for step in fed]

    return run


def check_passes(documents: list[str]) -> None:
    """Assert that each pass over a part's 64 documents has each once, the last one as far as it goes."""
    passes = [documents[start : start + 64] for start in range(0, len(documents), 64)]
    assert all(len(set(one)) == len(one) for one in passes)


@pytest.mark.slow
def test_weights_change_on_resume_without_a_repeat_or_a_gap(run, tmp_path):
    steps = run("0.75", "0.25", 6)
    checkpoint = shutil.copytree(tmp_path / "run" / "checkpoints" / "6", tmp_path / "6")
    steps += run("0.25", "0.75", 18)
    assert len(steps) == 18
    kinds = np.array([[document[0] == "a" for document in step] for step in steps])
    assert kinds.sum(axis=1).tolist() == [6] * 6 + [2] * 12
    for part in "ab":
        documents = [document for step in steps for document in step if document[0] == part]
        check_passes(documents)
    assert len(documents) == 84 and len(set(documents)) == 64  # of b: a pass and part of the next

    with Checkpoints(tmp_path / "run") as checkpoints:
        record = checkpoints.record(18)
    assert record["mixture"] == [(0, ["3/4", "1/4"]), (48, ["1/4", "3/4"])]

    shutil.rmtree(tmp_path / "run" / "checkpoints" / "18")
    if not (tmp_path / "run" / "checkpoints" / "6").exists():
        shutil.copytree(checkpoint, tmp_path / "run" / "checkpoints" / "6")
    assert run("0.25", "0.75", 18) == steps[6:]  # taken up from the older checkpoint once more

    steps += run("1", "0", 20, data__readers=3, data__prefetch=1)
    assert {document[0] for step in steps[18:] for document in step} == {"a"}
    check_passes([document for step in steps for document in step if document[0] == "a"])


def test_other_parts_are_another_run(run, tmp_path):
    run("1", "1", 1)
    (tmp_path / "b" / "more.txt").write_text("more\n")
    (tmp_path / "other.txt").write_text("other\n" * 30)
    with pytest.raises(CheckpointError, match="with other documents"):
        run("1", "1", 2)
    with pytest.raises(CheckpointError, match=r"with data.validation_path=\S*, now \S+\. Use the same again, or"):
        run("1", "1", 2, data__validation_path=str(tmp_path / "other.txt"))
