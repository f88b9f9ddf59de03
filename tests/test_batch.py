# SPDX-License-Identifier: Apache-2.0
"""A batch that grows while it trains: the examples in order, each size compiled once, a resume within it exact."""

import types

import numpy as np
import pytest

import assembly
import job
import train
from configs.validation import validate
from input_pipeline import batches as pipeline
from input_pipeline import ledger
from tests.support import write_sums
from tests.test_train import in_process, lines_of

SIZES = {step: 8 if step <= 3 else 16 if step <= 6 else 32 for step in range(1, 10)}
EXAMPLES = 3 * (8 + 16 + 32)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_sums(folder / "texts", 20)
    return folder


def ramped(texts, **changes):
    config = in_process(
        train__steps=9, train__global_batch=32, train__eval_every=0, batch__ramp="steps", batch__first=8,
        batch__increase_step=3, batch__increase_factor=2.0, batch__learning_rate="sqrt", evaluation__sample_tokens=0,
        data__path=f"{texts}/texts/*.txt", data__cache_dir=str(texts / "cache"),
    )  # fmt: skip
    for key, value in changes.items():
        section, name = key.split("__")
        config[section][name] = value
    config.mesh.fsdp = 8 // config.mesh.data
    validate(config, 8)
    return config


@pytest.fixture(scope="module")
def whole(texts) -> types.SimpleNamespace:
    """A ramp that was not stopped: its folder, the sizes that were compiled, and the tokens that steps were given."""
    found = types.SimpleNamespace(workdir=texts / "whole", compiled=[], fed=[])
    compile_step, take_step = assembly.Run.compile, job.Programs.__call__

    def counted(run):
        found.compiled.append(run.config.train.global_batch)
        return compile_step(run)

    def recorded(programs, state, batch):
        found.fed.append(np.asarray(batch["tokens"]))
        return take_step(programs, state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly.Run, "compile", counted)
        patch.setattr(job.Programs, "__call__", recorded)
        train.train(ramped(texts), found.workdir)
    return found


def test_a_batch_grows_and_each_size_is_compiled_once(whole):
    assert whole.compiled == [8, 16, 32]
    lines = lines_of(whole.workdir, "train")
    assert {step: line["global_batch"] for step, line in lines.items()} == SIZES
    rates = [lines[step]["learning_rate"] / (0.003 * (step - 1) / 20) for step in range(2, 10)]
    np.testing.assert_allclose(rates, [np.sqrt(SIZES[step] / 32) for step in range(2, 10)], rtol=1e-6)


def test_a_growing_batch_takes_the_examples_in_the_order_of_any_other(whole, texts):
    config = ramped(texts)
    corpus = train.prepare_corpus(config, vocab_size_typed=True)
    (batch,) = pipeline.training_batches(
        corpus.train, seed=config.train.seed, sequence_length=32, global_batch=EXAMPLES, rows=np.arange(EXAMPLES),
        first_example=0, num_steps=1,
    )  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(whole.fed), batch["tokens"])
    sections = {step: ledger.section_of(whole.workdir, step, 9) for step in SIZES}
    taken = np.concatenate([ledger.taken(section, step) for step, section in sections.items()])
    np.testing.assert_array_equal(taken, np.arange(EXAMPLES))


def test_a_ramp_that_is_stopped_goes_on_bit_for_bit(whole, texts, tmp_path, monkeypatch):
    """Where a size ends, and then within the next."""
    stops = iter([False, False, True, False, True])
    with monkeypatch.context() as patch:
        patch.setattr("training.interruption.Interruption.agreed", lambda _: next(stops))
        for step in (3, 5):
            with pytest.raises(train.Interrupted, match=f"saved at step {step}"):
                train.train(ramped(texts), tmp_path)
    train.train(ramped(texts), tmp_path)
    expected, stopped = (lines_of(workdir, "train") for workdir in (whole.workdir, tmp_path))
    for key in ("loss", "gradient_norm", "learning_rate", "global_batch", "total_tokens"):
        assert [line[key] for line in stopped.values()] == [line[key] for line in expected.values()], key


def test_a_batch_follows_the_noise_scale_up_to_the_whole(texts, tmp_path, monkeypatch):
    """It grows where the noise scale is not below its next size."""
    scales = iter([31.0, 32.0])
    monkeypatch.setattr(job, "noise_scale", types.SimpleNamespace(of=lambda noise: next(scales)))
    keys = dict(batch__first=16, batch__increase_step=2, mesh__data=2, train__steps=6)
    train.train(ramped(texts, batch__ramp="noise_scale", **keys), tmp_path)
    lines = lines_of(tmp_path, "train")
    assert [lines[step]["global_batch"] for step in range(1, 7)] == [16] * 4 + [32] * 2
    assert all(0 <= line["noise_scale"] <= 1e9 for line in lines.values())


def test_examples_taken_before_a_step_are_counted_over_sizes():
    """As a run that goes back leaves them out: steps 1 to 3 had 8 each, 4 to 6 16, and then 32."""
    run = types.SimpleNamespace(stages=[job.Stage(0, 0, 8), job.Stage(3, 24, 16), job.Stage(6, 72, 32)])
    assert [job.Job.taken_before(run, step) for step in (1, 3, 4, 6, 7, 9)] == [0, 16, 24, 56, 72, 136]
    resumed = types.SimpleNamespace(stages=[job.Stage(5, 56, 16)])
    assert [job.Job.taken_before(resumed, step) for step in (4, 6, 7)] == [
        56,
        56,
        72,
    ]  # before it, nothing to leave out
