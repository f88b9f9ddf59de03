# SPDX-License-Identifier: Apache-2.0
"""A run begins with the weights of another: of what, once, and what does not go together."""

import gc
import json
import shutil
import threading
import time

import jax
import numpy as np
import pytest
import safetensors.numpy

import train
from checkpointing import array_files
from checkpointing.checkpoints import CheckpointError, Checkpoints
from checkpointing.source_run import SourceRun, initial, restore_eval_params
from cluster.hub import RunError
from configs.errors import ConfigError
from core import assembly
from migration import hugging_face, logits, peft, safetensors_files
from parallelism.mesh import mesh_context
from settings import loading, stored_config
from settings.validation import validate
from tests.migration import hugging_face_cases as cases
from tests.migration.record_hugging_face import FOLDER
from tests.support import write_sums
from tests.test_train import command, finish, in_process, lines_of, own_batches


def small(**changes):
    """On the eight devices, with an average of the parameters."""
    usual = dict(model__vocab_size=64, optimizer__ema_decay=0.5, train__steps=2, train__save_every=0)
    config = in_process(**usual | changes)
    config.mesh.update(fsdp=1, context=8)
    return config


def trained(config, workdir, steps: int = 2):
    """Train on batches of our own, which no tokenizer made."""
    config.train.steps = steps
    train.train(config, workdir, own_batches(config, steps))


def evaluated(config, workdir) -> dict:
    """Return the parameters of a run's newest checkpoint that are evaluated."""
    run = assembly.assemble(config)
    with Checkpoints(workdir) as checkpoints, mesh_context(run.mesh):
        return jax.device_get(restore_eval_params(checkpoints, checkpoints.newest(), run.abstract_state.params))


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    trained(small(), folder)
    return folder


@pytest.fixture(scope="module")
def whole(base, tmp_path_factory):
    """A run that begins from a copy of the base, too slow to go anywhere; and its configuration."""
    folder = tmp_path_factory.mktemp("whole")
    shutil.copytree(base, folder / "copy")
    changes = dict(optimizer__name="lion", optimizer__ema_decay=0.0, optimizer__learning_rate=1e-12)
    config = small(train__init_from=str(folder / "copy"), **changes)
    validate(config, 8)
    trained(config, folder / "mine")
    return config, folder / "mine"


def test_a_run_begins_with_the_evaluated_parameters_of_another_and_goes_on_with_its_own(base, whole):
    """Its optimizer is another one, its first step is step 1, and where it goes on the other may be gone."""
    config, workdir = whole
    found, wanted = evaluated(config, workdir), evaluated(small(), base)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-9), found, wanted)
    assert sorted(lines_of(workdir, "train")) == [1, 2]
    shutil.rmtree(config.train.init_from)
    trained(config, workdir, steps=3)
    assert sorted(lines_of(workdir, "train")) == [1, 2, 3]
    config.train.init_from = str(base)
    with pytest.raises(
        CheckpointError, match=r"with train\.init_from=.*, now .* Use the same again, or a new --workdir"
    ):
        trained(config, workdir)


def test_a_folder_is_the_recipe_of_its_model(base):
    loaded = loading.load(str(base), "", {"train.steps": "7"})
    config = stored_config.load_to_read(base, {}).config
    assert loaded.config.model == config.model and loaded.config.data.tokenizer == config.data.tokenizer
    assert loaded.config.train.sequence_length == 32 and loaded.config.train.steps == 7
    assert loaded.config.train.global_batch == 32 and loaded.config.optimizer.ema_decay == 0  # as in configs/base.py
    assert loaded.origins["model.vocab_size"] == str(base / "config.json")


def test_where_no_recipe_is_typed_it_is_that_of_the_run_to_begin_from(base, tmp_path):
    """Of its copy in the workdir where that run is gone, which a run that was begun may go on without."""
    begun, gone = f"--workdir={tmp_path}", f"--config.train.init_from={tmp_path}/gone"
    for arguments, wanted, line in (
        ([f"--config.train.init_from={base}", begun], 0, f"model.mlp_dim = 48  ({base}/config.json)"),
        (
            [f"--config.train.init_from={base}", "--config=configs/char.py", begun],
            0,
            "model.mlp_dim = 384  (configs/char.py)",
        ),
        ([gone, begun], 2, f"train.init_from={tmp_path}/gone holds no run (no config.json there)"),
        (["--config.train.init_from=gs://runs/one", begun], 2, "add --config"),
    ):
        status, out, err = finish(command("train.py", "--print_config", *arguments, cache=tmp_path))
        assert status == wanted and line in out + err, out + err
    shutil.copy(base / "config.json", tmp_path)
    status, out, err = finish(command("train.py", "--print_config", gone, begun, cache=tmp_path))
    assert status == 0 and f"model.mlp_dim = 48  ({tmp_path}/config.json)" in out, err


def test_what_does_not_go_together_is_one_line(base, tmp_path):
    def refused(message, act, kind=ConfigError):
        with pytest.raises(kind, match=message) as error:
            act()
        assert "\n" not in str(error.value)

    def of(source, **changes):
        return small(train__init_from=str(source), **changes)

    def begun(config):
        return lambda: trained(config, tmp_path / "mine")

    refused("holds no run .no config.json there.; name the folder of one", begun(of(tmp_path / "none")))
    wider = of(base, model__mlp_dim=64)
    refused(f"model.mlp_dim=64 differs from the 48 of train.init_from={base}; .* --config={base}", begun(wider))
    short = of(base, train__steps=0, train__epochs=1e-7, data__source="synthetic")
    refused("train.epochs=1e-07 of .* is less than one step", lambda: train.train(short, tmp_path / "mine"))
    assert not (tmp_path / "mine").exists(), "neither its lock nor its logs"
    same = of(base, model__head_dim=16, model__max_length=64, model__rope_theta=1e6)  # the same weights
    initial(same).check_can_initialize(same, None)
    refused("is a recipe and has no weights", begun(of("configs/tiny.py")))
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "config.json").write_bytes((base / "config.json").read_bytes())
    refused("has no checkpoint; train it first", begun(of(tmp_path / "empty")))
    unread = of(tmp_path / "none", data__source="text", data__path=f"{tmp_path}/gone.txt")
    refused("holds no run", lambda: train.train(unread, tmp_path / "mine"))  # before documents are read
    shutil.copytree(base / "checkpoints", tmp_path / "empty" / "checkpoints")
    write_sums(tmp_path / "texts", 20)
    text = dict(data__source="text", data__path=f"{tmp_path}/texts/*.txt", data__cache_dir=str(tmp_path / "cache"))
    stored = json.loads((base / "config.json").read_text()) | {"data.tokenizer": "sentencepiece"}
    (tmp_path / "empty" / "config.json").write_text(json.dumps(stored | {"model.vocab_size": 300}))
    (tmp_path / "empty" / "tokenizer.model").write_bytes(b"another")
    config = of(tmp_path / "empty", **text | {"model__vocab_size": 300})
    refused(
        "has another tokenizer than data.tokenizer=byte; use --config.data.tokenizer=",
        lambda: train.train(config, tmp_path / "mine"),
    )
    config = of(base)
    config.model.name, config.train.objective = "trm", "recursive"
    refused("needs model.name=decoder_lm, not trm", lambda: validate(config, 8))


def adapted(base, **changes):
    """A run that trains adapters of `base` on other data."""
    lora = dict(lora__rank=2, lora__alpha=6.0, lora__targets="query,out,down", train__init_from=str(base))
    return small(**lora | dict(optimizer__ema_decay=0.0, optimizer__warmup_steps=0) | changes)


@pytest.fixture(scope="module")
def tuned(base, tmp_path_factory):
    """A run of adapters, on batches in which each token is its own target."""
    folder = tmp_path_factory.mktemp("tuned")
    config = adapted(base)
    validate(config, 8)
    trained(config, folder, steps=40)
    return folder


def arrays(workdir) -> dict[str, np.ndarray]:
    """Return all parameters that a run's newest checkpoint keeps."""
    state = max((workdir / "checkpoints").iterdir(), key=lambda path: int(path.name)) / "state"
    names = [path.name.removeprefix("params.") for path in state.glob("params.*")]
    return {name: array_files.open_array(state, f"params.{name}").read().result() for name in names}


def test_adapters_learn_beside_weights_that_stay_and_alone_are_kept(base, whole, tuned):
    """In the first step they compute what the weights do, which a run that trains all of them does too."""
    losses = [line["loss"] for line in lines_of(tuned, "train").values()]
    assert abs(losses[0] - lines_of(whole[1], "train")[1]["loss"]) < 1e-5 * losses[0]
    assert losses[-1] < losses[0] - 0.5
    kept = arrays(tuned)
    assert {name.rpartition(".")[0] for name in kept} == {
        f"stack.blocks.{name}" for name in ("attention.adapters.query", "attention.adapters.out", "mlp.adapters.down")
    }
    assert sum(array.size for array in kept.values()) == 2 * (2 * (32 + 32) + (48 + 32))
    plain = adapted(base, lora__rank=0)
    merged, weights = evaluated(plain, tuned), evaluated(small(), base)
    run = assembly.assemble(plain)
    with mesh_context(run.mesh):  # for a run that begins from this one
        again = SourceRun("train.init_from", str(tuned)).restore(run.abstract_state.params)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(again), merged)
    for name in ("query", "out", "key"):
        a, b = (kept.get(f"stack.blocks.attention.adapters.{name}.{part}", np.zeros(1)) for part in "ab")
        change = 3 * np.tensordot(a[0], b[0], 1) if name != "key" else 0.0
        wanted = weights["stack"]["blocks"]["attention"][name][0] + change
        np.testing.assert_allclose(merged["stack"]["blocks"]["attention"][name][0], wanted, atol=1e-6)


def test_a_run_that_has_ended_holds_no_weights_and_no_thread(base, tmp_path):
    """A notebook collects garbage seldom, and its next run needs the memory of the frozen weights."""
    gc.disable()  # before arrays are counted: those that other tests left stay, and to collect them takes seconds
    threads, arrays_before = set(threading.enumerate()), len(jax.live_arrays())
    try:
        trained(adapted(base), tmp_path)
        left = len(jax.live_arrays()) - arrays_before
        until = time.monotonic() + 10
        while (new := set(threading.enumerate()) - threads) and time.monotonic() < until:
            time.sleep(0.01)
    finally:
        gc.enable()
    assert left == 0 and new == set()


def test_what_is_given_out_is_the_base_and_the_adapters_of_peft(base, tuned, tmp_path):
    """Compare with an independent sum in numpy: adapters in their own format, and merged in that of whole models."""
    export = {}
    for name, workdir in (("base", base), ("tuned", tuned)):
        config = stored_config.load_to_read(workdir, {}).config
        hugging_face.export(logits.float32_run(config), workdir, tmp_path / name, logits.check_same)
        export[name] = safetensors.numpy.load_file(tmp_path / name / "model.safetensors")
    assert peft.export(logits.float32_run(config), tuned, tmp_path / "peft") == 40
    told = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
    assert (told["r"], told["lora_alpha"], told["target_modules"]) == (2, 6.0, ["down_proj", "o_proj", "q_proj"])
    parts = safetensors.numpy.load_file(tmp_path / "peft" / "adapter_model.safetensors")
    for name, weight in export["base"].items():
        a, b = (parts.pop(f"base_model.model.{name.removesuffix('weight')}lora_{p}.weight", None) for p in "AB")
        wanted = weight if a is None else weight + 6.0 / 2 * b @ a
        np.testing.assert_allclose(export["tuned"][name], wanted, atol=1e-6)
        assert (a is not None) == any(module in name for module in told["target_modules"])
    assert not parts
    with pytest.raises(ConfigError, match="has no adapters"):
        peft.export(logits.float32_run(config), base, tmp_path / "other")


def test_an_export_whose_base_weights_its_run_deletes_says_so(base, tuned, tmp_path, monkeypatch):
    """It publishes no weights of zeros, and names what was deleted."""
    write, checkpoint = safetensors_files.write, base / "checkpoints" / "2"

    def deleted(*arguments):
        checkpoint.rename(tmp_path / "2")
        return write(*arguments)

    monkeypatch.setattr(safetensors_files, "write", deleted)
    config = stored_config.load_to_read(tuned, {}).config
    try:
        with pytest.raises(RunError, match=r"checkpoints/2 was deleted while it was read .* run the command again"):
            hugging_face.export(logits.float32_run(config), tuned, tmp_path / "out", logits.check_same)
    finally:
        (tmp_path / "2").rename(checkpoint)
    assert not (tmp_path / "out").exists()


def test_adapters_know_what_they_are_beside(base, whole, tuned, tmp_path):
    """Not by its place: it may be moved, but where it is gone or another nothing is made of it."""
    for name, source in (("base", base), ("tuned", tuned)):
        shutil.copytree(source, tmp_path / name)
    workdir, place = tmp_path / "tuned", tmp_path / "base"
    trained(adapted(place), workdir, steps=41)
    assert len(lines_of(workdir, "train")) == 41
    array = next((place / "checkpoints" / "2" / "state").glob("average.norm.scale/0"))
    array.write_bytes(array.read_bytes()[::-1])
    read = lambda: evaluated(adapted(place, lora__rank=0), workdir)  # noqa: E731
    for act in (read, lambda: trained(adapted(place), workdir, steps=42)):
        with pytest.raises(
            CheckpointError, match=r"checkpoint 2 of train\.init_from=.* has other bytes than were saved"
        ):
            act()
    shutil.rmtree(place)
    with pytest.raises(
        CheckpointError, match=r"has only adapters, and the base weights cannot be loaded: .* holds no run"
    ):
        read()
    shutil.copytree(whole[1], place)
    with pytest.raises(
        CheckpointError, match=r"base weights cannot be loaded: checkpoint 2 of .* has other weights; restore them"
    ):
        read()


def test_adapters_that_do_not_go_with_the_rest_are_one_line(base):
    for changes, message in (
        (dict(train__init_from=""), "lora.rank=2 needs train.init_from"),
        (dict(lora__targets="query,kay"), "lora.targets=kay is unknown; did you mean key"),
        (dict(lora__targets="query,query"), "has a weight twice"),
        (dict(model__num_experts=8), "of model.num_experts=8 none has adapters; use some of query,key,value,out"),
        (
            dict(train__objective="distillation", distillation__teacher="x"),
            "lora.rank=2 needs distillation.teacher='', not x",
        ),
        (dict(model__quantization="int8"), "lora.rank=2 needs model.quantization=none, not int8"),
        (dict(lora__rank=-1), "lora.rank=-1 must be 0 or greater"),
    ):
        with pytest.raises(ConfigError, match=message):
            validate(adapted(base, **changes), 8)


def test_what_came_beside_imported_weights_goes_out_with_those_that_began_from_them(tmp_path):
    """Configuration and types of the tensors as they were published."""
    config = cases.import_run(FOLDER / "qwen3", tmp_path / "imported")
    config.train.init_from = str(tmp_path / "imported")
    run = logits.float32_run(config)
    found = hugging_face.as_published(config, tmp_path / "mine", run.abstract_state.params)
    assert found == hugging_face.as_published(config, tmp_path / "imported", run.abstract_state.params)
    assert found[0] == hugging_face.read_config(FOLDER / "qwen3") and set(found[2].values()) == {"BF16"}
