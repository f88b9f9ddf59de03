# SPDX-License-Identifier: Apache-2.0
"""A batch that grows and a mesh that changes while it trains: the examples in order, each program compiled once, the
losses of a run that stays on its mesh, a resume within exact."""

import json
import shutil
import types

import jax
import numpy as np
import pytest

import train
from configs.base import MESH_AXES
from core import assembly, job
from core.between_steps import stages
from input_pipeline import batches as pipeline
from input_pipeline import ledger
from settings.validation import validate
from tests.support import write_sums
from tests.test_train import in_process, lines_of, own_batches

SIZES = {step: 8 if step <= 3 else 16 if step <= 6 else 32 for step in range(1, 8)}
EXAMPLES = 3 * (8 + 16) + 32
CHANGES = "4: fsdp=2,context=2,model=2; 6: data=8"  # the second as the batch grows
FIRST, SECOND, THIRD = (1, 1, 1, 8, 1, 1), (1, 1, 2, 2, 1, 2), (1, 8, 1, 1, 1, 1)  # of MESH_AXES
EXACT = 1e-5  # float32 sums in another order differ by some 1e-7 a step
KEYS = ("loss", "gradient_norm", "learning_rate", "global_batch", "total_tokens")


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_sums(folder / "texts", 20)
    return folder


def ramped(texts, **changes):
    usual = dict(
        train__steps=7, train__global_batch=32, train__eval_every=0, train__save_every=5, batch__ramp="steps",
        batch__first=8, batch__increase_step=3, batch__increase_factor=2.0, batch__learning_rate="sqrt",
        evaluation__sample_tokens=0, model__dtype="float32", optimizer__name="sgd", optimizer__clip_norm=0.0,
        optimizer__ema_decay=0.9, data__path=f"{texts}/texts/*.txt", data__cache_dir=str(texts / "cache"),
    )  # fmt: skip
    config = in_process(**usual | changes)
    config.mesh.update(fsdp=1, context=8)
    validate(config, 8)
    return config


@pytest.fixture(scope="module")
def whole(texts) -> types.SimpleNamespace:
    """A ramp that was not stopped."""
    return watched(ramped(texts, train__save_every=3, checkpoint__keep=3), texts / "whole")


@pytest.fixture(scope="module")
def moved(texts) -> types.SimpleNamespace:
    """The same on three meshes."""
    return watched(ramped(texts, layout__changes=CHANGES), texts / "moved")


def sizes(mesh) -> tuple[int, ...]:
    return tuple(mesh.shape[axis] for axis in MESH_AXES)


def watched(config, workdir) -> types.SimpleNamespace:
    """Train; return the folder, what was compiled, the tokens that steps were given, and the meshes that all was on."""
    found = types.SimpleNamespace(workdir=workdir, compiled=[], fed=[], meshes=[])
    compile_step, take_step = assembly.Run.compile, job.CompiledSteps.__call__

    def counted(run):
        found.compiled.append((run.config.train.global_batch, sizes(run.mesh)))
        return compile_step(run)

    def recorded(programs, state, batch):
        found.fed.append(np.asarray(batch["tokens"]))
        found.meshes.append({sizes(leaf.sharding.mesh) for leaf in jax.tree.leaves((state, batch))})
        return take_step(programs, state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly.Run, "compile", counted)
        patch.setattr(job.CompiledSteps, "__call__", recorded)
        train.train(config, workdir)
    return found


def assert_goes_on(expected, step: int, config, workdir) -> None:
    """Assert that a copy of a run that knows nothing later than a checkpoint makes the steps after it again."""
    shutil.copytree(expected, workdir, ignore=shutil.ignore_patterns("metrics.jsonl", "checkpoints"))
    shutil.copytree(expected / "checkpoints" / str(step), workdir / "checkpoints" / str(step))
    train.train(config, workdir)
    found, wanted = (lines_of(folder, "train") for folder in (workdir, expected))
    assert sorted(found) == list(range(step + 1, 8))
    for key in KEYS:
        assert {n: line[key] for n, line in found.items()} == {n: wanted[n][key] for n in found}, key


def test_a_batch_grows_and_each_size_is_compiled_once(whole):
    assert whole.compiled == [(8, FIRST), (16, FIRST), (32, FIRST)]
    lines = lines_of(whole.workdir, "train")
    assert {step: line["global_batch"] for step, line in lines.items()} == SIZES
    rates = [lines[step]["learning_rate"] / (0.003 * (step - 1) / 20) for step in range(2, 8)]
    np.testing.assert_allclose(rates, [np.sqrt(SIZES[step] / 32) for step in range(2, 8)], rtol=1e-6)


def test_a_growing_batch_takes_the_examples_in_the_order_of_any_other(whole, texts):
    config = ramped(texts)
    corpus = train.prepare_corpus(config, vocab_size_typed=True)
    (batch,) = pipeline.training_batches(
        corpus.train, seed=config.train.seed, sequence_length=32, global_batch=EXAMPLES, rows=np.arange(EXAMPLES),
        first_example=0, num_steps=1,
    )  # fmt: skip
    np.testing.assert_array_equal(np.concatenate(whole.fed), batch["tokens"])
    sections = {step: ledger.section_of(whole.workdir, step, 7) for step in SIZES}
    taken = np.concatenate([ledger.taken(section, step) for step, section in sections.items()])
    np.testing.assert_array_equal(taken, np.arange(EXAMPLES))


def test_a_ramp_that_is_stopped_goes_on_bit_for_bit(whole, texts, tmp_path):
    """Where a size ends; within one, see below."""
    assert_goes_on(whole.workdir, 3, ramped(texts), tmp_path / "stopped")


def test_a_ramp_that_ended_where_a_size_does_goes_on_with_the_next(texts, tmp_path):
    """As one of as many steps from the start; the decision of the last step is stored with it."""
    for steps in (3, 4):
        train.train(ramped(texts, train__steps=steps), tmp_path)
    assert {step: line["global_batch"] for step, line in lines_of(tmp_path, "train").items()} == {
        step: SIZES[step] for step in range(1, 5)
    }


def test_a_mesh_that_changes_has_the_losses_of_one_that_stays(whole, moved):
    """And gives the average of the parameters that is evaluated in the end."""
    for kind, keys, steps in (("train", KEYS, SIZES), ("eval", ("eval_loss",), [7])):
        stayed, changed = (lines_of(run.workdir, kind) for run in (whole, moved))
        for key in keys:
            values = ([lines[step][key] for step in steps] for lines in (changed, stayed))
            np.testing.assert_allclose(*values, rtol=EXACT, err_msg=key)
    np.testing.assert_array_equal(np.concatenate(moved.fed), np.concatenate(whole.fed))


def test_each_step_is_made_on_its_mesh_by_a_program_compiled_once(moved):
    assert moved.compiled == [(8, FIRST), (16, FIRST), (16, SECOND), (32, THIRD)]
    assert moved.meshes == [{FIRST}] * 4 + [{SECOND}] * 2 + [{THIRD}]


def test_what_was_moved_is_told(moved):
    lines = [json.loads(line) for line in (moved.workdir / "metrics.jsonl").read_text().splitlines()]
    told = [line for line in lines if line.get("event") == "mesh"]
    assert [(line["step"], line["mesh"]) for line in told] == [(4, "fsdp=2 * context=2 * model=2"), (6, "data=8")]
    assert all(line["bytes_to_all"] >= line["bytes_to_a_device"] > 0 for line in told)


@pytest.mark.slow
def test_a_run_that_is_stopped_on_its_second_mesh_goes_on_bit_for_bit(moved, texts, tmp_path):
    assert_goes_on(moved.workdir, 5, ramped(texts, layout__changes=CHANGES), tmp_path / "stopped")


@pytest.mark.parametrize("noisy, sizes", [(True, [4, 8, 8]), (False, [4, 4, 4])])
def test_a_batch_follows_the_noise_scale_up_to_the_whole(noisy, sizes, texts, tmp_path):
    """It grows where the rows disagree and the noise scale is not below its next size; with equal rows it does not."""
    keys = dict(batch__first=4, batch__increase_step=1, train__steps=3, train__global_batch=8, optimizer__ema_decay=0.0)
    config = ramped(texts, batch__ramp="noise_scale", train__gradient_accumulation=4, **keys)
    whole, rng = next(own_batches(config, 1)), np.random.default_rng(0)
    shape = whole["targets"].shape if noisy else (1, *whole["targets"].shape[1:])
    drawn = rng.integers(0, config.model.vocab_size, shape).astype(
        np.int32
    )  # of the whole vocabulary: nothing to learn
    whole |= {
        "tokens": np.tile(whole["tokens"][:1], (32, 1)),
        "targets": np.broadcast_to(drawn, whole["targets"].shape),
    }
    batches = ({name: array[:rows] for name, array in whole.items()} for rows in sizes)
    train.train(config, tmp_path, batches)
    lines = lines_of(tmp_path, "train")
    assert [lines[step]["global_batch"] for step in (1, 2, 3)] == sizes
    assert lines[1]["noise_scale"] >= 8 if noisy else all(line["noise_scale"] < 1 for line in lines.values())


def test_examples_taken_before_a_step_are_counted_over_sizes():
    """As a run that goes back leaves them out: steps 1 to 3 had 8 each, 4 to 6 16, and then 32."""
    run = types.SimpleNamespace(begun=[stages.Stage(0, 0, 8), stages.Stage(3, 24, 16), stages.Stage(6, 72, 32)])
    assert [job.Job.examples_before(run, step) for step in (1, 3, 4, 6, 7, 9)] == [0, 16, 24, 56, 72, 136]
    resumed = types.SimpleNamespace(begun=[stages.Stage(5, 56, 16)])
    assert [job.Job.examples_before(resumed, step) for step in (4, 6, 7)] == [
        56,
        56,
        72,
    ]  # before it, nothing to leave out
