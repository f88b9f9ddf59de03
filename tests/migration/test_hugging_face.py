# SPDX-License-Identifier: Apache-2.0
"""Models in Hugging Face's format compute here what transformers recorded, and come out as they went in."""

import itertools
import json
import pathlib
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy

import train
from checkpointing import array_files
from checkpointing.checkpoints import CheckpointError, Checkpoints
from checkpointing.retention import Retention
from checkpointing.source_run import initial
from checkpointing.workdir import open_workdir
from configs import base
from configs.errors import ConfigError
from core import assembly
from input_pipeline.tokenization import ByteTokenizer, open_tokenizer
from migration import hugging_face, hugging_face_reader, hugging_face_tensors, logits, peft, safetensors_files
from migration import hugging_face_families as families
from parallelism.mesh import mesh_context
from settings import loading, stored_config
from settings.keys import flat
from tests.input_pipeline.chat.conftest import CHATML, made_tokenizer
from tests.migration import hugging_face_cases as cases
from tests.migration.record_hugging_face import CASES, FOLDER, SHARDED
from tests.support import forward, packed_batch, random_weights
from tests.test_train import command, finish, lines_of

# Of logits of about 8, float32 sums over three to seven layers in another order; a wrong weight changes them by 0.1.
TOLERANCE = 1e-4


def expected(case: str) -> tuple[np.ndarray, np.ndarray]:
    with np.load(FOLDER / case / "expected.npz") as file:
        return file["tokens"], file["logits"]


@pytest.fixture(scope="module", autouse=True)
def one_length():
    """An export is checked by prompts as long as what was recorded, for which all is compiled already."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logits, "LENGTH", 20)
        yield


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Each case imported once: case to (configuration, workdir)."""
    place, made = tmp_path_factory.mktemp("runs"), {}

    def run(case: str) -> tuple:
        if case not in made:
            made[case] = cases.import_run(FOLDER / case, place / case), place / case
        return made[case]

    return run


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_that_transformers_recorded(runs, case):
    tokens, wanted = expected(case)
    assert np.abs(cases.logits_of(*runs(case), tokens) - wanted).max() < TOLERANCE
    assert np.abs(hugging_face_reader.logits(FOLDER / case, tokens) - wanted).max() < TOLERANCE


@pytest.mark.parametrize("case", CASES)
def test_what_is_exported_is_what_was_imported_bit_for_bit(runs, tmp_path, case):
    cases.export(*runs(case), tmp_path / "out")
    assert cases.tensors(tmp_path / "out") == cases.tensors(FOLDER / case)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (FOLDER / case / name).read_bytes()


@pytest.mark.parametrize("case", ["qwen2", "mixtral"])
def test_a_tensor_that_goes_in_many_blocks_is_the_same(tmp_path, monkeypatch, case):
    """As the weights of large models do: with biases, heads apart, experts, and blocks that divide nothing."""
    monkeypatch.setattr(hugging_face_tensors, "BLOCK_BYTES", 700)
    config = cases.import_run(FOLDER / case, tmp_path / "run")
    params = logits.float32_run(config).abstract_state.params
    blocks = [len(list(t.blocks())) for t in hugging_face.as_published(config, tmp_path / "run", params)[1]]
    assert max(blocks) > 5
    tokens, wanted = expected(case)
    assert np.abs(cases.logits_of(config, tmp_path / "run", tokens) - wanted).max() < TOLERANCE
    cases.export(config, tmp_path / "run", tmp_path / "out")
    assert cases.tensors(tmp_path / "out") == cases.tensors(FOLDER / case)


@pytest.mark.parametrize("case", CASES)
def test_a_model_is_described_by_its_family_as_it_was(case):
    """Also where the configuration that it came with is not kept."""
    published = hugging_face.read_config(FOLDER / case)
    model = families.model_section(published)
    written = families.config_json(model)
    assert families.model_section(written) == model
    assert [written[key] for key in ("model_type", "architectures")] == [
        published[key] for key in ("model_type", "architectures")
    ]


@pytest.mark.parametrize("case", ["gemma2", "gemma3"])
@pytest.mark.parametrize(("scalar", "written"), [(16.0, "16"), (0.0, "8"), (12.5, "null")])
def test_what_scores_are_divided_by_goes_out_as_a_whole_number_or_not_at_all(case, scalar, written):
    """Transformers takes neither a float nor null; our 0 is the head's width."""
    model = dict(base.get_config().model) | families.model_section(hugging_face.read_config(FOLDER / case))
    model["query_scalar"] = scalar
    assert json.dumps((families.config_json(model) or {}).get("query_pre_attn_scalar")) == written
    assert written != "null" or families.nearest(model).endswith("which has model.query_scalar=12")


@pytest.mark.parametrize(("case", "written"), [("llama3", "mistral"), ("gemma2", None), ("qwen2", "qwen2")])
def test_a_width_that_heads_do_not_divide_goes_to_a_family_that_transformers_opens_with_it(case, written):
    model = dict(base.get_config().model) | families.model_section(hugging_face.read_config(FOLDER / case))
    model |= {"embed_dim": 64, "num_heads": 3, "num_kv_heads": 3, "head_dim": 16, "query_scalar": 16.0}
    assert (families.config_json(model) or {}).get("model_type") == written
    assert written or families.nearest(model) == f"the nearest is {case}, which has model.embed_dim=63"


def test_one_theta_for_all_layers_is_written_for_those_with_a_window_too():
    """Our 0 means the rope_theta of the other layers; theirs is never scaled."""
    model = dict(base.get_config().model) | families.model_section(hugging_face.read_config(FOLDER / "gemma3"))
    model |= {"local_rope_theta": 0.0, "rope_theta": 1e5, "rope_scaling": "none", "rope_factor": 1.0}
    assert families.config_json(model)["rope_local_base_freq"] == 1e5
    model |= {"rope_scaling": "linear", "rope_factor": 8.0}
    assert families.config_json(model) is None


@pytest.mark.parametrize(
    ("case", "ours", "theirs", "says"),
    [
        ("gemma3", {"attention_soft_cap": 2.0}, {"attn_logit_softcapping": 2.0}, "attention_soft_cap=0"),
        ("mixtral", {"global_every": 2}, {"layer_types": ["sliding_attention", "full_attention"]}, "global_every=0"),
        ("mixtral", {"global_every": 2}, {"sliding_window_pattern": 2}, "global_every=0"),
    ],
)
def test_a_key_that_transformers_does_not_compute_is_neither_written_nor_read(tmp_path, case, ours, theirs, says):
    published = hugging_face.read_config(FOLDER / case)
    model = dict(base.get_config().model) | families.model_section(published) | ours
    assert families.config_json(model) is None
    assert families.nearest(model) == f"the nearest is {published['model_type']}, which has model.{says}"
    with pytest.raises(ConfigError, match=f"is not supported for {published['model_type']}, only None"):
        families.model_section(published | theirs)
    shutil.copytree(FOLDER / case, tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").write_text(json.dumps(published | theirs))
    tokens, wanted = expected(case)
    assert np.abs(hugging_face_reader.logits(tmp_path / "theirs", tokens) - wanted).max() < TOLERANCE


def test_files_are_cut_at_a_size_and_told_by_an_index(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(safetensors_files, "SHARD_BYTES", 15_000)
    cases.export(*runs(SHARDED), tmp_path / "out")
    assert cases.tensors(tmp_path / "out") == cases.tensors(FOLDER / SHARDED)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert files == sorted(set(index["weight_map"].values())) and len(files) == 3
    assert files[0] == "model-00001-of-00003.safetensors"
    with safetensors.safe_open(tmp_path / "out" / files[0], "numpy") as file:
        assert set(file.keys()) == {name for name, where in index["weight_map"].items() if where == files[0]}


def test_layer_by_layer_is_the_model(runs):
    """Also as training computes it, from a checkpoint as Orbax restores it, in a run that will keep an average."""
    config, workdir = runs("gemma3")
    config = config.copy_and_resolve_references()
    config.optimizer.ema_decay = 0.9
    tokens, _ = expected("gemma3")
    run = logits.float32_run(config)
    with Checkpoints(workdir) as checkpoints, mesh_context(run.mesh):
        params = checkpoints.restore_eval_params(0, run.abstract_state.params)
        ones = np.ones_like(tokens)
        whole = forward(run.graph, params, {"tokens": tokens, "segments": ones, "positions": ones.cumsum(1) - 1})
    np.testing.assert_allclose(cases.logits_of(config, workdir, tokens), whole, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        ({}, "llama"),  # the embedding, which a Llama does not scale, leaves multiplied
        ({"tie_embeddings": True, "mup_base_dim": 6, "sliding_window": 8}, "mistral"),  # and with a separate head
        ({"qk_norm": True, "head_dim": 8}, "qwen3"),
        ({"num_experts": 4, "experts_per_token": 3}, "mixtral"),
    ],
)
def test_a_run_of_ours_goes_out_as_a_family_that_has_its_model(tmp_path, model, kind):
    config = base.get_config()
    config.model.update(num_layers=2, embed_dim=24, num_heads=4, num_kv_heads=2, mlp_dim=40, vocab_size=61, **model)
    config.mesh.fsdp = 1
    save_random(config, tmp_path / "run", 7, biased=False)
    cases.export(config, tmp_path / "run", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == kind
    tokens, _ = expected("llama2")
    again = cases.import_run(tmp_path / "out", tmp_path / "again")
    back, there = (cases.logits_of(of, tmp_path / where, tokens) for of, where in ((again, "again"), (config, "run")))
    np.testing.assert_allclose(back, there, atol=TOLERANCE)


def save_random(config, workdir: pathlib.Path, step: int, *, biased: bool) -> None:
    """Save random weights, with biases of routers or without."""
    run = assembly.assemble(config, devices=jax.devices()[:1])
    weights = random_weights(run.abstract_state.params)
    if not biased:
        weights = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf * (path[-1].key != "bias"), weights)
    with Checkpoints(workdir, Retention(2, 0, 0)) as checkpoints, mesh_context(run.mesh):
        checkpoints.save_and_wait(step, run.init(weights), {"step": step})


def test_a_run_of_a_run_of_an_import_goes_out_with_its_files_and_with_what_it_has_learned(runs, tmp_path):
    """The tokenizer with the template that it was trained on, and the end of a turn in it, at which others stop too."""
    config, imported = runs("llama3")
    config, folders = config.copy_and_resolve_references(), [imported, tmp_path / "first", tmp_path / "second"]
    config.mesh.fsdp = 1
    for before, folder in itertools.pairwise(folders):
        config.train.init_from = str(before)
        folder.mkdir()
        open_workdir(folder, flat(config), None)
        save_random(config, folder, 1, biased=False)
    config.data.update(source="chat", tokenizer=made_tokenizer(CHATML, folders[2], eos_token="<|endoftext|>"))
    cases.export(config, folders[2], tmp_path / "out", verify=lambda *given: None)
    assert (tmp_path / "out" / "config.json").read_bytes() == (FOLDER / "llama3" / "config.json").read_bytes()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (folders[2] / name).read_bytes()
    encode = open_tokenizer(config.data.tokenizer).encode
    (folders[2] / "tokenizer.json").rename(tmp_path / "away")  # as of a run on batches of the caller
    cases.export(config, folders[2], tmp_path / "without", verify=lambda *given: None)
    (tmp_path / "away").rename(folders[2] / "tokenizer.json")
    assert (tmp_path / "without" / "config.json").read_bytes() == (FOLDER / "llama3" / "config.json").read_bytes()
    assert not (tmp_path / "without" / "tokenizer.json").exists()
    ends = [2, *encode("<|endoftext|>"), *encode("<|im_end|>")]  # the first is that of the import
    generation = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == list(dict.fromkeys(ends))
    shutil.copytree(imported / "hugging_face", tmp_path / "kept")
    (tmp_path / "kept" / "generation_config.json").unlink()
    files = hugging_face.described(config, folders[2], {}, tmp_path / "kept")
    assert files == {"generation_config.json": {"bos_token_id": 1, "eos_token_id": list(dict.fromkeys(ends))}}


def test_routers_go_out_without_a_bias_or_not_at_all(runs, tmp_path):
    """From an import on, none moves unless it is asked for; a run goes out in the types that came in."""
    config, imported = runs("mixtral")
    assert config.optimizer.bias_step == 0
    loaded = stored_config.load_to_continue(imported, None, None, "", {}, {}).config
    assert flat(loaded) == flat(config) | {"mesh.fsdp": -1}
    with pytest.raises(ConfigError, match=r"has imported weights with model.num_layers=\d, now 9"):
        stored_config.load_to_continue(imported, None, None, "", {"model.num_layers": "9"}, {})
    workdir = tmp_path / "run"
    shutil.copytree(imported, workdir)
    config = config.copy_and_resolve_references()
    config.mesh.fsdp = 1
    save_random(config, workdir, 1, biased=True)
    with pytest.raises(
        ConfigError,
        match=r"mlp\.bias of step 1 is not 0, .*; train from the start with",
    ):
        cases.export(config, workdir, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    save_random(config, workdir, 2, biased=False)
    cases.export(config, workdir, tmp_path / "out")
    found, given = cases.tensors(tmp_path / "out"), cases.tensors(FOLDER / "mixtral")
    assert {name: each[:2] for name, each in found.items()} == {name: each[:2] for name, each in given.items()}
    assert all(found[name][2] != given[name][2] for name in given)


def test_an_expert_is_written_and_read_alone(runs):
    config, workdir = runs("mixtral")
    folder = workdir / "checkpoints" / "0" / "state"
    for name in ("gate", "up", "down"):
        array = array_files.open_array(folder, f"params.stack.blocks.mlp.{name}")
        assert array.shape[:2] == (config.model.num_layers, config.model.num_experts)
        assert array.chunk_layout.read_chunk.shape == (1, 1, *array.shape[2:])


def test_an_export_that_computes_something_else_is_not_published(runs, tmp_path):
    def spoil_and_check(folder, run, weights):
        stored = safetensors_files.find(folder)["model.layers.1.mlp.up_proj.weight"]
        with stored.file.open("r+b") as file:
            file.seek(stored.start)
            file.write(b"\x40" * 200)  # some weights become 3
        logits.check_same(folder, run, weights)

    with pytest.raises(logits.Different, match="computes other logits than the run"):
        cases.export(*runs("qwen2"), tmp_path / "out", spoil_and_check)
    assert not list(tmp_path.iterdir()) and logits.Different.exit_status == 1


def test_an_older_form_of_the_configuration_is_read_too(runs, tmp_path):
    """With rope_theta, rope_scaling and rope_local_base_freq, as files published before transformers 5 have it."""
    shutil.copytree(FOLDER / "gemma3", tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    values = json.loads(file.read_text())
    for key in ("rope_parameters", "layer_types"):
        del values[key]
    values |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6}
    values["rope_scaling"] = {"type": "linear", "factor": 8.0}
    file.write_text(json.dumps(values))
    config = cases.import_run(tmp_path / "theirs", tmp_path / "run")
    assert config.model == runs("gemma3")[0].model
    tokens, wanted = expected("gemma3")
    assert np.abs(hugging_face_reader.logits(tmp_path / "theirs", tokens) - wanted).max() < TOLERANCE


def test_what_a_configuration_of_a_mixtral_leaves_out_is_as_in_transformers(tmp_path):
    shutil.copytree(FOLDER / "mixtral", tmp_path / "theirs")
    file = tmp_path / "theirs" / "config.json"
    values = json.loads(file.read_text())
    for key in ("rope_parameters", "num_experts_per_tok", "tie_word_embeddings", "head_dim"):
        del values[key]
    file.write_text(json.dumps(values))
    assert families.model_section(values) == families.model_section(hugging_face.read_config(FOLDER / "mixtral"))
    tokens, wanted = expected("mixtral")
    assert np.abs(hugging_face_reader.logits(tmp_path / "theirs", tokens) - wanted).max() < TOLERANCE
    values["sliding_window"] = None
    assert families.model_section(values)["sliding_window"] == 0


@pytest.mark.slow
def test_a_run_goes_on_from_imported_weights_with_an_optimizer_of_its_own(single_device, runs, tmp_path):
    config, imported = runs("llama3")
    workdir = tmp_path / "run"
    shutil.copytree(imported, workdir)
    config = config.copy_and_resolve_references()
    config.model.dtype, config.mesh.fsdp, config.logging.tensorboard = "float32", 1, False
    config.optimizer.update(name="lion", warmup_steps=0)
    config.train.update(steps=1, global_batch=2, sequence_length=20)
    batch = packed_batch([[20]] * 2, 20, 61)
    train.train(config, workdir, iter([batch]))
    logits_BTV = cases.logits_of(config, imported, batch["tokens"])
    chosen_BT = np.take_along_axis(logits_BTV, batch["targets"][..., None], 2)[..., 0]
    wanted = (np.log(np.exp(logits_BTV).sum(-1)) - chosen_BT).mean()
    assert abs(lines_of(workdir, "train")[1]["loss"] - wanted) < TOLERANCE
    shutil.copytree(imported, tmp_path / "other")
    joint, before = config.copy_and_resolve_references(), (tmp_path / "other" / "config.json").read_bytes()
    joint.train.objective, joint.error_correction.joint_weight = "error_correction", 0.5
    with pytest.raises(ConfigError, match=r"has imported weights without corrector\..*, which train\.objective="):
        train.train(joint, tmp_path / "other", iter([batch]))
    assert (tmp_path / "other" / "config.json").read_bytes() == before, "other commands still read the import"
    config.model.norm_epsilon = 0.1
    with pytest.raises(CheckpointError, match=r"has imported weights with model\.norm_epsilon=1e-06, now 0\.1"):
        train.train(config, tmp_path / "other", iter([batch]))


@pytest.mark.slow
def test_memory_does_not_grow_with_the_model(tmp_path):
    """Of a model of 196 MB, its largest tensor 1.6 MB, 41 MB are in memory at most, imported, exported and checked."""
    program = "from tests.migration import peak_memory; peak_memory.main()"
    status, out, err = finish(command("-c", program, str(tmp_path), cache=tmp_path))
    assert status == 0, err
    model, growth = json.loads(out)
    assert model > 190e6 and growth < model / 3


@pytest.mark.slow
def test_the_commands_convert_and_say_so(tmp_path):
    theirs, run = FOLDER / "qwen3", tmp_path / "run"
    tokens, wanted = expected("qwen3")
    np.save(tmp_path / "tokens.npy", tokens)
    given = [f"--workdir={run}"]
    for arguments, message in (
        (
            ["import", f"--hf={theirs}", *given],
            f"{theirs} has no tokenizer; train.py and generate.py need the model",
        ),
        (["logits", f"--tokens={tmp_path}/tokens.npy", f"--out={tmp_path}/logits.npy", *given], "logits of step 0 of"),
        (["export", f"--hf={tmp_path}/ours", *given], f"step 0 of {run} is in"),
        (["--print_config", *given], "model.qk_norm = True"),  # train.py takes the configuration that the import stored
    ):
        script = "convert.py" if arguments[0].isalpha() else "train.py"
        status, out, err = finish(command(script, *arguments, cache=tmp_path))
        assert status == 0 and message in out, err
    (tmp_path / "text.txt").write_text("some text of my own, and more\n" * 200)
    for script, *more in (("train.py", f"--config.data.path={tmp_path}/text.txt"), ("generate.py", "--prompt=a")):
        status, _, err = finish(command(script, *given, *more, cache=tmp_path))
        assert status == 2 and "error: data.tokenizer is empty; name one (that of the weights, if they were imp" in err
    keys = [f"--config.data.path={tmp_path}/text.txt", "--config.data.tokenizer=sentencepiece"]
    status, _, err = finish(command("train.py", *given, *keys, cache=tmp_path))
    refused = "was imported without a tokenizer, and a new one would not fit its weights"
    assert status == 2 and refused in err
    begun = loading.load(str(run), "", {"data.tokenizer": "sentencepiece", "train.init_from": str(run)}).config
    with pytest.raises(ConfigError, match=refused):
        initial(begun).check_can_initialize(begun, ByteTokenizer())
    begun.data.tokenizer = "byte"  # the user says that it is the model's own
    initial(begun).check_can_initialize(begun, ByteTokenizer())
    found = np.load(tmp_path / "logits.npy")
    assert found.dtype == np.float32 and np.abs(found - wanted).max() < TOLERANCE
    assert cases.tensors(tmp_path / "ours") == cases.tensors(theirs)
    loaded = stored_config.load_to_continue(run, None, None, "", {}, {}).config
    assert flat(loaded) == json.loads((run / "config.json").read_text()) | {"mesh.fsdp": -1}


def test_the_base_of_adapters_is_what_was_imported(tmp_path):
    """The authors of a chat model leave the model that they fine-tuned in its config.json."""
    shutil.copytree(FOLDER / "qwen3", tmp_path / "chat")
    values = json.loads((tmp_path / "chat" / "config.json").read_text())
    (tmp_path / "chat" / "config.json").write_text(json.dumps(values | {"_name_or_path": "org/base"}))
    config = cases.import_run(tmp_path / "chat", tmp_path / "run")
    config.train.init_from = str(tmp_path / "run")
    assert peft._base_name(config, tmp_path / "tuned", 0) == str(tmp_path / "chat")
    assert peft._base_name(config, tmp_path / "tuned", 9) == str(tmp_path / "run"), "weights that were trained further"
    cases.export(config, tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out" / hugging_face.NAME).exists()


def test_a_file_of_logits_is_whole_or_absent(tmp_path):
    def rows():
        yield np.zeros((3, 5), np.float32)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        logits.write(tmp_path / "out.npy", (2, 3, 5), rows())
    assert not list(tmp_path.iterdir())
