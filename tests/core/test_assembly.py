# SPDX-License-Identifier: Apache-2.0
"""What assembly puts together: another task without another loop, names that are addresses, the fastest defaults."""

import dataclasses
import json
import re
import sys
import time
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import train
from configs import base
from configs.errors import ConfigError
from core import assembly, evaluators, models, start
from input_pipeline.errors import DataError
from models import decoder_lm
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling
from parallelism.mesh import mesh_context
from tests.support import one_device_mesh
from training import optimizers, platform_defaults, schedules
from training.transforms import guard


def small_config(**changes):
    config = base.get_config()
    config.model.update(dict(num_layers=1, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=31))
    config.train.update(dict(global_batch=8, sequence_length=16, steps=4, log_every=1, save_every=2) | changes)
    config.optimizer.update(name="sgd", clip_norm=0.0, schedule="constant")  # one program, however many steps
    config.evaluation.sample_tokens = 0
    config.mesh.update(fsdp=1, context=8)
    config.logging.tensorboard = config.logging.report = False
    return config


def counting_objective():
    """A task whose state goes from step to step: each row counts the real tokens that it has seen."""

    @dataclasses.dataclass(frozen=True)
    class Counting(LanguageModeling):
        def init_carry(self, model, rows, key):
            return {"seen": jnp.zeros(rows, jnp.int32)}

        def loss(self, model, carry, batch, key):
            stream_BTD, _ = model(batch["tokens"], batch["positions"], batch["segments"])
            seen_B = carry["seen"] + (batch["segments"] > 0).sum(axis=1)
            weight = jnp.float32(batch["tokens"].size)
            total = jnp.sum(stream_BTD.astype(jnp.float32) ** 2)
            return (total, weight), (
                {"seen": seen_B},
                {"loss": (total, weight), "seen": (seen_B.sum(), jnp.float32(seen_B.size))},
            )

    return types.SimpleNamespace(make=lambda config: Counting(config.train.global_batch, config.train.sequence_length))


def batches(config, steps):
    shape = (config.train.global_batch, config.train.sequence_length)
    for _ in range(steps):
        yield {name: np.ones(shape, np.int32) for name in ("tokens", "targets", "segments", "positions")}


@pytest.mark.slow
def test_a_second_task_comes_without_touching_the_loop(tmp_path, monkeypatch):
    """Its state does not depend on how a batch is divided, or on whether the run was stopped."""
    monkeypatch.setitem(sys.modules, "objectives.counting", counting_objective())
    config = small_config(objective="counting", global_batch=16)
    train.train(config, tmp_path, [*batches(config, 4)])
    config.train.update(steps=6, gradient_accumulation=2)
    train.train(config, tmp_path, batches(config, 2))
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    seen = {line["step"]: line["seen"] for line in lines if line["kind"] == "train"}
    assert seen == {step: 16 * step for step in range(1, 7)}  # tokens a row


def test_64_bits_are_refused_before_a_model_becomes_float64():
    with jax.enable_x64(True), pytest.raises(ConfigError, match=r"call jax.config.update\('jax_enable_x64', False\)"):
        assembly.assemble(small_config())


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (jax.default_prng_impl("rbg"), "jax_default_prng_impl=rbg would change .*; unset JAX_DEFAULT_PRNG_IMPL, or "),
        (jax.threefry_partitionable(False), "jax_threefry_partitionable=False would change the numbers of a run"),
    ],
)
def test_settings_of_jax_that_draw_other_numbers_are_refused(setting, message):
    """The same seed would begin another run; of several hosts, one could draw other weights than the rest."""
    with setting, pytest.raises(ConfigError, match=message):
        assembly.assemble(small_config())


def mesh_of(platform: str, size: int = 1):
    """A mesh for code that only asks for the platform and the number of devices."""
    devices = np.array([types.SimpleNamespace(platform=platform)] * size, object)
    return types.SimpleNamespace(devices=devices, size=size)


def test_logits_are_cut_into_chunks_only_where_they_are_large():
    """On CPU from 64 MiB on; on TPU, where each chunk sums the head's gradient over the mesh, from 1 GiB on."""
    config = small_config(sequence_length=1024, global_batch=8)

    def chunks(platform: str, *, vocab_split: bool = False) -> int:
        return platform_defaults.loss_chunks(config, 1, mesh_of(platform), vocab_split=vocab_split)

    assert chunks("cpu") == 1
    config.model.vocab_size = 1 << 17
    assert chunks("cpu") == 8  # 128 tokens a device of 2^17 float32 logits are 64 MiB
    assert chunks("tpu") == 1
    config.model.vocab_size = 1 << 19
    assert chunks("tpu") == 2
    config.train.loss_chunk_tokens = 100
    assert chunks("cpu") == chunks("tpu") == 16


def test_devices_that_share_heads_split_the_vocabulary_of_logits_or_their_length():
    """Each device has the same number of logits either way; chunks divide the part of the length that a device has."""
    config = small_config(sequence_length=1024, global_batch=8)
    config.model.vocab_size = 1 << 17
    config.mesh.update(fsdp=1, context=1, model=4)
    cpu = mesh_of("cpu")
    assert platform_defaults.loss_chunks(config, 1, cpu, vocab_split=True) == 16
    assert platform_defaults.loss_chunks(config, 1, cpu, vocab_split=False) == 16
    config.train.loss_chunk_tokens = 512
    assert platform_defaults.loss_chunks(config, 1, cpu, vocab_split=True) == 16
    assert platform_defaults.loss_chunks(config, 1, cpu, vocab_split=False) == 4


@pytest.mark.slow
def test_evaluating_is_not_counted_as_step_time(tmp_path, monkeypatch):
    config = small_config(eval_every=1, steps=2)
    config.data.source = "synthetic"
    evaluated = evaluators.evaluate_heldout

    def slow(context, num_batches):
        time.sleep(1.0)
        return evaluated(context, 2)

    monkeypatch.setattr(evaluators, "evaluate_heldout", slow)
    train.train(config, tmp_path)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step_seconds"] for line in lines if line["kind"] == "train") < 0.9
    assert [line["kind"] for line in lines if line["kind"] != "event"][-1] == "eval"


@pytest.mark.parametrize(
    ("changes", "scanned"),
    [
        ({}, False),
        ({"num_layers": 40}, True),
        ({"remat": "full"}, True),
        ({"remat": "full", "layer_loop": "unroll"}, False),
    ],
)
def test_layers_are_unrolled_on_cpu_unless_they_are_many_or_remat_is_to_save_memory(changes, scanned):
    """Unrolled, XLA's CPU backend moves rematerialised work to where it saves nothing."""
    config = small_config()
    config.model.update(changes)
    assert platform_defaults.scan(config, mesh_of("cpu")) == scanned


@pytest.mark.parametrize(
    ("changes", "devices", "scanned"),
    [({}, 1, False), ({"remat": "full"}, 1, False), ({"num_layers": 40}, 1, True), ({}, 8, True)],
)
def test_layers_are_unrolled_on_one_gpu_unless_they_are_many(changes, devices, scanned):
    config = small_config()
    config.model.update(changes)
    assert platform_defaults.scan(config, mesh_of("gpu", devices)) == scanned


def test_a_model_file_that_lacks_a_part_of_the_interface_is_refused(monkeypatch):
    monkeypatch.setitem(sys.modules, "models.mine", types.SimpleNamespace(make=None, flops_per_token=None))
    config = small_config()
    config.model.name = "mine"
    with pytest.raises(ConfigError, match=re.escape("models/mine.py lacks hidden_units, which every model has")):
        models.model_module(config)


def test_what_reads_a_run_of_experts_drops_no_token():
    config = small_config()
    config.mesh.update(context=1, data=8)
    config.model.num_experts = 4
    run = assembly.assemble(config)
    assert run.dropless() is run
    config.model.expert_capacity, config.mesh.data = 1.5, 1
    found = assembly.assemble(config, devices=jax.devices()[:1]).dropless()
    assert found.config.model.expert_capacity == 0 and found.mesh.size == 1


def test_the_forward_pass_of_a_frozen_reference_counts_among_the_flops():
    config = small_config()
    config.mesh.context = 1
    plain = assembly.assemble(config, devices=jax.devices()[:1]).flops_per_token
    config.train.objective = "dpo"
    assert assembly.assemble(config, devices=jax.devices()[:1]).flops_per_token == pytest.approx(plain * 4 / 3)


def test_an_objective_whose_filter_finds_no_parameter_is_refused():
    """It would else train nothing, to the last step."""

    class Nothing(LanguageModeling):
        trainable = nnx.PathContains("heads")

    config = small_config()
    objective = Nothing(**vars(language_modeling.make(config)))
    with pytest.raises(ConfigError, match=r"no parameter of model.name=decoder_lm is trained, since `trainable`"):
        models.build(config, one_device_mesh(), objective)


def test_a_model_without_a_cache_is_not_evaluated_in_parts(monkeypatch):
    monkeypatch.delattr(decoder_lm.DecoderLM, "empty_cache")
    config = small_config()
    assembly.assemble(config)
    config.evaluation.chunk_tokens = 8
    with pytest.raises(ConfigError, match=r"^evaluation\.chunk_tokens=8 needs the empty_cache of a model, which mod"):
        assembly.assemble(config)


@pytest.mark.parametrize(
    ("module", "name", "says"),
    [
        (schedules, "constant", "optimizer.schedule=constant returned 'wrong'; it must return a function of the step"),
        (optimizers, "sgd", "optimizer.name=sgd returned 'wrong'; it must return an optax.GradientTransformation"),
        (decoder_lm, "hidden_units", "hidden_units of models/decoder_lm.py returned 'wrong'; it must return a tuple"),
        (decoder_lm, "make", "make of models/decoder_lm.py returned 'wrong'; it must return an nnx.Module"),
        (decoder_lm, "flops_per_token", "flops_per_token of models/decoder_lm.py returned 'wrong'; it must return a n"),
        (language_modeling, "make", "make of objectives/language_modeling.py returned 'wrong'; it must return an"),
        (guard, "make", "make of training.transforms.guard returned 'wrong'; it must return None or a StepTrans"),
    ],
)
def test_what_an_addition_returns_is_checked_by_its_name(monkeypatch, module, name, says):
    monkeypatch.setattr(module, name, lambda *_, **__: "wrong")
    with pytest.raises(TypeError) as error:
        assembly.assemble(small_config())
    assert str(error.value).startswith(says)


def test_a_learning_rate_that_is_not_a_number_is_named(monkeypatch):
    monkeypatch.setattr(schedules, "constant", lambda config, num_steps: lambda step: jnp.ones(1) * step)
    with pytest.raises(TypeError, match=r"^optimizer\.schedule=constant for a step returned .*must return a number$"):
        assembly.assemble(small_config())


def test_an_optimizer_whose_updates_have_other_shapes_is_named(monkeypatch):
    """They would broadcast: one number for a whole weight."""
    sums = optax.stateless(lambda gradients, params: jax.tree.map(lambda g: g.sum(keepdims=True), gradients))
    monkeypatch.setattr(optimizers, "sgd", lambda config, weights: sums)
    run = assembly.assemble(small_config())
    with mesh_context(run.mesh), pytest.raises(TypeError, match=r"^optimizer\.name=sgd returned updates of other shap"):
        jax.eval_shape(run.train_step, run.abstract_state, run.abstract_batch)


@pytest.mark.parametrize(
    ("first", "grow", "said"),
    [
        (jnp.zeros(1), lambda k: jnp.append(k, 1.0), r"float32\[2\], where float32\[1\] is expected"),
        (jnp.int32(0), lambda k: k + 1.0, r"~?float32\[\], where int32\[\] is expected"),
    ],
)
def test_an_optimizer_whose_state_changes_its_shape_or_type_is_named(monkeypatch, first, grow, said):
    """The second step would fail with an error of jax that names neither."""
    grows = optax.GradientTransformation(
        lambda params: {"k": first}, lambda updates, state, params: (updates, {"k": grow(state["k"])})
    )
    monkeypatch.setattr(optimizers, "sgd", lambda config, weights: grows)
    run = assembly.assemble(small_config())
    with mesh_context(run.mesh), pytest.raises(TypeError, match=rf"^optimizer\.name=sgd returned a state: k is {said}"):
        jax.eval_shape(run.train_step, run.abstract_state, run.abstract_batch)


def test_adapters_that_an_objective_does_not_add_are_refused(monkeypatch):
    """All weights would be trained without a word."""
    monkeypatch.setitem(sys.modules, "objectives.counting", counting_objective())
    config = small_config(objective="counting")
    config.lora.rank = 2
    with pytest.raises(ConfigError, match=r"^lora\.rank=2 has no effect: train\.objective=counting adds no nnx"):
        assembly.assemble(config)


def test_a_model_that_does_not_count_frozen_weights_is_named(monkeypatch):
    monkeypatch.setattr(decoder_lm, "flops_per_token", lambda config, length: 7)
    assert models.flops_per_token(small_config(), 8) == 7
    with pytest.raises(ConfigError, match=r"^flops_per_token of models/decoder_lm\.py got an unexpected .*'frozen'"):
        models.flops_per_token(small_config(), 8, frozen=True)


def test_figures_of_numpy_and_lists_of_units_are_taken_from_a_model(monkeypatch):
    config, usual = small_config(), decoder_lm.hidden_units
    monkeypatch.setattr(decoder_lm, "hidden_units", lambda *given: list(usual(*given)))
    monkeypatch.setattr(decoder_lm, "flops_per_token", lambda *_, **__: np.int64(7))
    assert models.flops_per_token(config, 8) == 7
    assert models.hidden_units(config) == usual(config.model)


def test_a_data_source_that_does_not_exist_is_named_before_anything_is_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(start, "fit_batch", lambda *_: pytest.fail("it compiles"))
    config = small_config()
    config.data.source, config.batch.fit = "documnts", "auto"
    with pytest.raises(DataError, match=r"^data\.source=documnts does not exist; use one"):
        train.train(config, tmp_path)


def test_the_parameters_of_a_token_are_those_of_its_experts_and_of_all_else():
    config = small_config()
    config.mesh.context = 1
    config.model.update(num_experts=8, experts_per_token=2, shared_experts=1)
    models = assembly.assemble(config, devices=jax.devices()[:1]).models
    assert models.num_parameters - models.num_active(config.model) == 6 * 3 * 16 * 24, "6 of 8 experts are idle"
    config.model.update(num_experts=0, shared_experts=0)
    models = assembly.assemble(config, devices=jax.devices()[:1]).models
    assert models.num_active(config.model) == models.num_parameters
