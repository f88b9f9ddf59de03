# SPDX-License-Identifier: Apache-2.0
"""The names of the Valkyrie guide do here what they say."""

import gc
import json
import logging
import math
import os
import re
import subprocess
import sys
import time

import jax
import numpy as np
import optax
import pytest

from configs.errors import ConfigError
from migration import guides, valkyrie
from parallelism.mesh import mesh_context
from settings import loading
from settings.keys import flat
from tests import groups, warm
from tests.support import ROOT, assert_close, forward, packed_batch

GUIDE = dict(
    vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, intermediate_size=11008, max_seq_len=2048,
    use_flash_attention=True,
)  # fmt: skip
SMALL = dict(vocab_size=38, hidden_size=48, num_layers=2, num_heads=4, intermediate_size=96, max_seq_len=30)


@pytest.fixture
def mesh(monkeypatch):
    """A mesh of three axes over the eight devices of this process, as the environment names them."""
    monkeypatch.setenv("TPU_MESH_CONFIG", "2,2,2")
    monkeypatch.setenv("TPU_AXIS_NAMES", "data,model,fsdp")
    return valkyrie.setup_tpu_mesh(device_count=32, use_global=True, validate=True)


def sizes(mesh) -> dict[str, int]:
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def test_the_mesh_is_that_of_the_environment_in_its_order(mesh):
    assert sizes(mesh) == {"data": 2, "model": 2, "fsdp": 2} and list(sizes(mesh)) == ["data", "model", "fsdp"]


def test_without_the_environment_the_mesh_is_the_nearest_to_that_of_the_guide(monkeypatch):
    monkeypatch.delenv("TPU_MESH_CONFIG", raising=False)
    assert sizes(valkyrie.setup_tpu_mesh(8)) == {"data": 2, "model": 2, "fsdp": 2}
    assert sizes(valkyrie.setup_tpu_mesh(4, use_global=False, validate=False)) == {"data": 2, "model": 2}
    for arguments in ({}, {"validate": False}, {"device_count": 16}):
        with pytest.raises(ConfigError, match=r"TPU_MESH_CONFIG=4,\d,2 needs .* there are 8; .*on 8 devices use 2,2,2"):
            valkyrie.setup_tpu_mesh(**arguments)
    with pytest.raises(ConfigError, match="there are 8"):
        valkyrie.setup_tpu_mesh(4)
    with pytest.raises(ConfigError, match="device_count=-1 must be 1 or more"):
        valkyrie.setup_tpu_mesh(-1)


def test_the_configuration_of_the_guide_is_the_7b_model_and_nothing_of_it_is_allocated(mesh):
    gc.disable()  # so that arrays that other tests left stay; to collect them takes seconds
    try:
        before = len(jax.live_arrays())
        run = valkyrie.create_train_step(config=valkyrie.ValkyrieConfig(**GUIDE), mesh=mesh).run
        assert len(jax.live_arrays()) == before
    finally:
        gc.enable()
    assert run.models.num_parameters == 6_738_415_616
    assert (run.config.train.sequence_length, run.config.model.dtype) == (2048, "bfloat16")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"use_flash_attention": False},
            "use_flash_attention=False is not supported: on a TPU",
        ),
        ({"use_s5": True}, "use_s5=True is not supported: Torus has no state-space layers"),
        ({"attention_dropout": 0.1}, "attention_dropout=0.1 is not supported"),
        ({"num_heads": 7}, "model.embed_dim=48 is not a multiple of model.num_heads=7"),
        ({"dropout_rate": 1.5}, "model.dropout=1.5 must"),
        ({"rope_theta": math.nan}, "model.rope_theta=nan must"),
    ],
)
def test_what_cannot_be_configured_is_told_in_one_line(arguments, message):
    with pytest.raises(ConfigError) as error:
        valkyrie.ValkyrieConfig(**SMALL | arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"model": object()},
            "model=object is not supported: give a ValkyrieModel, or a name",
        ),
        ({"model": valkyrie.ValkyrieModel(valkyrie.ValkyrieConfig())}, "other sizes than config"),
        ({"optimizer": "adam"}, "did you mean adamw"),
        ({"optimizer": object()}, "optimizer=object is not supported: give a GradientTransformation, or a name"),
        ({"use_3d_mesh": False}, "the mesh determines the number of axes"),
        ({"mesh": (4, 2, 1)}, "mesh=tuple is not supported: give what setup_tpu_mesh returned"),
        ({"mesh": jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])}, "layout.axis_order=x must be dcn_data and"),
        ({"config": None}, "config=NoneType is not supported: give what ValkyrieConfig returned"),
        ({"config": {"hidden_size": 48}}, "config=dict is not supported: give what ValkyrieConfig returned"),
    ],
)
def test_other_objects_are_refused_in_a_line(mesh, arguments, message):
    config = valkyrie.ValkyrieConfig(**SMALL)
    before = flat(config)
    with pytest.raises(ConfigError, match=message):
        valkyrie.create_train_step(**{"config": config, "mesh": mesh} | arguments)
    assert flat(config) == before, "a mistake that is refused does not stay"


@pytest.mark.slow
def test_a_step_learns_eight_sequences_by_heart_and_deletes_what_it_was_given(mesh):
    """In bfloat16 where products are; in float32 the loss is by hand, below."""
    config = valkyrie.ValkyrieConfig(**SMALL)
    config.train.update(steps=300, global_batch=8)
    config.optimizer.update(learning_rate=5e-3, warmup_steps=10)
    step = valkyrie.create_train_step(
        model="decoder_lm", optimizer="adamw", config=config, mesh=mesh, mixed_precision=True,
        use_2d_sharding=True, use_3d_mesh=True,
    )  # fmt: skip
    first, batch, started = step.init(), packed_batch([[30]] * 8, 30, 38), time.monotonic()
    state, metrics = step(first, batch)
    given = jax.tree.leaves((first.params, first.optimizer))
    assert all(leaf.is_deleted() for leaf in given) and len(given) > 20
    while float(metrics["loss"]) >= 0.05 and int(state.step) < 300:
        state, metrics = step(state, batch)
    assert float(metrics["loss"]) < 0.05 and time.monotonic() - started < 60
    assert {leaf.dtype for leaf in jax.tree.leaves(state.params)} == {np.dtype(np.float32)}


PROGRAM = """
from migration import valkyrie
found = valkyrie.setup_multi_host_environment()
assert found == valkyrie.setup_multi_host_environment()
mesh = valkyrie.setup_tpu_mesh(found["global_devices"])
import json, sys
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
rows = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
if sys.argv[1:] == [str(found["process_index"])]:
    raise KeyError("planted")
array = jax.make_array_from_callback((8,), rows, lambda index: np.arange(8.0)[index])
total = jax.jit(lambda x: x.sum(), out_shardings=NamedSharding(mesh, PartitionSpec()))(array)
print(json.dumps(found | {"total": float(total)}))
"""


def test_processes_find_each_other_and_add_up_over_one_mesh(tmp_path):
    answers = []
    for status, out, err in groups.finish(groups.start(["-c", PROGRAM], count=2, cache=tmp_path)):
        assert status == 0, err
        answers.append(json.loads(out.strip().splitlines()[-1]))
    assert len({answer.pop("coordinator") for answer in answers}) == 1
    common = {"process_count": 2, "local_devices": 4, "global_devices": 8, "total": 28.0}
    assert answers == [{"process_index": number} | common for number in range(2)]


@pytest.mark.parametrize("failing", [0, 1])
def test_one_that_fails_ends_the_others_who_quote_it(tmp_path, failing):
    """The one that fails ends with its own error: jax would wait for the others for minutes, and say that they died."""
    began = time.monotonic()
    ended = groups.finish(groups.start(["-c", PROGRAM, str(failing)], count=2, cache=tmp_path))
    assert [status for status, _, _ in ended] == [1, 1] and time.monotonic() - began < 100
    assert [err.strip().splitlines()[-1].endswith("KeyError: 'planted'") for _, _, err in ended] == [True, True]


@pytest.mark.slow
def test_alone_it_simulates_the_mesh_of_the_environment(tmp_path):
    environment = groups.environment(0, 0, 1, 1, tmp_path)
    environment = {name: value for name, value in environment.items() if not name.startswith("JAX_")}
    program = (
        "from migration import valkyrie as v; v.setup_multi_host_environment(); print(dict(v.setup_tpu_mesh().shape))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environment | {"TPU_MESH_CONFIG": "4,4,2"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "{'dcn_data': 1, 'data': 4, 'model': 4, 'fsdp': 2, 'context': 1, 'expert': 1}" in done.stdout


def test_the_loss_of_three_tokens_is_the_one_by_hand(mesh):
    config = valkyrie.ValkyrieConfig(**SMALL)
    config.train.global_batch = 8
    step = valkyrie.create_train_step(config=config, mesh=mesh, mixed_precision=False)
    batch = packed_batch([[3], *[[]] * 7], 30, 38)
    with mesh_context(mesh):
        params = step.init().params
        logits = np.asarray(forward(step.run.graph, params, batch), np.float64)[0, :3]
        total, weight = step.run.eval_step(params, batch)["loss"]
    by_hand = np.log(np.exp(logits).sum(-1)) - logits[np.arange(3), batch["targets"][0, :3]]
    assert float(weight) == 3
    assert_close(total, by_hand.sum())


@pytest.mark.slow
def test_an_optimizer_of_optax_gets_the_gradient_and_nothing_else_changes_the_weights(mesh):
    config = valkyrie.ValkyrieConfig(**SMALL)
    config.train.global_batch = 8
    step = valkyrie.create_train_step(
        model=valkyrie.ValkyrieModel(config), optimizer=optax.sgd(0.5, momentum=0.9), config=config, mesh=mesh,
        mixed_precision=False, use_2d_sharding=True, use_3d_mesh=True,
    )  # fmt: skip
    batch, state = packed_batch([[30]] * 8, 30, 38), step.init()
    before = jax.tree.map(np.asarray, state.params)

    @jax.jit
    def loss_on_one_device(params):
        likelihoods = jax.nn.log_softmax(forward(step.run.graph, params, batch))
        return -jax.numpy.take_along_axis(likelihoods, batch["targets"][..., None], -1).mean()

    gradient = jax.grad(loss_on_one_device)(before)
    state, metrics = step(state, batch)
    trace = state.optimizer[0].trace
    assert_close(trace, gradient)
    assert_close(state.params, jax.tree.map(lambda weight, slope: weight - 0.5 * slope, before, gradient))
    assert np.isnan(metrics["learning_rate"])
    for moment, weight in zip(jax.tree.leaves(trace), jax.tree.leaves(state.params), strict=True):
        assert moment.sharding == weight.sharding
    assert len({shard.device for shard in max(jax.tree.leaves(trace), key=np.size).addressable_shards}) == 8


@pytest.mark.slow
def test_what_follows_an_optimizer_follows_the_callers_too(mesh):
    config = valkyrie.ValkyrieConfig(**SMALL)
    config.train.global_batch = 8
    config.optimizer.ema_decay = 0.75
    step = valkyrie.create_train_step(optimizer=optax.sgd(0.5), config=config, mesh=mesh)
    state = step.init()
    before = jax.tree.map(np.asarray, state.params)
    state, _ = step(state, packed_batch([[30]] * 8, 30, 38))
    after, average = jax.device_get((state.params, state.eval_params))
    assert not np.array_equal(jax.tree.leaves(before)[0], jax.tree.leaves(after)[0])
    assert_close(average, jax.tree.map(lambda old, new: 0.75 * old + 0.25 * new, before, after))


THE_GUIDE = """
import optax
from src.model.config import ValkyrieConfig, ValkyrieModel
from src.sharding.distributed_init import setup_multi_host_environment
from src.sharding.mesh_setup import setup_tpu_mesh
from src.train.step_fn import create_train_step

setup_multi_host_environment()
mesh = setup_tpu_mesh(device_count=32, use_global=True, validate=True)
config = ValkyrieConfig(
    vocab_size=32000, hidden_size=4096, num_layers=32, num_heads=32, intermediate_size=11008, max_seq_len=2048,
    use_flash_attention=True,
)
model = ValkyrieModel(config)
optimizer = optax.adamw(3e-4)
train_step = create_train_step(
    model=model, optimizer=optimizer, config=config, mesh=mesh, mixed_precision=True, use_2d_sharding=True,
    use_3d_mesh=True,
)

import json, jax
weights = jax.tree.leaves(train_step.run.abstract_state.params)
held = [weight.dtype.itemsize * jax.numpy.prod(jax.numpy.array(weight.sharding.shard_shape(weight.shape))).item()
        for weight in weights]
print(json.dumps({
    "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1}, "devices": len(set(mesh.devices.flat)),
    "parameters": sum(weight.size for weight in weights), "bytes_of_a_device": sum(held),
}))
"""


def of_the_guide(tmp_path, **variables: str) -> dict[str, str]:
    """Return the environment of a machine without accelerator in which the guide's variables are set."""
    environment = {name: value for name, value in groups.simulated(1, tmp_path).items() if not name.startswith("TPU_")}
    return environment | {"TMPDIR": str(tmp_path)} | variables


@pytest.mark.slow
@pytest.mark.parametrize(("sizes", "devices"), [("4,4,2", 32), ("4,2,2", 16)])
def test_the_snippets_of_the_guide_place_the_7b_model_on_its_mesh(tmp_path, sizes, devices):
    variables = {"TPU_MESH_CONFIG": sizes, "TPU_AXIS_NAMES": "data,model,fsdp", "JAX_PLATFORMS": "tpu"}
    process = warm.start(["-c", THE_GUIDE], of_the_guide(tmp_path, **variables), ordinary=devices == 32)
    out, err = process.communicate(timeout=groups.SECONDS)
    assert process.returncode == 0, err
    found = json.loads(out.splitlines()[-1])
    data, model, fsdp = map(int, sizes.split(","))
    assert found["mesh"] == {"data": data, "model": model, "fsdp": fsdp} and found["devices"] == devices
    assert found["parameters"] == 6_738_415_616
    assert found["bytes_of_a_device"] == pytest.approx(4 * 6_738_415_616 / (model * fsdp), rel=1e-3)  # not norms
    assert "JAX_PLATFORMS=tpu, but this machine has no TPU; its devices are simulated" in err


@pytest.mark.slow
def test_the_command_of_the_guide_trains_from_any_python(tmp_path):
    """A Python without packages, the line of the guide, and flags that keep a simulation short."""
    talks = [json.dumps({"text": f"{number} and {number + 1} are {2 * number + 1}. " * 4}) for number in range(40)]
    (tmp_path / "sums.jsonl").write_text("\n".join(talks))
    short = (
        "--config.model.num_layers=1", "--config.optimizer.name=sgd", "--config.train.steps=2",
        "--config.train.log_every=1", "--config.train.eval_every=0", f"--config.data.path={tmp_path / 'sums.jsonl'}",
        "--config.data.tokenizer=byte", "--config.evaluation.sample_tokens=0", "--config.train.loss_chunk_tokens=0",
        "--config.model.remat=none", "--config.model.vocab_size=260", "--config.train.sequence_length=32",
        "--config.logging.report=false", "--config.logging.tensorboard=false",
    )  # fmt: skip
    command = [sys._base_executable, "-m", "src.train.main", "--config", "configs/tpu_v4_32.yaml"]
    done = subprocess.run(
        [*command, f"--workdir={tmp_path / 'run'}", *short], cwd=ROOT, capture_output=True, text=True,
        env=of_the_guide(tmp_path, JAX_PLATFORMS="tpu"), timeout=groups.SECONDS,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "Global devices: 16" in done.stdout and "Mesh: data=4 * model=2 * fsdp=2" in done.stdout
    losses = re.findall(r"- INFO - step [12]/2  loss ([\d.]+)", (tmp_path / "training.log").read_text())
    assert len(losses) == 2 and all(4 < float(loss) < 7 for loss in losses)  # log(260) is 5.56
    assert (tmp_path / "run" / "checkpoints" / "2").is_dir()


def recipe(file):
    return valkyrie.configuration(guides.read_file(file, valkyrie.FILE), str(file))


@pytest.fixture
def yaml(monkeypatch):
    """YAML files are recipes, as in the command of the guide."""
    monkeypatch.setitem(loading.READERS, ".yaml", recipe)


def test_the_yaml_file_is_a_recipe(yaml):
    """Typed keys and the mesh of the environment take precedence over it, as over a recipe in Python."""
    config = loading.load(valkyrie.FILE, "", {}).config
    wanted = valkyrie.ValkyrieConfig(**GUIDE)
    wanted.update_from_flattened_dict({
        "train.steps": 100_000, "train.global_batch": 32, "train.gradient_accumulation": 1,
        "train.eval_every": 1000, "train.save_every": 1000, "train.log_every": 10, "optimizer.weight_decay": 0.1,
        "optimizer.warmup_steps": 2000, "optimizer.learning_rate": 3e-4,
    })  # fmt: skip
    assert flat(config) == flat(wanted)
    config = loading.load(valkyrie.FILE, "", {"train.steps": "7"}, {"TPU_MESH_CONFIG": "4,4,2"}).config
    assert (config.train.steps, config.mesh.data, config.mesh.model, config.mesh.fsdp) == (7, 4, 4, 2)


def test_every_name_of_the_yaml_file_sets_its_key(tmp_path):
    """Other values than those of configs/llama2_7b.py, which the shipped file has."""
    model = {"vocab_size": 64, "hidden_size": 96, "num_layers": 3, "num_heads": 6, "intermediate_size": 80}
    training = {
        "batch_size": 48, "gradient_accumulation_steps": 2, "max_steps": 71, "learning_rate": 0.5, "warmup_steps": 7,
        "weight_decay": 0.3, "log_every": 13, "eval_every": 17, "save_every": 19,
    }  # fmt: skip
    content = {"model": model | {"max_seq_len": 40, "dropout_rate": 0.2, "rope_theta": 5.0}, "training": training}
    (tmp_path / "mine.yaml").write_text(json.dumps(content))
    values = flat(recipe(f"{tmp_path}/mine.yaml"))
    names = (
        "vocab_size", "embed_dim", "num_layers", "num_heads", "mlp_dim", "max_length", "dropout", "rope_theta",
        "num_kv_heads",
    )  # fmt: skip
    assert [values[f"model.{name}"] for name in names] == [64, 96, 3, 6, 80, 40, 0.2, 5.0, 6]
    names = (
        "train.global_batch", "train.gradient_accumulation", "train.steps", "optimizer.learning_rate",
        "optimizer.warmup_steps", "optimizer.weight_decay", "train.log_every", "train.eval_every", "train.save_every",
    )  # fmt: skip
    assert [values[name] for name in names] == list(training.values()) and values["train.sequence_length"] == 40


def test_numbers_in_a_yaml_file_may_be_written_in_any_way(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {rope_theta: 50000, dropout_rate: 0}\ntraining: {learning_rate: 3e-4}")
    config = recipe(f"{tmp_path}/mine.yaml")
    assert (config.model.rope_theta, config.model.dropout, config.optimizer.learning_rate) == (50_000, 0, 3e-4)


def test_keys_of_torus_may_stand_in_a_yaml_file(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {num_heads: 8, num_kv_heads: 2}\ntrain: {sequence_length: 512}")
    config = recipe(f"{tmp_path}/mine.yaml")
    assert (config.model.num_kv_heads, config.train.sequence_length, config.model.max_length) == (2, 512, 2048)


def test_the_yaml_file_says_the_mesh_that_no_variable_says(monkeypatch):
    for name in ("TPU_MESH_CONFIG", "TPU_AXIS_NAMES", "JAX_PLATFORMS"):
        monkeypatch.setenv(name, "")
    words = ["--config", valkyrie.FILE]
    assert valkyrie.arguments([*words, "--topology=v4-8"]) == [*words, "--topology=v4-8"]
    assert not os.environ["TPU_MESH_CONFIG"]
    assert valkyrie.arguments([*words, "--workdir", "here"]) == [*words, "--workdir", "here"]
    assert (os.environ["TPU_MESH_CONFIG"], os.environ["TPU_AXIS_NAMES"]) == ("4,2,2", "data,model,fsdp")
    assert valkyrie.arguments(["--config=configs/tiny.py"]) == ["--config=configs/tiny.py"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: {hidden_sise: 8}", "model.hidden_sise is not a key; did you mean model.hidden_size"),
        ("model: {hidden_size: big}", "model.hidden_size=big is not a whole number"),
        ("model: {hidden_size: true}", "model.hidden_size=True is not a whole number"),
        ("model: {3: 4}", "model.3 is not a key"),
        ("training: {max_steps: many}", "training.max_steps=many is not a whole number"),
        ("training: {steps: 3}", "training.steps is not a key; did you mean train.steps"),
        ("trainer: {max_steps: 3}", "trainer.max_steps is not a key; did you mean training.max_steps"),
        ("model: [", "cannot be read"),
        ("- 3", "has no keys"),
        ("model: {use_s5: true}", "model.use_s5=True is not supported"),
        ("model: {num_heads: 7}", "model.embed_dim=4096 is not a multiple of model.num_heads=7"),
        (None, "is not a file; configs/tpu_v4_32.yaml is one"),
    ],
)
def test_a_mistake_in_a_yaml_file_is_told_in_one_line(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    if text:
        file.write_text(text)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        recipe(str(file))
    assert "mine.yaml" in str(error.value) and "\n" not in str(error.value)


@pytest.fixture
def log():
    """The log of a run; handlers are put back."""
    log = logging.getLogger("torus")
    before = list(log.handlers)
    yield log
    for handler in set(log.handlers) - set(before):
        handler.stream.close()
    log.handlers = before


def test_the_log_of_a_run_goes_to_tmp_too(monkeypatch, tmp_path, log):
    (tmp_path / "training.log").write_text("of an earlier run\n")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    valkyrie.log_to_tmp()
    log.error("step 1")
    first, second = (tmp_path / "training.log").read_text().splitlines()
    assert first == "of an earlier run" and second.endswith("- ERROR - step 1")


@pytest.mark.parametrize("kind", ["no folder", "folder", "link", "pipe"])
def test_a_log_in_tmp_that_cannot_be_written_is_a_note(monkeypatch, tmp_path, log, capsys, kind):
    path = tmp_path / "training.log"
    match kind:
        case "no folder":
            path = tmp_path / "missing" / "training.log"
        case "folder":
            path.mkdir()
        case "link":
            path.symlink_to(tmp_path / "of_another")
        case "pipe":
            os.mkfifo(path)
    monkeypatch.setenv("TMPDIR", str(path.parent))
    before = list(log.handlers)
    valkyrie.log_to_tmp()
    assert f"Note: {path} is not written (" in capsys.readouterr().err
    assert log.handlers == before and not (tmp_path / "of_another").exists()
