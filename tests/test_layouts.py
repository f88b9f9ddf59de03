# SPDX-License-Identifier: Apache-2.0
"""A mesh that changes while it trains: losses as if it had not, each program compiled once, an exact resume."""

import json
import types

import jax
import numpy as np
import pytest

import assembly
import job
import train
from configs.base import MESH_AXES
from configs.validation import validate
from tests.support import write_sums
from tests.test_train import in_process, lines_of

CHANGES = "2: data=2,fsdp=2,model=2; 5: data=8"
FIRST, SECOND, THIRD = (1, 1, 8, 1, 1, 1), (1, 2, 2, 1, 1, 2), (1, 8, 1, 1, 1, 1)  # of MESH_AXES
EXACT = 1e-5  # float32 sums in another order differ by some 1e-7 a step
KEYS = ("loss", "gradient_norm", "learning_rate", "global_batch", "total_tokens")


def sizes(mesh) -> tuple[int, ...]:
    return tuple(mesh.shape[axis] for axis in MESH_AXES)


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    write_sums(folder / "texts", 20)
    return folder


def configuration(texts, **changes):
    """Eight steps whose batch grows from 16 to 32 sequences after the fourth, with an average of the parameters."""
    keys = dict(
        train__steps=8, train__global_batch=32, train__eval_every=5, train__save_every=5, model__dtype="float32",
        batch__ramp="steps", batch__first=16, batch__increase_step=4, batch__increase_factor=2.0,
        optimizer__ema_decay=0.9, evaluation__sample_tokens=0,
        data__path=f"{texts}/texts/*.txt", data__cache_dir=str(texts / "cache"),
    ) | changes  # fmt: skip
    config = in_process(**keys)
    validate(config, 8)
    return config


@pytest.fixture(scope="module")
def undisturbed(texts):
    train.train(configuration(texts), texts / "undisturbed")
    return texts / "undisturbed"


@pytest.fixture(scope="module")
def changed(texts) -> types.SimpleNamespace:
    """A run that changes its mesh twice, what was compiled for it, and before which step."""
    found = types.SimpleNamespace(workdir=texts / "changed", compiled=[], taken=[])
    compile_step, take_step = assembly.Run.compile, job.Programs.__call__

    def counted(run):
        found.compiled.append((run.config.train.global_batch, sizes(run.mesh)))
        return compile_step(run)

    def recorded(programs, state, batch):
        found.taken.append({sizes(leaf.sharding.mesh) for leaf in jax.tree.leaves((state, batch))})
        return take_step(programs, state, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assembly.Run, "compile", counted)
        patch.setattr(job.Programs, "__call__", recorded)
        train.train(configuration(texts, layout__changes=CHANGES), found.workdir)
    return found


def test_losses_are_those_of_a_run_that_stays_on_its_mesh(undisturbed, changed):
    stayed, moved = (lines_of(workdir, "train") for workdir in (undisturbed, changed.workdir))
    for key in KEYS:
        np.testing.assert_allclose(
            *([lines[step][key] for step in range(1, 9)] for lines in (moved, stayed)), rtol=EXACT
        )
    stayed, moved = (lines_of(workdir, "eval") for workdir in (undisturbed, changed.workdir))
    assert stayed.keys() == moved.keys() == {5, 8}  # of the average, which has moved too
    np.testing.assert_allclose(
        *([lines[step]["eval_loss"] for step in (5, 8)] for lines in (moved, stayed)), rtol=EXACT
    )


def test_each_size_on_each_mesh_is_compiled_once_in_the_order_of_the_steps(changed):
    assert changed.compiled == [(16, FIRST), (16, SECOND), (32, SECOND), (32, THIRD)]


def test_state_and_batch_lie_on_the_mesh_of_each_step(changed):
    assert changed.taken == [{FIRST}] * 2 + [{SECOND}] * 3 + [{THIRD}] * 3


def test_what_was_moved_is_told(changed):
    events = [json.loads(line) for line in (changed.workdir / "metrics.jsonl").read_text().splitlines()]
    told = [event for event in events if event.get("event") == "mesh"]
    assert [(event["step"], event["mesh"]) for event in told] == [(2, "data=2 * fsdp=2 * model=2"), (5, "data=8")]
    assert all(event["bytes_to_all"] >= event["bytes_to_a_device"] > 0 for event in told)


def test_a_run_that_is_stopped_on_its_second_mesh_goes_on_bit_for_bit(changed, texts, tmp_path, monkeypatch):
    """After the step with which the batch grows, and before the next change."""
    config = configuration(texts, layout__changes=CHANGES)
    asked = iter([False, False, False, True])
    with monkeypatch.context() as patch:
        patch.setattr("training.interruption.Interruption.agreed", lambda _: next(asked))
        with pytest.raises(train.Interrupted, match="saved at step 4"):
            train.train(config, tmp_path)
    train.train(config, tmp_path)
    whole, stopped = (lines_of(workdir, "train") for workdir in (changed.workdir, tmp_path))
    for key in KEYS:
        assert [line[key] for line in stopped.values()] == [line[key] for line in whole.values()], key
