# SPDX-License-Identifier: Apache-2.0
"""From a base model to a chat model to a preferred one: each run begins with the last, on any mesh alike."""

import json
import math
import shutil
import types

import jax
import numpy as np
import pytest

import train
from checkpointing import frozen_models, source_run
from checkpointing.checkpoints import CheckpointError
from configs import base
from configs.errors import ConfigError
from core import assembly
from core.evaluators import evaluate_newest
from objectives.objective import FrozenModel
from parallelism.mesh import mesh_context
from settings import stored_config
from settings.validation import validate
from tests.input_pipeline.chat.conftest import write_lines
from tests.one_step import LENGTH, VOCAB, placed, small_config
from tests.support import assert_close, on_one_device, packed_batch, random_weights
from tests.test_train import in_process, lines_of


def preferred(folder, **mesh):
    """A configuration whose reference has left nothing but its shapes, which are the run's own."""
    config = small_config(**mesh)
    config.train.update(objective="dpo", init_from=str(folder), z_loss=0.0)
    config.data.source = "preferences"
    config.optimizer.update(name="sgd", clip_norm=0.0)  # the simplest one
    validate(config, math.prod(config.mesh.values()))
    return config


def pairs() -> dict:
    """Return pairs of many lengths; some tokens do not count, and in one row no token of an answer does."""
    rng = np.random.default_rng(0)
    batch = packed_batch([[int(n) for n in rng.integers(3, 12, 2)] for _ in range(16)], LENGTH, VOCAB)
    first = np.where(np.arange(16)[:, None] == 5, 12, 2)
    return batch | {"targets": np.where(batch["positions"] >= first, batch["targets"], -1)}


def gradients_and_scalars(config, seed: int = 1):
    """Return what a step computes; `seed` is of the reference's weights, and 0 of the model's own."""
    run = assembly.assemble(config, devices=jax.devices()[: math.prod(config.mesh.values())])
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), run.abstract_state)
    state = state.__class__(**(vars(state) | {"params": random_weights(state.params)}))
    frozen = {role: random_weights(params, seed=seed) for role, params in run.abstract_frozen.items()}
    with mesh_context(run.mesh):
        batch, frozen = placed(pairs(), run.abstract_batch), placed(frozen, run.abstract_frozen)
        state = placed(state, run.abstract_state)
        _, scalars, gradients = run.train_step_with_grads(state, batch, frozen)
    return jax.device_get((gradients, scalars))


@pytest.fixture(scope="module")
def of_one_device(tmp_path_factory):
    return gradients_and_scalars(preferred(tmp_path_factory.mktemp("reference")))


@pytest.mark.slow
def test_microbatches_on_a_mesh_have_the_gradients_of_the_whole_batch(tmp_path, of_one_device):
    """Though an answer's tokens lie on several devices, and its loss is not a sum over them."""
    config = preferred(tmp_path, fsdp=2, model=2)
    config.train.gradient_accumulation = 2
    gradients, scalars = gradients_and_scalars(config)
    assert_close((gradients, scalars), of_one_device)
    assert scalars["tokens"] == ((pairs()["targets"] >= 0) & (pairs()["segments"] > 0)).sum()


def test_adapters_begin_as_their_reference(tmp_path):
    """The weights to which they are added are the reference, and at first they add nothing."""
    config = preferred(tmp_path)
    config.lora.rank = 2
    validate(config, 1)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    base = random_weights(run.abstract_frozen["base"])
    with mesh_context(run.mesh):
        weights = placed({"base": base, "reference": base}, run.abstract_frozen)
        _, scalars, gradients = run.train_step_with_grads(run.init(), placed(pairs(), run.abstract_batch), weights)
    assert abs(scalars["loss"] - math.log(2)) < 1e-6 and scalars["accuracy"] == 0.5
    assert any(np.any(gradient) for gradient in jax.tree.leaves(jax.device_get(gradients)))


def talks(number: int) -> dict:
    """Questions that have two answers, as often the one as the other."""
    answer = ("yes", "no")[number // 2 % 2]
    turns = (("user", f"{number % 40}?"), ("assistant", f"{answer} {number % 7}"))
    return {"messages": [{"role": role, "content": content} for role, content in turns]}


def politeness(number: int) -> dict:
    answers = {"chosen": "yes", "rejected": "no"}
    return {"prompt": [{"role": "user", "content": f"{number}?"}]} | {
        side: [{"role": "assistant", "content": f"{word} {number % 7}"}] for side, word in answers.items()
    }


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("files")
    write_lines(folder / "talks.jsonl", map(talks, range(160)))
    write_lines(folder / "pairs.jsonl", map(politeness, range(160)))
    return folder


def on(files, name: str, **changes):
    """A run on one of the files, of bytes."""
    usual = dict(
        data__tokenizer="byte", data__cache_dir=str(files / "cache"), data__path=str(files / f"{name}.jsonl"),
        data__holdout_fraction=0.2, model__vocab_size=256, train__sequence_length=64, model__max_length=64,
        train__save_every=0, train__eval_every=0, evaluation__sample_tokens=0, train__log_every=1,
    )  # fmt: skip
    config = in_process(**usual | changes)
    config.mesh.update(fsdp=1, context=len(jax.devices()))
    validate(config, len(jax.devices()))
    return config


@pytest.fixture(scope="module")
def tuned(files):
    """A run fine-tuned on conversations, on one device."""
    with on_one_device():
        train.train(on(files, "talks", data__source="chat", train__steps=12), files / "tuned")
    return files / "tuned"


def preferring(files, tuned, **changes):
    keys = dict(train__objective="dpo", train__init_from=str(tuned), data__source="preferences", train__steps=12)
    return on(files, "pairs", **keys | {"optimizer__learning_rate": 3e-3} | changes)


def test_an_evaluation_on_pairs_compares_with_the_base_that_the_adapters_began_from(monkeypatch):
    """Also if the base has trained on since, and has a newer checkpoint."""
    monkeypatch.setattr(source_run.SourceRun, "checkpoint_ref", lambda source, known=None: known or {"step": 120})
    config = base.get_config()
    config.train.init_from = "runs/chat"
    objective = types.SimpleNamespace(frozen_models=lambda: (FrozenModel("reference", "train.init_from"),))
    run = types.SimpleNamespace(config=config, objective=objective, abstract_frozen={"reference": {}})
    began = {"folder": "runs/chat", "step": 60, "digest": "d"}
    assert frozen_models.references(run, {"frozen": {"base": began}}) == {"reference": began}
    assert frozen_models.references(run, {}) == {"reference": {"step": 120}}


@pytest.mark.slow
def test_adapters_and_their_reference_share_the_weights(files, tuned):
    config = preferring(files, tuned, lora__rank=2)
    run = assembly.assemble(config)
    found = frozen_models.weights(run, frozen_models.references(run, None))
    shared = zip(jax.tree.leaves(found["base"]), jax.tree.leaves(found["reference"]), strict=True)
    assert all(one is other for one, other in shared)


@pytest.mark.slow
def test_a_chat_model_comes_to_prefer_what_was_chosen_of_questions_that_it_was_not_asked(files, tuned, capsys):
    """It begins as its own reference, so at log 2 and undecided; evaluated later it is held against the same."""
    learned = lines_of(tuned, "train")
    assert learned[12]["loss"] < learned[1]["loss"]
    assert learned[1]["tokens"] < 0.5 * learned[1]["global_batch"] * 64  # of questions nothing is learned
    workdir = files / "preferring"
    train.train(preferring(files, tuned), workdir)
    trained, (evaluated,) = lines_of(workdir, "train"), lines_of(workdir, "eval").values()
    assert abs(trained[1]["loss"] - math.log(2)) < 1e-5 and trained[1]["accuracy"] == 0.5
    assert evaluated["eval_accuracy"] > 0.9 and evaluated["eval_loss"] < 0.6
    assert f"accuracy {evaluated['eval_accuracy']:.2%}" in (workdir / "summary.txt").read_text()
    capsys.readouterr()
    config = preferring(files, tuned)
    evaluate_newest(config, workdir, workdir, train.prepare_corpus(config, True))
    assert f"held-out loss: {evaluated['eval_loss']:.4f} a pair" in capsys.readouterr().out
    record = json.loads((workdir / "checkpoints" / "12" / "record.json").read_text())
    assert record["frozen"]["reference"]["folder"] == str(tuned) and record["frozen"]["reference"]["step"] == 12
    run = assembly.assemble(config)
    assert frozen_models.references(run, record) == record["frozen"]  # where it goes on
    shutil.copytree(tuned, files / "moved")
    train.train(preferring(files, files / "moved", train__steps=13), workdir)  # the weights are the same
    record = json.loads((workdir / "checkpoints" / "13" / "record.json").read_text())
    assert record["frozen"]["reference"]["folder"] == str(files / "moved")
    stored = stored_config.load_to_read(workdir, {}).config
    assert stored.train.objective == "language_modeling"  # to generate from it takes no reference
    with pytest.MonkeyPatch.context() as patch:  # as if the reference had been trained again, to the same step
        patch.setattr(source_run, "_digest", lambda checkpoints, step: "of other weights")
        with pytest.raises(CheckpointError, match="has other weights; restore the checkpoint that the run started"):
            evaluate_newest(config, workdir, workdir, train.prepare_corpus(config, True))
        kept = {name: (workdir / name).read_bytes() for name in ("config.json", "summary.txt")}
        with pytest.raises(CheckpointError, match="has other weights"):
            train.train(preferring(files, tuned, train__steps=14), workdir)
        assert {name: (workdir / name).read_bytes() for name in kept} == kept, "the same command continues"


def test_what_does_not_go_together_is_one_line(files, tuned):
    def refused(message, act):
        with pytest.raises(ConfigError, match=message) as error:
            act()
        assert "\n" not in str(error.value)

    refused("train.objective=dpo needs train.init_from", lambda: preferring(files, "", train__init_from=""))
    refused("dpo needs data.source=preferences, not chat", lambda: preferring(files, tuned, data__source="chat"))
    refused("needs train.z_loss=0.0, not 0.1", lambda: preferring(files, tuned, train__z_loss=0.1))
    refused("preference.beta=0.0 must be greater than 0", lambda: preferring(files, tuned, preference__beta=0.0))
    alone = on(files, "pairs", data__source="preferences")
    refused("use --config.train.objective=dpo", lambda: train.prepare_corpus(alone, True))
    refused("holds no run", lambda: train.train(preferring(files, files), files / "none"))
    assert json.loads((tuned / "config.json").read_text())["data.source"] == "chat"
