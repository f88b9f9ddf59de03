# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: restored onto another mesh and another execution, newest kept, differences named."""

import dataclasses

import jax
import numpy as np
import pytest

import assembly
from configs import base
from configs.loading import flat
from parallelism.mesh import mesh_context
from training import workdir as workdirs
from training.checkpoints import CheckpointError, Checkpoints, differences


def run_on(ema_decay=0.0, **mesh):
    config = base.get_config()
    config.optimizer.ema_decay = ema_decay
    config.model.update(dict(num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=32))
    config.train.update(dict(global_batch=8, sequence_length=16))
    config.mesh.update(dict.fromkeys(config.mesh, 1) | mesh)
    return assembly.assemble(config)


RECORD = {"step": 3, "config": flat(base.get_config()), "corpus": "abc"}


def test_a_state_goes_from_one_mesh_to_another_unchanged(tmp_path):
    one, other = run_on(fsdp=8), run_on(data=2, fsdp=2, model=2)
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        with mesh_context(one.mesh):
            state = one.init()
            checkpoints.save(3, state, RECORD)
            checkpoints.wait()
        with mesh_context(other.mesh):
            restored = checkpoints.restore(checkpoints.newest(), other.abstract_state)
            params = checkpoints.restore_evaluated(3, other.abstract_state)
    for wanted, got in ((state, restored), (state.params, params)):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), wanted, got)
    jax.tree.map(
        lambda leaf, spec: leaf.sharding == spec.sharding or pytest.fail(str(spec)), restored, other.abstract_state
    )


def test_where_an_average_is_kept_it_is_what_is_read_to_be_evaluated(tmp_path):
    run = run_on(ema_decay=0.9, fsdp=8)
    with mesh_context(run.mesh), Checkpoints(tmp_path, keep=2) as checkpoints:
        state = run.init()
        average = jax.tree.map(lambda weight: weight + 1, state.average)
        checkpoints.save(3, dataclasses.replace(state, average=average), RECORD)
        checkpoints.wait()
        restored = checkpoints.restore_evaluated(3, run.abstract_state)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), restored, average)


def test_only_the_newest_are_kept_and_the_record_stands_beside(tmp_path):
    run = run_on(fsdp=8)
    with mesh_context(run.mesh), Checkpoints(tmp_path, keep=2) as checkpoints:
        state = run.init()
        for step in (1, 2, 3):
            checkpoints.save(step, state, RECORD | {"step": step})
        checkpoints.wait()
        assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["2", "3"]
        record = checkpoints.record(3)
    assert record["step"] == 3 and record["config"]["train.seed"] == 0 and record["versions"].keys() >= {"jax", "flax"}


def test_a_reader_leaves_a_save_under_way_alone_and_a_writer_clears_what_a_killed_one_left(tmp_path):
    unfinished = tmp_path / "checkpoints" / "9.orbax-checkpoint-tmp"
    run = run_on(fsdp=8)
    with mesh_context(run.mesh), Checkpoints(tmp_path, keep=2) as checkpoints:
        state = run.init()
        checkpoints.save(3, state, RECORD)
    unfinished.mkdir()
    with Checkpoints(tmp_path) as reader:
        assert reader.newest_or_error() == 3
    assert unfinished.is_dir()
    with mesh_context(run.mesh), Checkpoints(tmp_path, keep=2) as writer:
        writer.save(4, state, RECORD)  # orbax clears in the background, and waits for that before it saves
        assert not unfinished.exists()


def test_a_folder_that_was_never_trained_in_stays_untouched_by_a_reader(tmp_path):
    with Checkpoints(tmp_path) as reader, pytest.raises(CheckpointError, match="has no complete checkpoint"):
        reader.newest_or_error()
    assert not (tmp_path / "checkpoints").exists()


def test_a_workdir_without_a_checkpoint_is_fresh_to_train_and_an_error_to_read(tmp_path):
    with Checkpoints(tmp_path, keep=2) as checkpoints:
        assert workdirs.check_resumable(checkpoints, RECORD["config"], "abc", tmp_path) is None
        with pytest.raises(CheckpointError, match="has no complete checkpoint"):
            checkpoints.newest_or_error()


def test_differences_name_each_key_old_and_new_but_for_what_may_change():
    stored = {"model.embed_dim": 4, "mesh.fsdp": 1, "train.seed": 0, "train.steps": 5}
    now = {"model.embed_dim": 8, "mesh.fsdp": 8, "train.seed": 0, "train.steps": 9}
    assert differences(stored, now, workdirs.MAY_CHANGE) == ["model.embed_dim 4 -> 8"]
