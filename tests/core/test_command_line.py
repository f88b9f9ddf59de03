# SPDX-License-Identifier: Apache-2.0
"""Every mistake on the command line is one line and exit status 2, before a device or a file is touched."""

import json
import os
import subprocess
import sys
import threading

import pytest
from absl.testing import flagsaver

from cluster import startup
from configs import base
from configs.errors import ConfigError
from core import command_line
from core.overrides import split_overrides
from settings.keys import flat
from tests.support import ROOT

CHANGED = "from configs import base\ndef get_config():\n    config = base.get_config()\n    "
RECIPES = {  # one that stays as the mistakes below expect it, and broken ones
    "mine": CHANGED
    + """config.model.update(embed_dim=256, num_heads=4, num_kv_heads=4, max_length=512, num_layers=4)
    config.train.update(steps=500, global_batch=16, sequence_length=256)
    return config
""",
    "syntax": "def get_config(:\n",
    "no_function": "x = 1\n",
    "unknown_key": CHANGED + "config.model.layers = 3\n",
    "wrong_type": CHANGED + "config.train.steps = 'x'\n",
    "no_result": "def get_config():\n    pass\n",
    "other_result": "import ml_collections\ndef get_config():\n    return ml_collections.ConfigDict({'a': {'b': 1}})\n",
    "own_error": "def get_config():\n    raise ValueError('two\\nlines')\n",
}


@pytest.fixture
def parse(monkeypatch, tmp_path):
    """command_line.parse in this process, on a machine without accelerator; all that it sets is put back."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_COMPILATION_CACHE_DIR"):
        monkeypatch.setenv(name, "")  # remembers what was there
        monkeypatch.delenv(name)
    monkeypatch.setattr(startup.glob, "glob", lambda pattern: [])
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    for name, text in RECIPES.items():
        (tmp_path / f"{name}.py").write_text(text)

    def run(arguments: str, recipe: str = "--config=TMP/mine.py", **options) -> command_line.Command:
        typed = f"{recipe} {arguments}".replace("TMP", str(tmp_path)).split()  # of two recipes the last counts
        monkeypatch.setattr(sys, "argv", ["train.py", *typed])
        with flagsaver.flagsaver():
            return command_line.parse("what it does", **options)

    return run


MISTAKES = [
    # keys and values
    ("--config.train.stepz=5", "--config.train.stepz is not a configuration key; did you mean --config.train.steps?"),
    ("--config.optimizer.num_layers=5", "mean --config.error_correction.num_layers or --config.model.num_layers?"),
    ("--config.steps=5", "did you mean --config.train.steps?"),
    ("--config.total_steps=5", "did you mean --config.train.steps?"),
    ("--config.eval.every=5", "did you mean --config.train.eval_every or"),
    ("--config.eval.batches=5", "did you mean --config.evaluation.batches"),
    ("--config.batch.size=5", "did you mean --config.train.global_batch?"),
    ("--config.optim.lr=5", "did you mean --config.optimizer.learning_rate?"),
    ("--config.kv_heads=5", "did you mean --config.model.num_kv_heads?"),
    ("--config.mesh.tensor=5", "did you mean --config.mesh.expert?"),
    ("--config.train.steps=many", "--config.train.steps=many is not a whole number (now 500)"),
    ("--config.train.steps=1.5", "is not a whole number"),
    ("--config.optimizer.learning_rate=fast", "is not a number"),
    ("--config.model.qk_norm=maybe", "is not true or false"),
    ("--config.train.steps=5 --config.train.tokens=9000", "train.steps and train.tokens both say how long"),
    ("--config.train.steps=0", "exactly one of train.steps, train.tokens, train.epochs"),
    ("--config.model.remat=dot", "model.remat=dot is unknown; did you mean dots? (all: none, dots, mlp, hidden, up, "),
    ("--config.model.name=decoder", "model.name=decoder is unknown; did you mean decoder_lm"),
    ("--config.train.objective=language", "train.objective=language is unknown; did you mean language_modeling"),
    ("--config.optimizer.name=adam", "optimizer.name=adam is unknown; did you mean adamw"),
    ("--config.optimizer.name=make", "(all: adafactor, adam_atan2, adamw, lion, muon, sgd)"),
    ("--config.optimizer.schedule=wsd", "is unknown; did you mean warmup_stable_decay? (all:"),
    ("--config.optimizer.schedule=cosin", "(all: constant, cosine, cosine_from_one, linear, warmup_stable_decay)"),
    ("--config.optimizer.ema_decay=1", "optimizer.ema_decay=1.0 must be 0 or greater and less than 1"),
    ("--config.optimizer.cooldown_fraction=2", "optimizer.cooldown_fraction=2.0 must be at most 1"),
    ("--config.model.dropout=1", "model.dropout=1.0 must be 0 or greater and less than 1"),
    ("--config.model.rope_scaling=ntk", "model.rope_scaling=ntk is unknown (all: none, linear, llama3, yarn)"),
    ("--config.model.rope_scaling=yarn", "model.rope_scaling=yarn needs model.rope_original_length"),
    ("--config.model.rope_factor=8", "model.rope_scaling=none needs model.rope_factor=1, not 8.0"),
    ("--config.model.biases=qvk", "model.biases=qvk is unknown; did you mean qkv"),
    ("--config.model.global_every=2", "model.global_every=2 needs model.sliding_window"),
    ("--config.optimizer.learning_rate=0", "optimizer.learning_rate=0.0 must be greater than 0"),
    ("--config.optimizer.learning_rate=nan", "optimizer.learning_rate=nan must be greater than 0"),
    ("--config.train.eval_every=-1", "train.eval_every=-1 must be 0 or greater"),
    ("--config.data.holdout_fraction=1", "data.holdout_fraction=1.0 must be greater than 0 and less than 1"),
    ("--config.data.bad_documents=ignore", "data.bad_documents=ignore is unknown (all: error, skip)"),
    ("--config.data.readers=-1", "data.readers=-1 must be 0 or greater"),
    # what does not go together
    ("--config.model.num_kv_heads=3", "is not a multiple of model.num_kv_heads=3; num_kv_heads could be 2 or 4"),
    ("--config.model.num_heads=6 --config.model.num_kv_heads=6", "=256 is not a multiple of model.num_heads=6"),
    ("--config.model.num_heads=6 --config.model.num_kv_heads=6", "use 252 or 258, or set --config.model.head_dim"),
    ("--config.model.head_dim=7", "must be even"),
    ("--config.train.sequence_length=1024", "train.sequence_length=1024 is longer than model.max_length=512"),
    ("--topology=cpu-8 --config.train.global_batch=20", "train.global_batch=20 is not a multiple of its 8 shards"),
    ("--topology=cpu-8 --config.train.global_batch=20", "(mesh dcn_data * data * fsdp * expert); use 16 or 24"),
    ("--topology=cpu-8 --config.train.global_batch=4", "use 8"),
    ("--topology=cpu-8 --config.train.gradient_accumulation=4", "expert) * 4 microbatches; use 32"),
    (
        "--topology=cpu-8 --config.mesh.fsdp=1 --config.mesh.context=8 --config.train.sequence_length=100",
        "train.sequence_length=100 is not a multiple of mesh.context=8; use 96 or 104",
    ),
    ("--config.data.source=python --config.data.path=x", "data.source=python needs data.path='', not x"),
    ("--config.data.source=synthetic --config.data.validation_path=x", "synthetic needs data.validation_path=''"),
    ("--config.data.path=x --config.data.mixture=1_y", "data.path and data.mixture both say what to train on"),
    # the mesh
    ("--topology=cpu-8 --config.mesh.model=3", "model=3 needs 24 devices, but there are 8; set the axes to a product"),
    ("--topology=cpu-8 --config.mesh.fsdp=-1 --config.mesh.model=3", "needs a multiple of 3 devices, but there are 8"),
    ("--topology=cpu-8 --config.mesh.fsdp=4", "set the axes to a product of 8, or set one of them to -1"),
    ("--config.mesh.data=2", "there is 1; set the axes to a product of 1, or give --topology"),
    ("--config.mesh.data=-1", "mesh.data and mesh.fsdp are both -1"),
    ("--config.mesh.data=0", "mesh.data=0 must be 1 or greater"),
    # topologies and recipes
    ("--topology=v4-33", "--topology=v4-33 is unknown; did you mean v4-32"),
    ("--topology=v4-32 --config.model.embed_dim=72", "model.embed_dim=72 is not a multiple of 16"),
    ("--config=configs/smal.py", f"smal.py is not a file (looked in {ROOT}); did you mean configs/small.py?"),
    ("--config=configs/loadin.py", "; configs/ has the recipes of this workspace"),
    ("--config=TMP/syntax.py", "syntax.py, line 1: invalid syntax"),
    ("--config=TMP/no_function.py", "get_config"),
    ("--config=TMP/unknown_key.py", "unknown_key.py, line 4:"),
    ("--config=TMP/wrong_type.py", "wrong_type.py, line 4:"),
    ("--config=TMP/no_result.py", "no_result.py"),
    ("--config=TMP/other_result.py", "get_config() must return the configuration of configs/base.py"),
    ("--config=TMP/own_error.py", "line 2: two lines"),
    # the form of the command
    ("train.steps=5", "stray argument 'train.steps=5'; options are written --name=value"),
    ("--topologie=v4-8", "topologie"),
    ("--workdir", "workdir"),
]  # fmt: skip


@pytest.mark.parametrize(("arguments", "words"), MISTAKES, ids=[arguments for arguments, _ in MISTAKES])
def test_a_mistake_is_one_line_that_names_it(parse, arguments, words):
    with pytest.raises(ConfigError) as caught:
        parse(arguments)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value) and caught.value.exit_status == 2


def test_a_missing_recipe_is_never_answered_with_a_file_that_is_none(parse):
    for name in ("loading", "topologies", "validation", "simulation"):
        with pytest.raises(ConfigError) as caught:
            parse(f"--config=configs/{name}s.py")
        assert f"configs/{name}.py" not in str(caught.value)


@pytest.mark.parametrize(
    ("arguments", "overrides", "rest"),
    [
        ("--config.a.b=1 --workdir=w", {"a.b": "1"}, ["--workdir=w"]),
        ("--config.a.b 1 x", {"a.b": "1"}, ["x"]),
        ("-config.a.b -1", {"a.b": "-1"}, []),
        ("--config.a.b --config.c.d=x=y", {"a.b": "true", "c.d": "x=y"}, []),
        ("--config=configs/tiny.py --config.a.b", {"a.b": "true"}, ["--config=configs/tiny.py"]),
        ("--config.a.b=1 --config.a.b=2", {"a.b": "2"}, []),
    ],
)
def test_overrides_are_told_from_flags(arguments, overrides, rest):
    assert split_overrides(arguments.split()) == (overrides, rest)


def test_without_arguments_it_is_the_tiny_recipe_on_this_machine(parse):
    command = parse("", recipe="")
    assert (command.loaded.recipe, str(command.workdir), command.num_devices) == ("tiny", "runs/tiny", 1)
    assert command.accelerator == "cpu" and command.banner() == []


def test_a_topology_is_simulated_and_says_so(parse):
    command = parse("--config=configs/large.py --topology=v4-32 --config.mesh.fsdp=8 --config.mesh.model=2")
    assert (command.num_devices, str(command.workdir)) == (16, "runs/large-v4-32")
    assert (command.config.mesh.fsdp, command.config.mesh.model) == (8, 2)
    banner = "\n".join(command.banner())
    assert banner.startswith("SIMULATION: ") and "16 simulated CPU devices" in banner
    assert f"model.num_layers 24 -> {command.config.model.num_layers}" in banner


def test_eight_cpu_devices_are_no_simulation_and_nothing_shrinks(parse):
    command = parse("--topology=cpu-8")
    assert command.num_devices == 8 and command.scaled_down is None
    assert command.config.model.num_layers == 4 and command.config.model.embed_dim == 256


def test_on_an_accelerator_the_mesh_waits_for_jax_to_count_the_devices(parse, monkeypatch):
    monkeypatch.setattr(startup.glob, "glob", lambda pattern: ["/dev/accel0"] if "accel" in pattern else [])
    command = parse("--topology=v4-8")
    assert command.accelerator == "tpu" and command.num_devices is None and command.scaled_down is None
    assert "XLA_FLAGS" not in os.environ
    with pytest.raises(ConfigError, match="a tpu is attached, but jax uses the cpu: another process uses"):
        command_line.join(command)


# Real processes: what stands on stderr, and the exit status.

PARSE = (
    "import sys; from core import command_line\ntry:\n    c = command_line.parse('doc')\n"
    "finally:\n    print('jax' in sys.modules)"
)


def run(code: str, *arguments: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=60
    )


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--config.train.stepz=5", "did you mean --config.train.steps?"),
        ("5", "stray argument '5'"),
        ("--topologie=v4-8", "topologie"),
    ],
)
def test_a_process_ends_with_one_line_and_status_2_before_jax_is_imported(argument, words):
    ended = run(PARSE, argument)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: ") and ended.stderr.count("\n") == 1 and words in ended.stderr
    assert ended.stdout == "False\n"


@pytest.mark.parametrize(
    ("statement", "status", "line"),
    [
        ("raise RuntimeError('first\\nsecond')", 1, "error: RuntimeError: first second (<string>:3)"),
        (
            "raise RuntimeError('RESOURCE_EXHAUSTED: Out of memory')",
            1,
            "error: RuntimeError: RESOURCE_EXHAUSTED: Out of memory; smaller batches take less memory; in training",
        ),
        (
            "raise RuntimeError('RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 196.00M. '"
            "'That was not possible. There are 134.44M free.; (1x0x0_HBM0)')",
            1,
            "error: RuntimeError: RESOURCE_EXHAUSTED: Error allocating device buffer: Attempting to allocate 196.00M. "
            "That was not possible. There are 134.44M free.; (1x0x0_HBM0); smaller batches take less memory; in tr",
        ),
        (
            "command_line.ending.advise_less_memory('use fewer --rows'); raise RuntimeError('Out of memory')",
            1,
            "error: RuntimeError: Out of memory; use fewer --rows (<string>:3)",
        ),
        (
            "raise RuntimeError('RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem.')",
            1,
            "error: RuntimeError: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem. (<string>",
        ),
        (
            "raise RuntimeError('RESOURCE_EXHAUSTED: No space left on device')",
            1,
            "error: RuntimeError: RESOURCE_EXHAUSTED: No space left on device (<string>",
        ),
        ("raise KeyboardInterrupt", 75, "interrupted; run the same command to continue"),
        (
            "t = __import__('threading').Thread(target=lambda: 1 / 0); t.start(); t.join()",
            1,
            "error: ZeroDivisionError: ",
        ),
    ],
)
def test_every_other_end_is_one_last_line_too(statement, status, line):
    ended = run(f"from core import command_line\ncommand_line.parse('doc')\n{statement}")
    assert ended.returncode == status
    assert ended.stderr.splitlines()[-1].startswith(line)


@pytest.mark.parametrize("thread", ["main", "another"])
@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_process_ends_with_its_status_where_there_is_no_room_for_its_last_line(stream, thread):
    """A thread that cannot speak must not keep the process, nor be waited for by all that would end it after it."""
    end = "ending._end('error: what happened', 3)"
    if thread == "another":
        end = f"t = __import__('threading').Thread(target=lambda: {end}); t.start(); t.join(); {end}"
    with open("/dev/full", "w") as full:
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | {stream: full}
        environment = os.environ | {"PYTHONUNBUFFERED": ""}  # what was said before is written at the end
        code = f"from core import ending\nprint('said before')\n{end}"
        command = [sys.executable, "-c", code]
        ended = subprocess.run(command, cwd=ROOT, timeout=60, text=True, env=environment, **pipes)
    assert ended.returncode == 3
    assert ended.stderr in (None, "error: what happened\n")


def test_a_right_command_goes_on_with_its_configuration():
    code = "from core import command_line\nc = command_line.parse('doc')\nprint(c.num_devices, c.config.train.steps)"
    ended = run(code, "--topology=v4-32", "--config.train.steps=7")
    assert (ended.returncode, ended.stdout) == (0, "16 7\n")


def test_a_command_that_only_reads_a_run_does_not_say_that_it_continues(tmp_path):
    code = "from core import command_line\ncommand_line.ending.continues(False)\nraise KeyboardInterrupt"
    ended = run(f"from core import ending\nending.install()\n{code}")
    assert (ended.returncode, ended.stderr) == (75, "interrupted\n")
    code = code.replace("continues(False)", "ends_by_signal('stopped')\ncommand_line.ending.continues(False)")
    ended = run(f"from core import ending\nending.install()\n{code}")
    assert (ended.returncode, ended.stderr) == (0, "stopped\n"), "it is how this command usually ends"


def test_help_lists_the_flags_and_points_to_the_keys():
    ended = run("from core import command_line\ncommand_line.parse('What it does.')", "--help")
    assert ended.returncode == 0
    assert all(words in ended.stdout for words in ("What it does.", "--topology", "--workdir", "configs/base.py"))


def test_help_lists_no_flag_that_the_command_refuses():
    ended = run("from core import command_line\ncommand_line.parse_flags('It reads.', ('config', 'workdir'))", "--help")
    assert ended.returncode == 0 and "--topology" in ended.stdout
    assert not any(words in ended.stdout for words in ("--config", "--workdir"))


def test_output_that_nobody_reads_any_more_ends_the_command_in_one_line():
    """As in `sweep.py plan trm | head`."""
    command = [sys.executable, "-u", "sweep.py", "plan", "trm"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.close()
    assert process.stderr.read() == "error: the program that reads this output has closed it\n"
    assert process.wait() == 1
    process.stderr.close()


def test_a_run_whose_recipe_adds_its_source_is_told_to_name_that_recipe(parse, tmp_path):
    """As it is for a reward that a recipe registers."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps(flat(base.get_config()) | {"data.source": "ours"}))
    with pytest.raises(ConfigError, match=r"^data.source=ours is unknown .*tfrecord\); if a recipe adds it, name that"):
        parse("--workdir=TMP/run", "")
    with pytest.raises(ConfigError, match=r"^data.source=ours is unknown .*tfrecord\)$"):
        parse("--config.data.source=ours")
