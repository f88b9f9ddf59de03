# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: restored onto another mesh and another execution, newest kept, differences named."""

import dataclasses
import functools
import shutil
import time

import jax
import numpy as np
import pytest

from checkpointing import manifest
from checkpointing import workdir as workdirs
from checkpointing.bucket import path_of
from checkpointing.checkpoints import CheckpointError, Checkpoints
from checkpointing.retention import Retention
from configs import base
from configs.base import keys_of
from configs.key import RESUME
from core import assembly
from parallelism.mesh import mesh_context
from settings import stored_config
from settings.keys import flat
from tests.bucket_server import empty_bucket
from tests.one_step import initial_state

TWO = Retention(newest=2)


@functools.cache
def run_on(ema_decay=0.0, num_experts=0, **mesh):
    config = base.get_config()
    config.optimizer.ema_decay = ema_decay
    config.model.update(dict(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=32))
    config.model.num_experts = num_experts
    config.train.update(dict(global_batch=8, sequence_length=16))
    config.mesh.update(dict.fromkeys(config.mesh, 1) | mesh)
    return assembly.assemble(config)


RECORD = {"step": 3, "config": flat(base.get_config()), "corpus": "abc"}


def test_a_state_goes_from_one_mesh_to_another_unchanged(tmp_path):
    one, other = run_on(fsdp=8), run_on(data=2, fsdp=2, model=2)
    with Checkpoints(tmp_path, TWO) as checkpoints:
        with mesh_context(one.mesh):
            state = initial_state(one)
            checkpoints.save(3, state, RECORD)
            checkpoints.wait()
        with mesh_context(other.mesh):
            restored = checkpoints.restore(checkpoints.newest(), other.abstract_state)
            params = checkpoints.restore_eval_params(3, other.abstract_state.params)
    for wanted, got in ((state, restored), (state.params, params)):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), wanted, got)
    jax.tree.map(
        lambda leaf, spec: leaf.sharding == spec.sharding or pytest.fail(str(spec)), restored, other.abstract_state
    )


def test_where_an_average_is_kept_it_is_what_is_read_to_be_evaluated(tmp_path):
    run = run_on(ema_decay=0.9, fsdp=8)
    with mesh_context(run.mesh), Checkpoints(tmp_path, TWO) as checkpoints:
        state = initial_state(run)
        average = jax.tree.map(lambda weight: jax.device_put(np.asarray(weight) + 1, weight.sharding), state.params)
        checkpoints.save(3, dataclasses.replace(state, extra={"average": average}), RECORD)
        checkpoints.wait()
        restored = checkpoints.restore_eval_params(3, run.abstract_state.params)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), restored, average)


def test_the_bias_of_a_router_is_kept(tmp_path):
    run = run_on(fsdp=2, expert=4, num_experts=4)
    state = jax.tree.map(
        lambda leaf: jax.device_put(np.arange(leaf.size).reshape(leaf.shape).astype(leaf.dtype), leaf.sharding),
        run.abstract_state,
    )
    with mesh_context(run.mesh), Checkpoints(tmp_path, TWO) as checkpoints:
        checkpoints.save_and_wait(3, state, RECORD)
        restored = checkpoints.restore(3, run.abstract_state)
    bias = restored.params["stack"]["blocks"]["mlp"]["bias"]
    np.testing.assert_array_equal(bias, np.arange(4).reshape(1, 4))
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), state, restored)


def test_only_the_newest_are_kept_and_the_record_stands_beside(tmp_path):
    run = run_on(fsdp=8)
    with mesh_context(run.mesh), Checkpoints(tmp_path, TWO) as checkpoints:
        state = initial_state(run)
        for step in (1, 2, 3):
            checkpoints.save(step, state, RECORD | {"step": step})
            checkpoints.wait()
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
        record = checkpoints.record(3)
    assert record["step"] == 3 and record["config"]["train.seed"] == 0 and record["versions"].keys() >= {"jax", "flax"}


def test_a_reader_leaves_a_save_under_way_alone_and_a_writer_clears_what_a_killed_one_left(tmp_path):
    unfinished = tmp_path / "checkpoints" / "9.unfinished"
    run = run_on(fsdp=8)
    with mesh_context(run.mesh), Checkpoints(tmp_path, TWO) as checkpoints:
        checkpoints.save(3, initial_state(run), RECORD)
    unfinished.mkdir()
    (unfinished / "part").touch()
    with Checkpoints(tmp_path) as reader:
        assert reader.newest_or_error() == 3
    assert unfinished.is_dir()
    with Checkpoints(tmp_path, TWO):
        assert not unfinished.exists()


def test_a_folder_that_was_never_trained_in_stays_untouched_by_a_reader(tmp_path):
    with Checkpoints(tmp_path) as reader, pytest.raises(CheckpointError, match="has no complete checkpoint"):
        reader.newest_or_error()
    assert not (tmp_path / "checkpoints").exists()


def test_a_workdir_without_a_checkpoint_is_fresh_to_train_and_an_error_to_read(tmp_path):
    with Checkpoints(tmp_path, TWO) as checkpoints:
        assert workdirs.check_resumable(checkpoints, RECORD["config"], "abc", tmp_path) is None
        with pytest.raises(CheckpointError, match="has no complete checkpoint"):
            checkpoints.newest_or_error()


def test_what_is_saved_is_the_state_of_then_though_the_next_steps_take_its_memory(tmp_path):
    next_step = jax.jit(lambda weights: weights + 1, donate_argnums=0)
    weights = next_step(jax.numpy.zeros(1 << 22))
    with Checkpoints(tmp_path, TWO) as checkpoints:
        checkpoints.save(1, {"weights": weights}, {})
        for _ in range(5):
            weights = next_step(weights)
        checkpoints.wait()
        restored = checkpoints.restore(1, {"weights": jax.ShapeDtypeStruct(weights.shape, weights.dtype)})
    np.testing.assert_array_equal(restored["weights"], np.ones(1 << 22))
    assert float(weights[0]) == 6


def test_a_record_that_grows_during_the_save_is_kept_as_it_was(tmp_path):
    losses = {1: 0.5}
    with Checkpoints(tmp_path, TWO) as checkpoints:
        checkpoints.save(1, {"weights": jax.numpy.zeros(8)}, {"losses": losses})
        losses[2] = 0.4
        checkpoints.wait()
        assert checkpoints.record(1)["losses"] == {"1": 0.5}


def test_the_names_on_disk_are_those_of_earlier_versions_and_a_part_that_is_off_has_none(tmp_path):
    """Checkpoints of earlier versions are restored by these names, even if the fields of the state are renamed."""
    for ema_decay, parts in ((0.0, set()), (0.9, {"average"})):
        run = run_on(ema_decay=ema_decay, fsdp=8)
        with mesh_context(run.mesh), Checkpoints(tmp_path / str(ema_decay), TWO) as checkpoints:
            checkpoints.save_and_wait(3, initial_state(run), RECORD)
            names = checkpoints.store.arrays(3).keys()
            restored = checkpoints.restore(3, run.abstract_state)
        assert {name.partition(".")[0] for name in names} == {
            "step",
            "examples",
            "params",
            "optimizer",
            "guard",
        } | parts
        assert names >= {f"{part}.embed.embedding" for part in {"params"} | parts}
        assert names >= {"guard.in_a_row", "optimizer.1.0.mu.stack.blocks.mlp.gate"}
        assert restored.eval_params.keys() == restored.params.keys()


@pytest.mark.parametrize(("saved_with", "wanted_with", "said"), [(0.0, 0.9, "lacks"), (0.9, 0.0, "also has")])
def test_a_state_with_other_parts_than_the_checkpoint_is_refused_in_one_line(tmp_path, saved_with, wanted_with, said):
    saver, other = (run_on(ema_decay=ema_decay, fsdp=8) for ema_decay in (saved_with, wanted_with))
    with mesh_context(saver.mesh), Checkpoints(tmp_path, TWO) as checkpoints:
        checkpoints.save_and_wait(3, initial_state(saver), RECORD)
        with pytest.raises(CheckpointError) as error:
            checkpoints.restore(3, other.abstract_state)
    line = f"checkpoint 3 of {tmp_path} {said} average, unlike the state of this run; restore it with the configuration"
    assert str(error.value).startswith(line) and f"jax {jax.__version__}" in str(error.value)


@pytest.fixture
def bucket():
    with empty_bucket() as files:
        yield files


def saved(checkpoints, step):
    """Save a state of one array; return what became of it where it failed."""
    checkpoints.save(step, {"weights": jax.numpy.full(64, step, np.float32)}, {"step": step})
    checkpoints.wait()
    return checkpoints.failure


def names_in(bucket, folder="runs/mine/checkpoints"):
    return {name.rstrip("/").rpartition("/")[2] for name in bucket.ls(folder, refresh=True)}


def test_in_a_bucket_checkpoints_are_saved_kept_restored_and_cleared_as_in_a_folder(bucket, tmp_path):
    with Checkpoints("gs://runs/mine", TWO, staging=tmp_path) as checkpoints:
        assert checkpoints.newest() is None
        assert [saved(checkpoints, step) for step in (1, 2, 3)] == [None] * 3
    assert names_in(bucket) == {"2", "3"}
    bucket.pipe("runs/mine/checkpoints/7/state/weights/0", b"half")  # of a save that was killed
    bucket.pipe("runs/mine/checkpoints/7.unfinished", b"")
    with Checkpoints("gs://runs/mine") as reader:
        assert reader.newest() == 3 and reader.record(3)["step"] == 3 and reader.steps() == [2, 3]
        restored = reader.restore(3, {"weights": jax.ShapeDtypeStruct((64,), np.float32)})
        np.testing.assert_array_equal(restored["weights"], np.full(64, 3))
    assert names_in(bucket) >= {"7"}
    bucket.pipe("runs/begun/checkpoints/7/state/weights/0", b"half")  # of a run whose first save is under way
    bucket.pipe("runs/begun/checkpoints/7.unfinished", b"")
    with Checkpoints("gs://runs/begun") as reader, pytest.raises(CheckpointError, match="has no complete checkpoint"):
        reader.newest_or_error()
    assert stored_config.trained_to(path_of("gs://runs/begun")) is None
    bucket.pipe("runs/mine/checkpoints/8-abc.unfinished/state/weights/0", b"half")  # of a save to a folder, copied here
    with Checkpoints("gs://runs/mine", TWO, staging=tmp_path):
        assert names_in(bucket) == {"2", "3"}


def test_in_a_bucket_what_is_damaged_is_set_aside(bucket, tmp_path, monkeypatch):
    # The emulator cannot move, and says so as if that might change; what is not moved is copied.
    monkeypatch.setattr("gcsfs.retry.is_retriable", lambda error: False)
    lines = []
    with Checkpoints("gs://runs/mine", TWO, staging=tmp_path) as checkpoints:
        checkpoints.report = lambda text, **figures: text and lines.append(text)
        assert saved(checkpoints, 1) is None and saved(checkpoints, 2) is None
        bucket.rm("runs/mine/checkpoints/2/manifest.json")
        assert checkpoints.newest() == 1
        assert lines == ["checkpoint 2 is damaged: manifest.json is missing; set aside as 2.damaged"]
        assert names_in(bucket) == {"1", "2.damaged"}
        assert bucket.exists("runs/mine/checkpoints/2.damaged/record.json")
        assert saved(checkpoints, 3) is None and checkpoints.newest() == 3


def test_staged_files_are_copied_several_at_once_and_the_error_of_one_is_that_of_the_save(tmp_path, monkeypatch):
    copy, under_way, most = shutil.copyfileobj, [], []

    def counting(source, target, size):
        under_way.append(source)
        most.append(len(under_way))
        time.sleep(0.05)
        copy(source, target, size)
        under_way.remove(source)

    def failing(source, target, size):
        if source.name.endswith("record.json"):
            raise OSError("no room")
        copy(source, target, size)

    with Checkpoints(tmp_path / "workdir", TWO, staging=tmp_path / "staging") as checkpoints:
        for step, replaced, failure, newest in ((1, counting, None, 1), (2, failing, "no room", 1), (3, copy, None, 3)):
            monkeypatch.setattr(shutil, "copyfileobj", replaced)
            found = saved(checkpoints, step)
            assert (failure in str(found) if failure else found is None) and checkpoints.newest() == newest
    assert 1 < max(most) <= manifest.THREADS


def test_differences_name_each_key_old_and_new_but_for_what_may_change():
    before = {"model.embed_dim": 4, "mesh.fsdp": 1, "train.seed": 0, "train.steps": 5}
    now = {"model.embed_dim": 8, "mesh.fsdp": 8, "train.seed": 0, "train.steps": 9}
    assert workdirs.differences(before, now, keys_of(RESUME)) == ["model.embed_dim=4, now 8"]


def test_a_run_of_an_older_version_resumes_with_the_defaults_of_newer_keys():
    stored, now = {"model.embed_dim": 4}, {"model.embed_dim": 4, "grpo.updates": 1}
    assert workdirs.differences(stored, now, keys_of(RESUME)) == []
    assert workdirs.differences(stored, now | {"grpo.updates": 2}, keys_of(RESUME)) == ["grpo.updates=1, now 2"]
    stored, now = {"model.name": "trm", "model.dropout": 0.1}, {"model.name": "trm", "model.dropout": 0.0}
    assert workdirs.differences(stored, now, keys_of(RESUME)) == [], "which this model does not read"
