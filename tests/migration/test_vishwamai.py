# SPDX-License-Identifier: Apache-2.0
"""What VishwamAI's guide says to type does here what it says: keys, mesh, trainer, distillation, profiler, pipeline."""

import json
import os
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from configs import tpu_optimized
from configs.errors import ConfigError
from migration import guides
from migration.vishwamai import keys
from migration.vishwamai.device_mesh import TPUMeshContext
from settings import loading
from settings.keys import flat
from tests import warm
from tests.support import ROOT, write_sums
from tests.test_train import lines_of

YAML = "configs/tpu_optimized_config.yaml"
MESH = {
    "training": {"data_parallel": True, "model_parallel": True, "pipeline_parallel": False},
    "tpu": {"tpu_cores": 8, "tpu_topology": "2x2x2"},
}


def refused(message: str, act) -> None:
    with pytest.raises(ConfigError, match=message) as error:
        act()
    assert "\n" not in str(error.value)


# B1 to B9, B23: the YAML file


def test_the_yaml_file_is_the_recipe_in_python():
    file = guides.read_file(YAML, YAML)
    config = keys.recipe(file)
    assert flat(config) == flat(tpu_optimized.get_config())
    model, train = config.model, config.train
    assert (model.num_layers, model.embed_dim, model.num_heads, model.num_kv_heads) == (24, 768, 12, 4)
    assert (config.batch.first, train.global_batch, train.gradient_accumulation) == (8 * 4 * 8, 32 * 4 * 8, 16)
    assert (config.batch.ramp, config.batch.increase_step, config.batch.increase_factor) == ("steps", 2000, 1.2)
    assert config.optimizer.learning_rate == 1e-4  # which PyYAML reads as a text


def test_without_growth_the_batch_is_that_of_the_guide():
    config = keys.recipe({"training": {"initial_batch_size": 8, "gradient_accumulation_steps": 4}})
    assert (config.train.global_batch, config.train.gradient_accumulation) == (256, 4)
    wide = keys.recipe({"training": {"initial_batch_size": 8}, "tpu": {"tpu_cores": 32}})
    assert wide.train.global_batch == 8 * 4 * 32


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"model": {"use_gqa": False, "num_key_value_heads": 2}}, {"model.num_kv_heads": 8}),
        ({"model": {"use_flash_attention": False}}, {"model.attention": "reference"}),
        ({"model": {"gradient_checkpointing": True}}, {"model.remat": "full"}),
        ({"training": {"train_steps": 7, "error_correction_weight": 0.3}}, {"train.steps": 7}),
        ({"use_error_correction": True}, {"train.objective": "error_correction", "error_correction.joint_weight": 0.4}),
        ({"tot": {"search_strategy": "mcts"}, "tokenizer": {"path": "byte"}}, {"tot.search": "mcts"}),
        ({"model": {"use_tot": True}, "data": {"source": "countdown"}}, {"tot.use_tot": True}),
        ({"data": {"num_workers": 3, "val_split": 0.2}}, {"data.readers": 3, "data.holdout_fraction": 0.2}),
        ({"data": {"source": "countdown"}, "train": {"global_batch": 24}}, {"train.global_batch": 24}),
    ],
)  # fmt: skip
def test_keys_of_the_guide_set_ours_and_ours_keep_their_names(given, expected):
    values = flat(keys.recipe(given))
    assert {key: values[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"training": {"pipeline_parallel": True}}, "training.pipeline_parallel=True is not supported: mesh.fsdp a"),
        ({"model": {"use_alibi": True}}, "model.use_alibi=True is not supported: positions are rotary"),
        ({"model": {"hiden_size": 3}}, "model.hiden_size is not a key; did you mean model.hidden_size"),
        ({"trainig": {"max_steps": 3}}, "trainig.max_steps is not a key; did you mean training.max_steps"),
        (
            {"training": {"max_steps": 5}, "train": {"steps": 9}},
            "training.max_steps=5 and train.steps=9 are one key; leave out one",
        ),
        ({"training": {"max_steps": "soon"}}, "training.max_steps=soon is not a whole number"),
        ({"training": {"max_steps": None}}, "training.max_steps=None is not a whole number"),
        ({"training": {"dynamic_batch_size": 2}}, "training.dynamic_batch_size=2 is not true or false"),
        ({"training": {"dynamic_batch_size": True, "max_batch_size": 2}}, "=8 must lie between 1 and max_batch_size=2"),
        ({"training": {"dynamic_batch_size": True, "initial_batch_size": 0}}, "=0 must lie between 1 and max_batch_"),
        ({"training": {"initial_batch_size": 0}}, "config: train.global_batch=0 must"),
        ({"use_tot": True}, "config: tot.use_tot=True needs data.source=countdown"),
        ({"model": {"num_attention_heads": 7}}, "config: model.embed_dim=512 is not a multiple of model.num_heads=7"),
    ],
)  # fmt: skip
def test_what_a_configuration_cannot_have_is_one_line(given, message):
    refused(message, lambda: keys.recipe(given))


def test_a_key_without_counterpart_is_answered_in_a_line():
    asked = {key: True for key, instead in keys.KEYS.noted.items() if instead}
    assert len(keys.notes(asked)) == len(asked) > 5
    assert keys.notes({"model": {"use_dualpipe": True, "use_eplb": False}}) == [
        "Note: model.use_dualpipe is not used here: layers are not pipelined; collectives overlap with computation "
        "under mesh.fsdp\n"
    ]
    keys.recipe(asked)


@pytest.mark.parametrize("text", ["a: [", "- 1", "a: &x 1\nb: *x", "\x00"])
def test_a_damaged_file_is_one_line(text, tmp_path):
    (tmp_path / "bad.yaml").write_text(text)
    refused("bad.yaml", lambda: guides.read_file(f"{tmp_path}/bad.yaml", YAML))


def test_arguments_become_those_of_train(tmp_path, monkeypatch):
    monkeypatch.delenv("TPU_MESH_CONFIG", raising=False)
    typed = ["--config", YAML, "--profile", "--wandb"]
    assert keys.arguments(typed) == [
        "--config", YAML, "--profile=10:14", "--config.logging.wandb=true", "--topology=v4-16",
    ]  # fmt: skip
    assert keys.arguments([f"--config={YAML}", "--topology=v4-8"])[1:] == ["--topology=v4-8"]
    (tmp_path / "mine.yaml").write_text("checkpoint_dir: here\ntpu: {tpu_cores: 32}")
    file = f"--config={tmp_path}/mine.yaml"
    assert keys.arguments([file]) == [file, "--workdir=here", "--topology=v4-64"]
    (tmp_path / "nowhere.yaml").write_text("checkpoint_dir:\ntpu: {tpu_cores: 32}")
    assert keys.arguments([f"--config={tmp_path}/nowhere.yaml"])[1:] == ["--topology=v4-64"]
    (tmp_path / "six.yaml").write_text("checkpoint_dir:\ntpu: {tpu_cores: 6}")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        assert keys.arguments([f"--config={tmp_path}/six.yaml"])[1:] == [], "no slice of v4 has six chips"
        assert (os.environ["TPU_MESH_CONFIG"], os.environ["TPU_AXIS_NAMES"]) == ("1,1,6", "data,model,fsdp")
    monkeypatch.setenv("TPU_MESH_CONFIG", "4,4,2")
    assert keys.arguments([file]) == [file, "--workdir=here"]
    assert keys.arguments([]) == [f"--config={keys.FILE}"]
    assert keys.arguments(["--config=configs/tiny.py"]) == ["--config=configs/tiny.py"]


@pytest.mark.slow
def test_the_command_trains_by_the_file_with_a_profile_from_any_python(tmp_path):
    """On the eight devices that the file counts with; the batch grows, and the log is that of the guide."""
    write_sums(tmp_path / "texts", 20)
    sizes = {
        "train.steps": 15, "train.global_batch": 32, "train.gradient_accumulation": 2, "batch.first": 16,
        "batch.increase_step": 8, "batch.increase_factor": 2, "model.num_layers": 1, "train.sequence_length": 16,
        "model.max_length": 16, "data.tokenizer": "byte", "model.vocab_size": 300, "data.path": f"{tmp_path}/texts/*",
        "data.cache_dir": f"{tmp_path}/cache", "evaluation.sample_tokens": 0, "evaluation.batches": 1,
        "logging.report": "false", "logging.tensorboard": "false",
    }  # fmt: skip
    typed = [f"--config.{key}={value}" for key, value in sizes.items()]
    done = subprocess.run(
        [f"{sys.base_prefix}/bin/python3", "optimize_train_tpu.py", "--config", YAML, "--profile",
         f"--workdir={tmp_path}/run", *typed],
        cwd=ROOT, env=environment_of_the_guide(), capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "v4-16 is 8 simulated CPU devices" in done.stdout and "Global devices: 8" in done.stdout
    run = tmp_path / "run"
    [trace] = run.rglob("*.xplane.pb")
    assert trace.parent.name == "steps-10-14" and json.loads((run / "profile.json").read_text())["steps"] == [10, 14]
    assert [line["global_batch"] for line in lines_of(run, "event").values() if "global_batch" in line] == [32]
    assert "- __main__ - INFO - Host memory usage: " in (run / "logs" / "train_worker_0.out").read_text()
    assert json.loads((run / "config.json").read_text())["optimizer.learning_rate"] == 1e-4
    assert json.loads((run / "run.json").read_text())["recipe"] == YAML


# B18: TPUMeshContext

SNIPPET = f"""
from vishwamai.device_mesh import TPUMeshContext
config = {MESH!r}
mesh_context = TPUMeshContext(config)
"""
MOVING = """
import jax, numpy as np
from jax.sharding import NamedSharding

def losses(reshape_after):
    mesh_context = TPUMeshContext(config)
    rng = np.random.default_rng(0)
    spec = mesh_context.optimal_sharding_strategy((256, 256), "weights")
    assert spec != () and dict(mesh_context.mesh.shape)["data"] == 8, spec
    x, y = (rng.normal(size=(32, 256)).astype(np.float32) for _ in range(2))
    weights = jax.device_put(np.zeros((256, 256), np.float32), NamedSharding(mesh_context.mesh, spec))
    state = {"w": weights, "n": np.zeros(())}

    @jax.jit
    def step(state):
        loss, slope = jax.value_and_grad(lambda w: ((x @ w - y) ** 2).mean())(state["w"])
        return {"w": state["w"] - 0.5 * slope, "n": state["n"] + 1}, loss

    found = []
    for number in range(6):
        if number == reshape_after:
            before = state
            state = mesh_context.dynamic_mesh_reshaping((4, 2, 2), state=state)
            assert before["w"].is_deleted() and state["w"].sharding.mesh == mesh_context.mesh
            sizes = dict(mesh_context.mesh.shape)
            assert (sizes["data"], sizes["model"], sizes["fsdp"]) == (4, 2, 2)
            assert len(state["w"].sharding.device_set) == 16
        state, loss = step(state)
        found.append(float(loss))
    return found

np.testing.assert_allclose(losses(3), losses(99), rtol=1e-5)
print("moved")
"""


def environment_of_the_guide(devices: str = "") -> dict[str, str]:
    """Only what the guide sets, which is nothing; what tests add makes programs quicker, and may simulate devices."""
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    others = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    return others | {"XLA_FLAGS": " ".join([*flags, devices])}


def run_snippet(program: str, devices: str = "") -> tuple[str, str]:
    process = warm.start(["-c", program], environment_of_the_guide(devices))
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    return out, err


@pytest.mark.slow
def test_the_snippet_on_its_eight_devices_says_which_shapes_fit_them():
    program = SNIPPET + (
        "print(mesh_context.optimal_sharding_strategy((1024, 1024), 'weights'))\n"
        "try:\n    mesh_context.dynamic_mesh_reshaping((4, 2, 2))\nexcept ValueError as error:\n    print(error)\n"
        "import jax; print(mesh_context.mesh.size, jax.device_count())"
    )
    done = subprocess.run(
        [f"{sys.base_prefix}/bin/python3", "-c", program], cwd=ROOT, env=environment_of_the_guide(), text=True,
        capture_output=True,
    )  # fmt: skip
    spec, line, count = done.stdout.splitlines()
    assert spec.startswith("P(") and "data" in spec
    assert "a mesh of (4, 2, 2) needs 16 devices" in line and "(2, 2, 2) or (4, 2, 1) or (8, 1, 1)" in line
    assert count == "8 8"


def test_the_snippet_reshapes_the_mesh_of_sixteen_devices_during_training():
    out, _ = run_snippet(SNIPPET + MOVING, "--xla_force_host_platform_device_count=16")
    assert out.endswith("moved\n")


def test_thirty_two_devices_have_a_mesh_of_the_three_axes():
    """Also where jax was imported first; nothing looks for a TPU then."""
    program = "import jax\n" + SNIPPET.replace("'tpu_cores': 8", "'tpu_cores': 32")
    out, err = run_snippet(program + "print(dict(mesh_context.dynamic_mesh_reshaping((4, 4, 2)).shape))")
    assert "'data': 4, 'model': 4, 'fsdp': 2" in out and not err


@pytest.mark.parametrize("kind", ["weights", "gradients", "optimizer", "activations"])
def test_a_strategy_splits_only_what_its_axes_divide(kind):
    context = TPUMeshContext(MESH)
    sizes = dict(context.mesh.shape)
    assert (sizes["data"], sizes["model"]) == (4, 2)
    rng = np.random.default_rng(0)
    for shape in rng.integers(120, 400, (20, 2)).tolist():
        spec = context.optimal_sharding_strategy(shape, kind)
        jax.sharding.NamedSharding(context.mesh, spec).shard_shape(tuple(shape))  # which raises if one does not divide
    assert context.optimal_sharding_strategy((64, 64), kind) == PartitionSpec()
    assert context.optimal_sharding_strategy((1001, 1003), kind) == PartitionSpec(None, None)
    refused("did you mean weights", lambda: context.optimal_sharding_strategy((64, 64), "weigths"))


def test_a_state_that_the_new_mesh_does_not_divide_stays_where_it_is():
    context = TPUMeshContext(MESH)
    spec = PartitionSpec(("data", "fsdp"), None)
    state = jax.device_put(np.arange(12.0).reshape(4, 3), jax.sharding.NamedSharding(context.mesh, spec))
    before = context.mesh
    refused("state: ", lambda: context.dynamic_mesh_reshaping((4, 1, 2), state=state))
    assert context.mesh == before and not state.is_deleted()
    for shape in ((2, 2.0), (True, 4), "4", None, 8, np.array([2, 2.0])):
        refused("does not consist of whole numbers", lambda shape=shape: context.dynamic_mesh_reshaping(shape))
    refused("needs 4 devices", lambda: context.dynamic_mesh_reshaping(np.array([2, 2])))
    assert context.mesh == before
    refused("on at most 4 axes", lambda: context.dynamic_mesh_reshaping((2, 2, 2, 1, 1)))
    refused("has a size below 1", lambda: context.dynamic_mesh_reshaping((-2, -4)))
    assert context.config.mesh.data == before.shape["data"]
    refused("needs 16 devices", lambda: context.dynamic_mesh_reshaping((2, 2, 2, 2)))


def test_a_recipe_in_yaml_is_read_by_the_command_alone():
    assert ".yaml" not in loading.READERS
    refused("is not a Python file", lambda: loading.load(YAML, "", {}))
