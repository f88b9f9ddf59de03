# SPDX-License-Identifier: Apache-2.0
"""A run begins with the weights of another: of what, once, and what does not go together."""

import json
import shutil

import jax
import numpy as np
import pytest

import assembly
import train
from configs import loading
from configs.base import ConfigError
from configs.validation import validate
from parallelism.mesh import mesh_context
from tests.support import write_sums
from tests.test_train import in_process, lines_of, own_batches
from training import initial
from training.checkpoints import CheckpointError, Checkpoints


def small(**changes):
    """On the eight devices, with an average of the parameters."""
    usual = dict(model__vocab_size=64, optimizer__ema_decay=0.5, train__steps=2, train__save_every=0)
    config = in_process(**usual | changes)
    config.mesh.update(data=2, fsdp=4)
    return config


def trained(config, workdir, steps: int = 2):
    """Train on batches of our own, which no tokenizer made."""
    config.train.steps = steps
    train.train(config, workdir, own_batches(config, steps))


def evaluated(config, workdir) -> dict:
    """Return the parameters of a run's newest checkpoint that are evaluated."""
    run = assembly.assemble(config)
    with Checkpoints(workdir) as checkpoints, mesh_context(run.mesh):
        return jax.device_get(checkpoints.restore_evaluated(checkpoints.newest(), run.abstract_state))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    trained(small(), folder)
    return folder


def test_a_run_begins_with_the_evaluated_parameters_of_another_and_goes_on_with_its_own(base, tmp_path):
    """Its optimizer is another one, its first step is step 1, and where it goes on the other may be gone."""
    source = tmp_path / "source"
    shutil.copytree(base, source)
    changes = dict(
        train__init_from=str(source), optimizer__name="lion", optimizer__ema_decay=0.0, optimizer__learning_rate=1e-12
    )
    config = small(**changes)
    validate(config, 8)
    trained(config, tmp_path / "mine")
    found, wanted = evaluated(config, tmp_path / "mine"), evaluated(small(), base)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-9), found, wanted)
    assert sorted(lines_of(tmp_path / "mine", "train")) == [1, 2]
    shutil.rmtree(source)
    trained(small(**changes), tmp_path / "mine", steps=3)
    assert sorted(lines_of(tmp_path / "mine", "train")) == [1, 2, 3]
    config.train.init_from = str(base)
    with pytest.raises(CheckpointError, match=r"train\.init_from .* changed; take another --workdir"):
        trained(config, tmp_path / "mine")


def test_a_folder_is_the_recipe_of_its_model(base):
    loaded = loading.load(str(base), "", {"train.steps": "7"})
    stored = loading.load_stored(base, {}).config
    assert loaded.config.model == stored.model and loaded.config.data.tokenizer == stored.data.tokenizer
    assert loaded.config.train.sequence_length == 32 and loaded.config.train.steps == 7
    assert loaded.config.train.global_batch == 32 and loaded.config.optimizer.ema_decay == 0  # as in configs/base.py
    assert loaded.origins["model.vocab_size"] == str(base / "config.json")


def test_what_does_not_go_together_is_one_line(base, tmp_path):
    def refused(message, act, kind=ConfigError):
        with pytest.raises(kind, match=message) as error:
            act()
        assert "\n" not in str(error.value)

    def of(source, **changes):
        return small(train__init_from=str(source), **changes)

    def begun(config):
        return lambda: trained(config, tmp_path / "mine")

    refused("holds no run .no config.json there.; name the folder of one", begun(of(tmp_path / "none")))
    wider = of(base, model__mlp_dim=64)
    refused(f"model.mlp_dim=64 differs from the 48 of train.init_from={base}; .* --config={base}", begun(wider))
    initial.check(of(base, model__head_dim=16, model__max_length=64, model__rope_theta=1e6), None)  # the same weights
    refused("is a recipe, without weights", begun(of("configs/tiny.py")))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_bytes((base / "config.json").read_bytes())
    refused("has no complete checkpoint", begun(of(tmp_path / "empty")), CheckpointError)
    write_sums(tmp_path / "texts", 20)
    text = dict(data__source="text", data__path=f"{tmp_path}/texts/*.txt", data__cache_dir=str(tmp_path / "cache"))
    stored = json.loads((base / "config.json").read_text()) | {"data.tokenizer": "sentencepiece"}
    (tmp_path / "empty" / "config.json").write_text(json.dumps(stored | {"model.vocab_size": 300}))
    (tmp_path / "empty" / "tokenizer.model").write_bytes(b"another")
    config = of(tmp_path / "empty", **text | {"model__vocab_size": 300})
    refused(
        "has another tokenizer than data.tokenizer=byte; use data.tokenizer=",
        lambda: train.train(config, tmp_path / "mine"),
    )
    config = of(base)
    config.model.name, config.train.objective = "trm", "recursive"
    refused("only a decoder_lm does", lambda: validate(config, 8))
