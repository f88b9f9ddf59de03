# SPDX-License-Identifier: Apache-2.0
"""The names of the Valkyrie guide do here what they say."""

import gc
import json
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from configs.errors import ConfigError
from migration import valkyrie
from parallelism.mesh import mesh_context
from tests import groups
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


def test_the_configuration_of_the_guide_is_the_7b_model_and_nothing_of_it_is_allocated(mesh):
    gc.collect()  # of arrays of other tests
    before = len(jax.live_arrays())
    run = valkyrie.create_train_step(config=valkyrie.ValkyrieConfig(**GUIDE), mesh=mesh).run
    assert run.models.num_parameters == 6_738_415_616
    assert (run.config.train.sequence_length, run.config.model.dtype) == (2048, "bfloat16")
    assert len(jax.live_arrays()) == before


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
    ],
)
def test_what_cannot_be_configured_is_told_in_one_line(arguments, message):
    with pytest.raises(ConfigError) as error:
        valkyrie.ValkyrieConfig(**SMALL | arguments)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"model": object()}, "model=object is made from the configuration here; give its name"),
        ({"optimizer": "adam"}, "did you mean adamw"),
        ({"use_3d_mesh": False}, "the mesh determines the number of axes"),
    ],
)
def test_a_step_is_made_of_names(mesh, arguments, message):
    with pytest.raises(ConfigError, match=message):
        valkyrie.create_train_step(config=valkyrie.ValkyrieConfig(**SMALL), mesh=mesh, **arguments)


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
if sys.argv[1:] == ["fail"] and found["process_index"] == 1:
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


def test_one_that_fails_ends_the_others_who_quote_it(tmp_path):
    first, second = groups.finish(groups.start(["-c", PROGRAM, "fail"], count=2, cache=tmp_path))
    assert second[0] == 1 and "KeyError: 'planted'" in second[2]
    assert first[0] == 1 and "KeyError: 'planted'" in first[2].strip().splitlines()[-1]


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
