# SPDX-License-Identifier: Apache-2.0
"""Uses of the toys, which tests/test_additions.py runs in a copy of the tree that has them.

Each toy is one new file, or an argument of `train`. None changes a file of core/, training/ or checkpointing/.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict

import train
from core.callbacks import Callback, Stop
from core.evaluators import Evaluator
from layers import taps
from objectives import inner_update, self_training
from parallelism.mesh import mesh_context
from settings.validation import validate
from tests.one_step import LENGTH, VOCAB, batch, small_config
from training.transforms import reset_units


def config_of(objective: str = "language_modeling", **mesh):
    config = small_config(**mesh)
    config.model.num_layers = 4
    config.train.update(objective=objective, steps=4, save_every=2, eval_every=0, log_every=1)
    config.logging.tensorboard = config.logging.report = False
    validate(config, int(np.prod(list(config.mesh.values()))))
    return config


def batches(config, first: int = 0):
    rng = np.random.default_rng(7)
    for step in range(config.train.steps):
        rows = batch() | {"tokens": rng.integers(1, VOCAB, (config.train.global_batch, LENGTH)).astype(np.int32)}
        if step >= first:
            yield rows


def lines(workdir, kind: str) -> list[dict]:
    found = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return [line for line in found if line["kind"] == kind]


class Last(Callback):
    """Keep the state and the run after each step."""

    def on_step(self, job, state, step):
        self.run = job.run
        self.state, self.shardings = jax.device_get(state), jax.tree.map(lambda leaf: leaf.sharding, state)


def test_a_step_transform_resets_units_is_sharded_saved_and_resumes_bit_for_bit(tmp_path):
    def run(workdir, steps, first=0):
        config, last = config_of(fsdp=2, model=4), Last()
        config.train.update(reset_units_every=2, steps=steps)
        train.train(config, workdir, batches(config, first), callbacks=[last])
        return last

    whole = run(tmp_path / "whole", 4)
    run(tmp_path / "parts", 2)
    resumed = run(tmp_path / "parts", 4, first=2)
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)
    assert [line["units_reset"] for line in lines(tmp_path / "whole", "train")][-1] == 4  # one of each layer
    weight, mean = (
        flatten_dict(tree)[reset_units.WEIGHT]
        for tree in (whole.shardings.params, whole.shardings.extra["reset_units"])
    )
    assert mean.spec[:2] == weight.spec[:2] and weight.spec[1] == "model" and mean.spec[2:] in ((), (None,))
    down = flatten_dict(whole.state.params)[reset_units.WEIGHT]
    assert (np.abs(down).sum(axis=2) == 0).sum() == 4


def test_an_objective_differentiates_through_inner_updates_of_many_tasks(tmp_path, monkeypatch):
    config = config_of("inner_update")
    gradients = {}
    for second_order in (True, False):
        monkeypatch.setattr(inner_update, "SECOND_ORDER", second_order)
        run = train.assembly.assemble(config, devices=jax.devices()[:1])
        with mesh_context(run.mesh):
            *_, found = run.train_step_with_grads(run.init(), jax.device_put(batch(), run.mesh.devices.flat[0]))
        gradients[second_order] = jax.device_get(found)
    difference = jax.tree.map(lambda one, other: np.abs(one - other).max(), gradients[True], gradients[False])
    assert max(jax.tree.leaves(difference)) > 1e-3  # the gradient of the inner step is there
    config.mesh.fsdp = 8
    result = train.train(config, tmp_path, batches(config))
    assert np.isfinite(result.metrics["loss"])


def test_an_objective_trains_a_second_head_on_a_frozen_base(tmp_path):
    config, last = config_of(fsdp=8), Last()
    train.train(config, tmp_path / "base", batches(config), callbacks=[last])
    headed, after = config_of("second_head", fsdp=8), Last()
    headed.train.init_from = str(tmp_path / "base")
    headed.optimizer.update(schedule="constant", learning_rate=0.05)
    result = train.train(headed, tmp_path / "headed", batches(headed), callbacks=[after])
    assert set(after.state.params) == {"second_head"} and result.reason == "finished"
    losses = [line["loss"] for line in lines(tmp_path / "headed", "train")]
    assert losses[-1] < losses[0]
    record = json.loads((tmp_path / "headed/checkpoints/4/record.json").read_text())
    assert record["frozen"]["base"]["step"] == 4


def test_an_objective_trains_on_what_the_live_parameters_write(tmp_path):
    config = config_of("self_training", fsdp=8)
    config.optimizer.update(schedule="constant", learning_rate=0.1)
    self_training.SAMPLED.clear()
    train.train(config, tmp_path, batches(config))
    assert len(self_training.SAMPLED) == 4
    assert not np.array_equal(self_training.SAMPLED[0], self_training.SAMPLED[-1])


class Prune(Callback):
    """Stop when the loss does not fall below a limit."""

    def on_step(self, job, state, step):
        job.log.flush()
        return Stop("pruned: the loss is 0 or more") if step == 2 and job.log.last_figures["loss"] >= 0 else None


class Trace(Callback):
    """Record a trace of steps 2 and 3."""

    def __init__(self, folder):
        self.folder = folder

    def on_step(self, job, state, step):
        if step == 1:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self.folder)
        if step == 3:
            jax.block_until_ready(state)
            jax.profiler.stop_trace()


class Forks(Evaluator):
    """Patch one layer's attention at one position, and decode five continuations of one prompt."""

    name, every = "forks", 2

    def evaluate(self, context):
        rows, run = batch(), context.run

        def layers_of(params, of_layer):
            def patch(x_BTD, layer):
                return jnp.where(layer == of_layer, x_BTD.at[:, 5].set(0.0), x_BTD)

            with taps.replace("attention", patch), taps.record("attention", "block") as recorded:
                run.model(params)(rows["tokens"], rows["positions"], rows["segments"])
            return recorded["attention"], recorded["block"]

        layers_of = jax.jit(layers_of)
        plain, patched = (jax.device_get(layers_of(context.params, number)) for number in (-1, 1))
        assert not patched[0][1][:, 5].any() and plain[0][1][:, 5].all(axis=-1).any()
        changed_LBT = (plain[1] != patched[1]).any(axis=-1) & (rows["segments"] > 0)
        assert not changed_LBT[0].any() and not changed_LBT[:, :, :5].any()
        prompt, tokens = np.array([[1, 2, 3]], np.int32), np.arange(10, dtype=np.int32).reshape(5, 2)
        _, cache = context.engine.prefill(prompt)
        cache = context.engine.fork(cache, np.zeros(5, np.int32))
        logits_BTV, _ = context.engine.extend(cache, tokens)
        alone_BV, _ = context.engine.prefill(np.concatenate([prompt.repeat(5, axis=0), tokens], axis=1))
        return {
            "changed": float(changed_LBT[-1].mean()),
            "difference": float(np.abs(np.asarray(logits_BTV)[:, -1] - np.asarray(alone_BV)).max()),
        }


def test_three_runs_in_one_process_with_callbacks_and_an_evaluator_return_their_results(tmp_path):
    config = config_of(fsdp=8)
    pruned = train.train(config, tmp_path / "a", batches(config), callbacks=[Prune()])
    assert (pruned.step, pruned.reason) == (2, "pruned: the loss is 0 or more")
    assert (tmp_path / "a/checkpoints/2/record.json").is_file()
    config = config_of(fsdp=2, model=4)
    traced = train.train(config, tmp_path / "b", batches(config), callbacks=[Trace(tmp_path / "trace")])
    assert (traced.step, traced.reason) == (4, "finished") and list((tmp_path / "trace").rglob("*.xplane.pb"))
    config = config_of(data=8)
    result = train.train(config, tmp_path / "c", batches(config), evaluators=[Forks()])
    assert result.evaluations["forks"]["changed"] > 0
    assert result.evaluations["forks"]["difference"] < 1e-4  # float32, sums in another order
    assert [line["step"] for line in lines(tmp_path / "c", "forks")] == [2, 4]
    losses = [lines(tmp_path / name, "train")[-1]["loss"] for name in "abc"]
    assert losses == [run.metrics["loss"] for run in (pruned, traced, result)]
