# SPDX-License-Identifier: Apache-2.0
"""Moments in the hosts' memory: the same numbers, nothing left on the devices, and checkpoints that go both ways."""

import functools

import jax
import numpy as np
import pytest

from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention
from configs import base
from core import assembly
from parallelism.mesh import mesh_context
from tests.one_step import initial_state
from training import replicas
from training.step import is_finite


@functools.cache
def run_with(offload: str, **changes):
    config = base.get_config()
    config.model.update(dict(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=32))
    config.train.update(dict(global_batch=8, sequence_length=16, offload=offload))
    config.optimizer.update(dict(ema_decay=0.9) | changes)
    config.mesh.update(fsdp=len(jax.devices()))
    return assembly.assemble(config)


def batch_of(run, seed: int) -> dict:
    return {
        name: jax.device_put(rows, run.abstract_batch[name].sharding)
        for name, rows in run.objective.random_batch(jax.random.key(seed)).items()
    }


def trained(run):
    state = initial_state(run)
    with mesh_context(run.mesh):
        for seed in range(3):
            state, scalars = run.train_step(state, batch_of(run, seed))
    return state, scalars


def assert_same(tree, other) -> None:
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), tree, other)


def kinds(tree) -> set[str]:
    return {leaf.sharding.memory_kind for leaf in jax.tree.leaves(tree) if leaf.size > 100}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_same_bits_are_computed(name):
    assert_same(trained(run_with("optimizer", name=name)), trained(run_with("none", name=name)))


def test_moments_lie_on_the_hosts_and_weights_on_the_devices():
    state, _ = trained(run_with("optimizer"))
    assert kinds(state.optimizer) == {"pinned_host"}
    assert kinds((state.params, state.extra["average"])) == {"device"}


def test_a_step_takes_the_place_of_the_moments_that_it_is_given():
    run = run_with("optimizer")
    with mesh_context(run.mesh):
        before = run.init()
        run.train_step(before, batch_of(run, 0))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before.optimizer))


@pytest.mark.parametrize(
    ("saved", "restored"), [("optimizer", "optimizer"), ("optimizer", "none"), ("none", "optimizer")]
)
def test_a_checkpoint_goes_on_with_or_without(tmp_path, saved, restored):
    run, other = run_with(saved), run_with(restored)
    state, _ = trained(run)
    with Checkpoints(tmp_path, Retention(newest=1)) as checkpoints:
        checkpoints.save(3, state, {"step": 3})
        checkpoints.wait()
        found = checkpoints.restore(3, other.abstract_state)
    assert_same(found, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, found) == jax.tree.map(lambda s: s.sharding, other.abstract_state)
    with mesh_context(other.mesh):
        after = other.train_step(found, batch_of(other, 3))
    with mesh_context(run.mesh):
        assert_same(after, run.train_step(state, batch_of(run, 3)))


def test_a_step_is_computed_twice_and_found_finite():
    run = run_with("optimizer")
    state, _ = trained(run)
    with mesh_context(run.mesh):
        again, _ = replicas.run_twice(run.train_step, state, batch_of(run, 3), run.mesh)
        assert bool(is_finite(again))
    assert kinds(again.optimizer) == {"pinned_host"}
