# SPDX-License-Identifier: Apache-2.0
"""VishwamAI's trainer, pipeline, distillation and profiler, as its guide names them, train and measure."""

import gc
import json
import os
import pathlib
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import train
from checkpointing.checkpoints import Checkpoints
from core import assembly
from core.loader import as_ours
from layers.distillation import LossTerms, distillation_loss
from migration.vishwamai.training import DistillationTrainer, TPUProfiler, VishwamAIPipeline, VishwamAITrainer
from parallelism.mesh import mesh_context
from profiling import loop
from profiling.windows import Window
from settings import stored_config
from tests.migration.test_vishwamai import MESH, refused
from tests.support import assert_close, on_one_device, write_sums
from tests.test_train import lines_of

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "num_layers": 1, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 16, "dtype": "float32",
}  # fmt: skip
QUIET = {"tensorboard": False, "report": False}


def tiny(folder, **training) -> dict:
    """A configuration with the guide's keys, for eight devices and few steps."""
    usual = {
        "learning_rate": 1e-2, "max_steps": 6, "eval_every": 2, "save_every": 3, "log_every": 1, "warmup_steps": 1,
        "initial_batch_size": 1, "gradient_accumulation_steps": 1,
    }  # fmt: skip
    return {
        "model": SIZES, "training": usual | training, "optimizer": {"schedule": "constant"}, "logging": QUIET,
        "checkpoint_dir": str(folder),
    }  # fmt: skip


def loader(count: int = 4, rows: int = 6) -> list[dict]:
    """Batches of sequences that count up, as a tokenizer would make them."""
    rng = np.random.default_rng(0)
    return [{"input_ids": (rng.integers(0, 64, (rows, 1)) + np.arange(16)) % 64} for _ in range(count)]


def params_of(trainer, step: int):
    run = assembly.assemble(trainer.config)
    with Checkpoints(trainer.pipeline.workdir) as checkpoints, mesh_context(run.mesh):
        return checkpoints.restore_eval_params(step, run.abstract_state.params)


@pytest.mark.slow
def test_the_trainer_trains_on_its_mesh_resumes_exactly_and_its_profiler_has_every_step(tmp_path):
    def trainer(folder, **training):
        grows = {"dynamic_batch_size": True, "max_batch_size": 2, "batch_size_increase_step": 2}
        grows |= {"batch_size_increase_factor": 2, "data_parallel": True, "model_parallel": True}
        config = tiny(tmp_path / folder, **grows, **training)
        return VishwamAITrainer(VishwamAIPipeline(config), {"training": training}, loader(), loader(1))

    whole = trainer("whole", max_steps=6)
    result = whole.train()
    assert (result.step, result.reason) == (6, "finished") and whole.mesh_context.mesh.shape["model"] == 2
    evaluated = lines_of(tmp_path / "whole", "eval_loader")
    assert sorted(evaluated) == [2, 4, 6] and evaluated[6]["loss"] < evaluated[2]["loss"]
    assert {path.name for path in (tmp_path / "whole" / "checkpoints").iterdir()} >= {"3", "6"}
    gate = params_of(whole, 6)["stack"]["blocks"]["mlp"]["gate"]
    assert "model" in jax.tree.leaves(gate)[0].sharding.spec
    assert [line["tokens"] for line in lines_of(tmp_path / "whole", "train").values()] == [8 * 15] * 2 + [16 * 15] * 4
    summary = whole.profiler.get_metrics_summary()
    assert summary["steps"] == 6 and 0 <= summary["data_wait_share"] < 1
    trainer("halves", max_steps=3).train()
    halves = trainer("halves", max_steps=6)
    assert halves.train().step == 6 and halves.profiler.get_metrics_summary()["steps"] == 3
    jax.tree.map(np.testing.assert_array_equal, params_of(whole, 6), params_of(halves, 6))


def test_a_batch_of_a_tokenizer_predicts_the_next_token_and_masks_what_has_no_loss():
    batch = as_ours({"input_ids": [[5, 6, 7, 0]], "labels": [[-100, 6, 7, 0]], "attention_mask": [[1, 1, 1, 0]]})
    assert batch["tokens"].tolist() == [[5, 6, 7, 0]] and batch["targets"].tolist() == [[6, 7, -1, -1]]
    assert batch["segments"].tolist() == [[1, 1, 1, 0]] and batch["positions"].tolist() == [[0, 1, 2, 3]]
    refused("a batch has text; it needs input_ids", lambda: as_ours({"text": ["a"]}))


def test_a_loader_without_batches_and_another_folder_are_one_line(tmp_path):
    config = tiny(tmp_path)
    other = {"checkpoint_dir": str(tmp_path / "other")}
    refused(
        "the pipeline has .*; give the same to both", lambda: VishwamAITrainer(VishwamAIPipeline(config), other, [])
    )
    refused("the loader has no rows", lambda: VishwamAITrainer(VishwamAIPipeline(config), config, []))


@pytest.mark.slow
def test_error_correction_is_trained_and_revises_what_the_pipeline_writes(tmp_path, single_device):
    write_sums(tmp_path / "texts", 20)
    config = tiny(tmp_path / "run", use_error_correction=True, max_steps=3, initial_batch_size=2) | {
        "model": SIZES | {"vocab_size": 300, "max_position_embeddings": 32},
        "tokenizer": {"path": "byte"}, "tpu": {"tpu_cores": 1}, "error_correction": {"threshold": 0.01},
        "data": {"path": f"{tmp_path}/texts/*", "cache_dir": f"{tmp_path}/cache", "val_split": 0.3},
        "evaluation": {"batches": 1, "sample_tokens": 0},
    }  # fmt: skip
    pipeline = VishwamAIPipeline(config)
    VishwamAITrainer(pipeline, config).train()
    assert {"detection", "correction"} & set(lines_of(tmp_path / "run", "train")[3])
    plain, revised = (
        pipeline.generate(["1 is "], max_tokens=12, temperature=0, use_error_correction=revises)[0]
        for revises in (False, None)
    )
    assert plain.startswith("1 is ") and revised.startswith("1 is ") and plain != revised
    refused("has no lines of answers to search", lambda: pipeline.generate(["1 is "], use_tot=True))


@pytest.mark.slow
def test_a_tree_of_thoughts_is_searched_at_evaluation_and_by_the_pipeline(tmp_path, single_device):
    config = tiny(tmp_path / "run", max_steps=2, initial_batch_size=2, use_tot=True) | {
        "model": SIZES | {"vocab_size": 228, "max_position_embeddings": 128},
        "tokenizer": {"path": "numbers"}, "tpu": {"tpu_cores": 1}, "evaluation": {"batches": 1, "sample_tokens": 0},
        "data": {"source": "countdown", "cache_dir": f"{tmp_path}/cache"},
        "tot": {"max_thoughts": 2, "thoughts_per_step": 2, "search_strategy": "beam", "problems": 2},
    }  # fmt: skip
    pipeline = VishwamAIPipeline(config)
    result = VishwamAITrainer(pipeline, config).train()
    assert result.evaluations["tot"]["drawn_tokens"] > 0
    assert len(pipeline.generate(["3 4 8 12=27:"])) == 1
    refused("use_tot=True: what", lambda: pipeline.generate(["what"]))
    refused("was trained without it", lambda: pipeline.generate(["3"], use_error_correction=True))


def test_waiting_for_batches_is_the_first_advice_where_it_is_waited_and_only_there(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(loop.time, "perf_counter", lambda: now[0])

    def advice(seconds: float) -> list[str]:
        profiler = TPUProfiler(MESH)
        for _ in range(5):
            profiler.start_step()
            now[0] += 0.6
            profiler.end_step(jnp.ones(3))
            now[0] += seconds
        summary = profiler.get_metrics_summary()
        assert (summary["steps"], summary["data_wait_share"]) == (5, pytest.approx(seconds / (0.6 + seconds)))
        return profiler.get_actionable_recommendations()

    slow = advice(0.4)[0]  # 40 % of the time
    assert slow.startswith("slow input: 40%")
    assert "--config.data.readers" in slow and "--config.data.prefetch" in slow
    assert not [line for line in advice(0.0) if line.startswith("slow input")]


def test_a_step_that_compiles_again_and_again_is_told_so():
    profiler = TPUProfiler(MESH)
    with pytest.raises(ValueError, match=r"start_step\(\) has begun; call that first"):
        profiler.end_step()
    for size in range(3, 7):
        profiler.start_step()
        profiler.end_step(jax.jit(lambda x: jnp.sin(x @ x.T).sum())(jnp.ones((size, size))))
    assert profiler.get_metrics_summary()["compile_seconds"] > 0
    assert profiler.get_actionable_recommendations()[0].startswith("recompilation")


def test_a_profiler_begins_anew_with_each_run_and_keeps_neither_itself_nor_the_job():
    """What it keeps of a run has no arrays."""

    class Job:
        clock, workdir = None, pathlib.Path()

    profiler, job = TPUProfiler(MESH), Job()
    profiler.start_step()
    profiler.end_step()
    step = profiler.wrap(None, job)
    assert profiler.get_metrics_summary() == {"steps": 0}
    kept = weakref.ref(profiler), weakref.ref(job)
    del step, job
    gc.collect(1)  # of what is young: a whole collection takes seconds after many tests
    assert kept[0]() is profiler and kept[1]() is None
    del profiler
    gc.collect(1)
    assert kept[0]() is None


def test_details_are_those_of_the_compiled_step():
    profiler, side = TPUProfiler(MESH), 64
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((side, side))).compile()
    profiler.start_step()
    profiler.end_step(compiled(jnp.ones((side, side))))
    details = profiler.add_detailed_metrics(compiled)
    moved = compiled.cost_analysis()["bytes accessed"]
    assert details["memory_bandwidth"] * profiler.get_metrics_summary()["step_seconds"] == pytest.approx(moved)
    assert moved >= 2 * 4 * side**2 and details["energy_joules_per_step"] is None  # no power of a CPU is published
    assert profiler.get_metrics_summary().keys() >= details.keys()
    copies = jax.jit(lambda x: x.T).lower(jnp.ones((side, side))).compile()
    assert "flops" not in copies.cost_analysis() and profiler.add_detailed_metrics(copies)["compute_efficiency"] is None


# B19: DistillationTrainer


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> pathlib.Path:
    """A run of one device."""
    folder = tmp_path_factory.mktemp("teacher")
    with on_one_device():
        config = tiny(folder, max_steps=2, eval_every=0)
        VishwamAITrainer(VishwamAIPipeline(config), config, loader()).train()
    return folder


STUDENT = {
    "vocab_size": 64, "num_layers": 1, "num_heads": 2, "head_dim": 4, "hidden_dim": 8, "mlp_dim": 12, "max_seq_len": 16,
}  # fmt: skip


@pytest.mark.slow
def test_the_loss_and_its_gradients_are_those_of_the_objective(teacher):
    trainer = DistillationTrainer(str(teacher), STUDENT)
    how = trainer.config.distillation
    rng = np.random.default_rng(0)
    student, taught = (jnp.asarray(rng.normal(size=(2, 5, 64)), jnp.float32) for _ in range(2))
    labels, mask = rng.integers(0, 64, (2, 5)), np.array([[1, 1, 1, 0, 0], [1] * 5])

    def loss(student, taught):
        return trainer.advanced_loss_functions(student, taught, None, None, labels, mask)

    def wanted(student, taught):
        weights = LossTerms(how.hard_weight, how.soft_weight, how.temperature, reverse=False)
        one = jnp.eye(64)
        return distillation_loss(student, one, taught, one, labels, mask.astype(np.float32), weights)[0] / mask.sum()

    for number in range(2):
        got, expected = jax.value_and_grad(loss, number)(student, taught), jax.value_and_grad(wanted)(student, taught)
        assert_close(got[0], expected[0])
        assert_close(got[1], expected[1]) if number == 0 else np.testing.assert_array_equal(got[1], 0)
    far = trainer.advanced_loss_functions(student, taught, student, -student, labels, mask)
    assert float(far - loss(student, taught)) == pytest.approx(how.hidden_weight * 4, rel=1e-4)
    narrow = student[..., :8]
    with pytest.raises(ValueError, match="streams of widths 8 and 64 need a projection"):
        trainer.advanced_loss_functions(student, taught, narrow, taught, labels, mask)


@pytest.mark.slow
def test_a_student_is_trained_in_microbatches_and_is_a_model_like_any_other(teacher, tmp_path):
    training = {"max_steps": 8, "eval_every": 0, "learning_rate": 2e-2, "warmup_steps": 1, "log_every": 1}
    sections = {"training": training | {"initial_batch_size": 2}, "logging": QUIET}
    trainer = DistillationTrainer(teacher, STUDENT | sections)
    result = trainer.improved_training_strategies(tmp_path, loader(), gradient_accumulation_steps=2, chunk_tokens=32)
    lines = lines_of(tmp_path, "train")
    assert result.step == 8 and lines[8]["loss"] < lines[1]["loss"]
    assert lines[8]["hidden_distance"] < lines[1]["hidden_distance"] and "divergence" in lines[1]
    stored = stored_config.load_to_read(tmp_path, {}).config
    assert stored.train.objective == "language_modeling" and stored.model.embed_dim == 8
    assert json.loads((tmp_path / "config.json").read_text())["train.gradient_accumulation"] == 2


def test_a_profiler_traces_each_run_and_reads_no_profile_of_an_earlier_one(tmp_path):
    (tmp_path / "profile.json").write_text('{"advice": [{"line": "of an earlier run"}]}')
    os.utime(tmp_path / "profile.json", (1, 1))
    window = Window(2, 4)
    profiler = loop.LoopProfile(None, window)
    profiler.window = None  # as after a trace
    profiler.wrap(None, types.SimpleNamespace(clock=None, workdir=tmp_path))
    assert profiler.window is window and profiler.advice() == []


def test_what_one_training_was_given_is_not_that_of_the_next(teacher, tmp_path, monkeypatch):
    given = []
    monkeypatch.setattr(train, "train", lambda config, *_: given.append(config.train))
    trainer = DistillationTrainer(teacher, STUDENT | {"training": {"initial_batch_size": 4, "max_steps": 2}})
    trainer.improved_training_strategies(tmp_path, loader(), gradient_accumulation_steps=2, chunk_tokens=32)
    trainer.improved_training_strategies(tmp_path, loader())
    assert [one.loss_chunk_tokens for one in given] == [32, 0]
    assert given[1].gradient_accumulation == trainer.config.train.gradient_accumulation != 2


def test_a_pipeline_takes_a_list_of_prompts(tmp_path):
    with pytest.raises(ValueError, match="'3 4=7:' is one text; give a list of texts"):
        VishwamAIPipeline(tiny(tmp_path)).generate("3 4=7:", use_tot=True)


def test_a_teacher_that_cannot_teach_is_one_line(teacher, tmp_path):
    refused(
        "model.vocab_size=30522 differs from the 64 of distillation.teacher=",
        lambda: DistillationTrainer(teacher, STUDENT | {"vocab_size": 30522}),
    )
    data = {"path": "mine.txt"}
    refused("the data are the teacher's", lambda: DistillationTrainer(teacher, STUDENT | {"data": data}))
    refused("holds no run", lambda: DistillationTrainer(tmp_path, STUDENT))
    refused("teacher_model=object: give the folder", lambda: DistillationTrainer(object(), STUDENT))
