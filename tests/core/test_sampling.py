# SPDX-License-Identifier: Apache-2.0
"""The batch that an objective samples in place of that of the data."""

import dataclasses
import math
import pathlib

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict

from core import assembly, decoding
from core.sampling import BatchSampler
from objectives.objective import Objective, Sampled
from parallelism.mesh import mesh_context
from tests import one_step


class Samples(Objective):
    """Returns a given batch, and keeps the engine that it was asked with."""

    def __init__(self, batch, records=()):
        self.sampled, self.records = batch, records

    def sample_batch(self, engine, batch, key):
        self.engine = engine
        return Sampled(self.sampled or batch, self.records) if self.sampled or self.records else None


@pytest.fixture(scope="module")
def run():
    return assembly.assemble(one_step.small_config(fsdp=4), devices=jax.devices()[:4])


def batch_of(run):
    return one_step.placed(one_step.batch(), run.abstract_batch)


def sampled(run, batch, records=()):
    """Return what a run with an objective that samples `batch` trains on, and the engine that it got."""
    objective = Samples(batch, records)
    with mesh_context(run.mesh):
        params = one_step.initial_state(run).params
        run = dataclasses.replace(run, objective=objective)
        found = BatchSampler(pathlib.Path()).sample(run, params, {}, batch_of(run), 1).batch
        one_step.placed(jax.tree.map(np.asarray, params), run.abstract_state.params)  # they were not donated
    return found, objective.engine


def test_a_sampled_batch_takes_the_place_of_that_of_the_data(run):
    host = {name: np.full(array.shape, 2, np.int32) for name, array in run.abstract_batch.items()}
    found, _ = sampled(run, host)
    jax.tree.map(np.testing.assert_array_equal, found, host)
    assert all(found[name].sharding == array.sharding for name, array in run.abstract_batch.items())
    found, _ = sampled(run, None)
    jax.tree.map(np.testing.assert_array_equal, found, batch_of(run))


def test_a_model_may_have_a_scalar_which_no_layer_axis_names(run, monkeypatch):
    monkeypatch.setattr(decoding, "declared_axes", lambda declared: {("gain",): ((), ())})
    with mesh_context(run.mesh):
        assert decoding.weights(run) == decoding.stacked_weights(run)


def test_an_engine_decodes_on_the_mesh_on_which_a_token_reads_the_fewest_bytes(run):
    """The step shards weights over `fsdp`; if tokens were decoded so, each of them would all-gather all weights."""
    _, engine = sampled(run, None)
    gates = [weight for path, weight in flatten_dict(engine.params).items() if path[-2:] == ("mlp", "gate")]
    assert dict(gates[0][0].sharding.mesh.shape) == dict.fromkeys(run.mesh.shape, 1) | {"model": 4}
    assert gates[0][0].sharding.shard_shape(gates[0][0].shape) == (40, 14), "56 hidden units on 4 devices"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda batch: {name: array[:4] for name, array in batch.items()},
            r"int32\[4, 24\] and should be int32\[16, 24\]",
        ),
        (lambda batch: {"tokens": batch["tokens"]}, "positions is missing"),
        (lambda batch: batch | {"reward": np.ones(16, np.float32)}, r"reward is float32\[16\] and should be missing"),
        (lambda batch: batch | {"tokens": batch["tokens"].astype(np.float32)}, "tokens is float32.* should be int32"),
        (lambda batch: batch | {"tokens": batch["tokens"] * 68}, "tokens has 68, which is not an id with model.voc"),
    ],
)
def test_a_sampled_batch_of_another_shape_is_refused(run, change, message):
    """With other rows, a step would be compiled for them, and the run would lose count of its examples."""
    host = {name: np.ones(array.shape, np.int32) for name, array in run.abstract_batch.items()}
    with pytest.raises(ValueError, match=f"^the batch that train.objective=language_modeling sampled.*: .*{message}"):
        sampled(run, change(host))


@pytest.mark.parametrize(
    ("record", "error", "message"),
    [
        ({"step": 1}, ValueError, "a line of rollouts.jsonl has its own 'step'; rename the key of the record"),
        ({"kind": "mine"}, ValueError, "its own 'kind'"),
        ({"time": 0.5}, ValueError, "its own 'time'"),
        (
            {"a": 1, "all": [1.0, math.nan]},
            ValueError,
            r"'all' of a record is \[1.0, nan\], which is not a value of JSON",
        ),
        ({"all": {"best": math.inf}}, ValueError, "'all' of a record is {'best': inf}, "),
        (
            {"reward": np.float32(1)},
            TypeError,
            r"'reward' of a record is np.float32\(1.0\), .*; give numbers of Python",
        ),
        ({1: 2}, TypeError, "the record {1: 2}; a record is a dictionary with texts as keys"),
        (["a"], TypeError, r"the record \['a'\]; a"),
    ],
)
def test_a_record_that_a_line_cannot_hold_is_refused_by_its_objective_and_key(run, record, error, message):
    with pytest.raises(error, match=f"^train.objective=language_modeling.*{message}"):
        sampled(run, None, [record])


def test_a_record_may_have_any_value_of_json_and_a_number_that_is_not_finite(run):
    sampled(run, None, [{"a": None, "b": [1, "2", {"c": True}], "d": math.nan, "e": np.float64(1)}])


def test_old_batches_are_deleted_in_the_runs_own_folder_alone(run, tmp_path):
    """The folder's name is not a pattern."""
    folders = [tmp_path / name / "rollouts" for name in ("lr[12]", "lr1")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / "1.npz").touch()
    objective, sampler = Samples(None), BatchSampler(folders[0].parent)
    objective.steps_of_batch = 2
    sampler._step, sampler._kept = 3, {"tokens": np.zeros(2)}
    sampler.saving(3, dataclasses.replace(run, objective=objective), list)()
    assert [[path.name for path in folder.iterdir()] for folder in folders] == [["3.npz"], ["1.npz"]]


def test_each_step_draws_with_a_key_of_its_own(run):
    keys = []

    class Draws(Samples):
        def sample_batch(self, engine, batch, key):
            keys.append(jax.random.key_data(key).tolist())
            return super().sample_batch(engine, batch, key)

    drawing, sampler = dataclasses.replace(run, objective=Draws(None)), BatchSampler(pathlib.Path())
    with mesh_context(run.mesh):
        params = one_step.initial_state(run).params
        for one, step in ((sampler, 1), (sampler, 2), (BatchSampler(pathlib.Path()), 2)):
            one.sample(drawing, params, {}, batch_of(run), step)
    assert keys[0] != keys[1] == keys[2], "a resumed run draws the same"
