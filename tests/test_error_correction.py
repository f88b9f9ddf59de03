# SPDX-License-Identifier: Apache-2.0
"""A run trains the module on a frozen base, resumes bit for bit, and its drafts are revised where that is asked for."""

import shutil

import jax
import numpy as np
import pytest

import train
from checkpointing.checkpoints import Checkpoints
from checkpointing.source_run import SourceRun
from configs.errors import ConfigError
from settings import loading, validation
from tests.support import on_one_device, write_sums
from trained_run import TrainedRun, open_run

SMALL = {
    "model.dtype": "float32", "model.num_layers": "1", "model.embed_dim": "32", "model.num_heads": "2",
    "model.num_kv_heads": "2", "model.mlp_dim": "48", "model.vocab_size": "300", "model.max_length": "64",
    "train.sequence_length": "32", "train.global_batch": "8", "train.steps": "4", "train.save_every": "2",
    "train.log_every": "1", "train.eval_every": "0", "evaluation.batches": "1", "evaluation.sample_tokens": "0",
    "data.tokenizer": "byte", "data.holdout_fraction": "0.3", "logging.tensorboard": "false", "logging.report": "false",
}  # fmt: skip
OF_MODULE = {"error_correction.num_layers": "1", "error_correction.threshold": "0.001"}


def small(recipe: str, texts, **changes):
    typed = SMALL | {"data.path": f"{texts}/*.txt"} | {key.replace("__", "."): value for key, value in changes.items()}
    loaded = loading.load(f"configs/{recipe}.py", "", typed)
    loaded.config.mesh.fsdp = 1
    validation.validate(loaded.config, 1, loaded)
    return loaded.config


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder with a base, the whole run of a module, and one that resumed after its second step."""
    folder = tmp_path_factory.mktemp("runs")
    write_sums(folder / "texts", 12)
    changes = {key.replace(".", "__"): value for key, value in OF_MODULE.items()}
    config = small("error_correction", folder / "texts", **changes, train__init_from=str(folder / "base"))
    with on_one_device():
        train.train(small("tiny", folder / "texts"), folder / "base")
        whole = train.train(config.copy_and_resolve_references(), folder / "whole")
        shutil.copytree(folder / "whole", folder / "resumed")
        shutil.rmtree(folder / "resumed" / "checkpoints" / "4")
        resumed = train.train(config, folder / "resumed")
    assert resumed.step == 4 and (resumed.metrics, resumed.evaluations) == (whole.metrics, whole.evaluations)
    return folder, whole


@pytest.mark.slow
def test_metrics_have_restored_damaged_and_calibration(runs):
    _, whole = runs
    figures = whole.evaluations["eval"]
    assert {"loss", "detection", "correction", "restored", "damaged", "calibration_error"} <= set(figures), figures
    assert 0 <= figures["calibration_error"] <= 1 and not [name for name in figures if "bin" in name]


@pytest.mark.slow
def test_a_checkpoint_has_the_module_alone_and_reads_as_the_base_with_it(runs):
    folder, _ = runs
    with Checkpoints(folder / "whole") as checkpoints:
        names = {name for name in checkpoints.store.arrays(4) if name.startswith("params.")}
    assert names and all(name.startswith("params.corrector.") for name in names)
    base, corrected = open_run(folder / "base"), open_run(folder / "whole")
    assert isinstance(corrected, TrainedRun) and set(corrected.params) == {*base.params, "corrector"}
    tokens = np.arange(12).reshape(2, 6)
    np.testing.assert_array_equal(base.logits(tokens), corrected.logits(tokens))  # the base is not touched
    again = SourceRun("train.init_from", str(folder / "whole")).restore(base.run.abstract_params)
    jax.tree.map(np.testing.assert_array_equal, again, base.params)  # and is what another run begins with


@pytest.mark.slow
def test_drafts_are_revised_where_that_is_asked_for(runs):
    folder, _ = runs
    base, corrected = open_run(folder / "base"), open_run(folder / "whole")
    how = dict(max_tokens=24, temperature=1.0, seed=3)
    [draft], [revised] = base.generate(["3 is"], **how), corrected.generate(["3 is"], **how)
    assert revised != draft
    with pytest.raises(ConfigError, match="streamed cannot be revised"):
        list(corrected.stream("3 is", **how))
    with corrected.config.unlocked():
        corrected.run.config.error_correction.use_error_correction = False
    assert corrected.generate(["3 is"], **how) == [draft]
    assert "".join(corrected.stream("3 is", **how)) in draft


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (dict(train__init_from=""), "needs train.init_from, the folder of the run"),
        (dict(error_correction__joint_weight="0.4"), "trains the model from random weights; empty train.init_from"),
        (dict(error_correction__num_layers="5"), "error_correction.num_layers"),
        (dict(train__objective="language_modeling"), "use_error_correction=True needs train.objective"),
        (dict(error_correction__rate="0.01"), "replaces no token of train.sequence_length=32"),
    ],
)
def test_what_does_not_go_together_is_one_line(changes, line):
    with pytest.raises(ConfigError, match=line):
        small("error_correction", "texts", **changes)
