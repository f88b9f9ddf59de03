# SPDX-License-Identifier: Apache-2.0
"""train.py and generate.py as their users meet them: real processes, and the loop called from Python."""

import json
import os
import pathlib
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

import train
from checkpointing.checkpoints import Checkpoints
from configs import base
from configs.errors import ConfigError
from core import assembly, evaluators, job
from objectives.language_modeling import LanguageModeling
from parallelism.mesh import mesh_context
from reporting.step_log import NonFinite
from tests import warm
from tests.support import ROOT, write_sums
from training import platform_defaults

TRAIN_KEYS = {
    "kind", "step", "loss", "gradient_norm", "learning_rate", "step_seconds", "tokens", "tokens_per_second",
    "tokens_per_second_per_device", "examples_per_second", "mfu", "goodput", "data_wait_seconds",
    "host_memory_gib", "device_memory_gib", "total_tokens",
}  # fmt: skip
SMALL = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 48,
    "model.vocab_size": 300, "model.max_length": 32, "train.sequence_length": 32, "train.global_batch": 8,
    "train.steps": 12, "train.log_every": 1, "train.eval_every": 6, "train.save_every": 5,
    "optimizer.warmup_steps": 2, "optimizer.learning_rate": 0.003, "evaluation.sample_tokens": 8,
    "data.tokenizer": "byte", "data.holdout_fraction": 0.3, "evaluation.batches": 2,
}  # fmt: skip

# Another rate at each step, and one program for runs of any length, which is compiled once.
RISING = {"optimizer.schedule": "constant", "optimizer.warmup_steps": 20}


def command(script: str, *arguments: str, cache: pathlib.Path, ordinary: bool = False) -> subprocess.Popen:
    """Start a command on one CPU device, with a cache of its own; it compiles as quickly as this process."""
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    environment |= {"XDG_CACHE_HOME": str(cache), "PYTHONUNBUFFERED": "1", "XLA_FLAGS": " ".join(flags)}
    return warm.start([script, *arguments], environment, ordinary=ordinary)


def finish(process: subprocess.Popen) -> tuple[int, str, str]:
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def lines_of(workdir: pathlib.Path, kind: str) -> dict[int, dict]:
    """Return the last line of each step, which is the one that counts in metrics.jsonl."""
    lines = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line for line in lines if line["kind"] == kind}


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> pathlib.Path:
    """A folder with a text of several documents, and one run that was never stopped; its name needs quotes."""
    folder = tmp_path_factory.mktemp("Übung mit Leerzeichen")
    write_sums(folder / "texts", 20)
    return folder


def arguments(place: pathlib.Path, workdir: str, **changes) -> list[str]:
    values = SMALL | {"data.path": f"{place}/texts/*.txt"} | {k.replace("__", "."): v for k, v in changes.items()}
    return [f"--workdir={place / workdir}", *[f"--config.{key}={value}" for key, value in values.items()]]


@pytest.fixture(scope="module")
def whole(place) -> str:
    """The output of an uninterrupted run in `place`/whole."""
    status, out, err = finish(command("train.py", *arguments(place, "whole"), cache=place, ordinary=True))
    assert status == 0, err
    return out


def test_a_run_says_where_it_is_and_ends_with_what_came_of_it(place, whole):
    for start in ("Local devices: 1", "Global devices: 1", "Process index: 0", "Process count: 1", "Mesh: data=1"):
        assert start in whole
    assert "Batch: 8 sequences of 32 tokens = 8 a microbatch * 1 accumulated * 1 shard" in whole
    summary = whole[whole.rindex("held-out loss:") :]
    for part in (
        "held-out bits per byte: ",
        "unigram model: ",
        "tokens/s",
        "checkpoint: ",
        "sample",
        "next: .venv/bin/python",
    ):
        assert part in summary
    asked = shlex.split(summary[summary.index("next: ") :].splitlines()[0])
    assert f"--workdir={place}/whole" in asked and re.fullmatch("--max_tokens=2[0-9]", asked[-1]), "of 32"


def test_metrics_hold_the_contract_and_the_loss_falls(place, whole):
    trained, evaluated = lines_of(place / "whole", "train"), lines_of(place / "whole", "eval")
    assert sorted(trained) == list(range(1, 13)) and sorted(evaluated) == [6, 12]
    assert all(line.keys() >= TRAIN_KEYS for line in trained.values())
    assert all(line["tokens"] == 8 * 32 for line in trained.values())
    assert trained[12]["total_tokens"] == 12 * 8 * 32
    assert trained[12]["loss"] < trained[1]["loss"] - 0.5
    assert 0 < trained[12]["goodput"] < 1
    assert evaluated[12]["eval_tokens"] > evaluated[6]["eval_tokens"] > 0
    assert list((place / "whole" / "tensorboard").glob("*tfevents*"))


def test_a_run_ends_with_a_report_of_itself(place, whole):
    page = (place / "whole" / "report.html").read_text()
    assert "<h1>Run whole</h1>" in page and "held-out bits per byte" in page and page.count("<svg") == 8
    assert "whole: finished, last line written " in page


def test_the_log_has_the_memory_of_the_host_at_each_logged_step_and_evaluation(place, whole):
    log = (place / "whole" / "logs" / "train_worker_0.out").read_text()
    form = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d - __main__ - INFO - Host memory usage: (\d+\.\d\d) GB$"
    told = [float(text) for text in re.findall(form, log, re.MULTILINE)]
    assert len(told) == 12 + 2 and "Host memory usage" not in whole, "and stdout has none"
    measured = lines_of(place / "whole", "train")[1]["host_memory_gib"] * 2**30 / 1e9
    assert told[0] == pytest.approx(measured, rel=0.05)


@pytest.fixture(scope="module")
def stopped(place) -> str:
    """The last line of stderr of a run in `place`/stopped, as long as `whole`, in tokens; it was continued.

    To continue it only the folder was named: what was typed at the start holds. A number of steps that it has passed
    changes nothing.
    """
    given = [a for a in arguments(place, "stopped", evaluation__sample_tokens=0) if "train.steps" not in a]
    run = ["train.py", *given, f"--config.train.tokens={12 * 8 * 32}"]
    process = command(*run, cache=place)
    while not any(line.startswith("step  3/12") for line in iter(process.stdout.readline, "")):
        assert process.poll() is None, process.stderr.read()
    process.send_signal(signal.SIGTERM)
    status, _, said = finish(process)
    assert status == 75
    workdir = f"--workdir={place / 'stopped'}"
    status, out, err = finish(command("train.py", workdir, "--config.train.steps=2", cache=place))
    assert status == 0 and re.search(r"train\.steps=2 has been passed\. Saved at step \d+; nothing was trained", out), (
        err
    )
    assert not (place / "stopped" / "summary.txt").exists(), "it has not finished"
    status, out, err = finish(command("train.py", workdir, cache=place))
    assert status == 0 and "step 12/12" in out, err
    return said.strip().splitlines()[-1]


def test_a_stopped_run_goes_on_bit_for_bit(place, whole, stopped):
    assert stopped.startswith("saved at step ") and stopped.endswith("; run the same command to continue")
    again, uninterrupted = lines_of(place / "stopped", "train"), lines_of(place / "whole", "train")
    for key in ("loss", "gradient_norm", "learning_rate", "total_tokens"):
        assert [again[s][key] for s in range(1, 13)] == [uninterrupted[s][key] for s in range(1, 13)]
    assert lines_of(place / "stopped", "eval")[12]["eval_loss"] == lines_of(place / "whole", "eval")[12]["eval_loss"]


def test_a_run_given_in_tokens_can_be_used_afterwards(place, stopped):
    status, _, err = finish(command("generate.py", f"--workdir={place / 'stopped'}", "--max_tokens=3", cache=place))
    assert status == 0, err


@pytest.mark.slow
def test_a_finished_run_prints_its_summary_again_and_a_longer_one_goes_on(place, whole):
    workdir = f"--workdir={place / 'whole'}"
    for typed in (arguments(place, "whole"), [workdir], [workdir, "--config=configs/tiny.py"]):
        status, out, err = finish(command("train.py", *typed, cache=place))
        assert status == 0 and whole[whole.rindex("held-out loss:") :].strip() in out, err
        assert "Finished at step 12; nothing was trained. --config.train.steps=24 continues the run." in out
    status, out, err = finish(command("train.py", workdir, "--config.train.steps=4", cache=place))
    assert status == 0 and "train.steps=4 has been passed. Finished at step 12; nothing was trained." in out, err
    assert "train.steps 12 -> 4 has no effect, since no step follows" in out and "from step 12 on" not in out
    status, out, err = finish(command("train.py", workdir, "--config.train.steps=14", cache=place))
    assert status == 0 and "step 14/14" in out and "step 12/" not in out, err
    assert "train.steps 12 -> 14 from step 12 on" in out


def test_another_recipe_is_refused_and_an_edited_one_does_not_change_the_run(place, whole):
    workdir, steps = f"--workdir={place / 'whole'}", lines_of(place / "whole", "train").keys()
    status, _, err = finish(command("train.py", workdir, "--config=configs/small.py", cache=place))
    assert status == 2 and "--config=configs/small.py is not the recipe of the run in" in err
    assert err.endswith("leave out --config to continue that run, or use a new --workdir\n")
    (place / "edited.py").write_text(
        "from configs import tiny\ndef get_config():\n    config = tiny.get_config()\n"
        "    config.train.steps = 999\n    return config\n"
    )
    status, out, err = finish(command("train.py", workdir, f"--config={place}/edited.py", cache=place))
    assert status == 0 and "edited.py says train.steps=999, but the run in" in out, err
    assert lines_of(place / "whole", "train").keys() == steps


def test_a_workdir_is_data_and_runs_no_code(place, whole):
    """An earlier version executed recipe.py of the folder; but the folder of a run may come from anyone."""
    folder = place / "foreign"
    shutil.copytree(place / "whole", folder)
    (folder / "recipe.py").write_text(f"open({str(place / 'ran')!r}, 'w')")
    (folder / "run.json").write_text(json.dumps({"recipe": str(folder / "recipe.py")}))
    for script in (["train.py"], ["train.py", "--evaluate_only"], ["generate.py", "--max_tokens=1"]):
        status, _, err = finish(command(*script, f"--workdir={folder}", cache=place))
        assert status == 0, err
    values = json.loads((folder / "config.json").read_text())
    for key in ("distillation.teacher", "train.init_from"):
        (folder / "config.json").write_text(
            json.dumps(values | {"train.objective": "distillation", key: str(folder / "recipe.py")})
        )
        for command_of_run in (["train.py"], ["train.py", "--evaluate_only"]):
            status, _, err = finish(command(*command_of_run, f"--workdir={folder}", cache=place))
            assert status == 2 and f"config.json: {key} should be the folder of a run, but is " in err
    assert not (place / "ran").exists()


def test_no_recipe_of_the_present_folder_runs_unless_it_is_typed(tmp_path, monkeypatch, capsys):
    """It may be a folder of data that somebody else made."""
    (tmp_path / "configs").mkdir()
    for name in ("tiny", "medium"):
        (tmp_path / "configs" / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "switches.json").write_text('{"sequence_length": 64}')
    for program in (["train.py"], ["scripts/deploy_optimizations.py", "--config=switches.json"]):
        words = [sys.executable, str(ROOT / program[0]), *program[1:], "--print_config"]
        done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0 and "model.embed_dim = " in done.stdout, done.stderr
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"optimizer__learning_rate": 0.5}, " with optimizer.learning_rate=0.003, now 0.5. Leave out --config.opt"),
        ({"checkpoint__resume": "false"}, "checkpoint.resume=false"),
        ({"data__path": "{place}/texts/1*.txt"}, "data.path"),
        (
            {"model__num_layers": 3},
            "model.num_layers=1, now 3. Leave out --config.model.num_layers to continue that run",
        ),
    ],
)
def test_another_run_is_refused_the_workdir(place, whole, changes, message, capsys, monkeypatch):
    changes = {key: str(value).format(place=place) for key, value in changes.items()}
    status, _, err = finish(command("train.py", *arguments(place, "whole", **changes), cache=place))
    assert status == 2 and message in err and len(err.strip().splitlines()) == 1


def test_evaluate_only_repeats_the_loss_and_takes_other_data(place, whole):
    workdir = f"--workdir={place / 'whole'}"
    loss = lines_of(place / "whole", "eval")[max(lines_of(place / "whole", "eval"))]["eval_loss"]
    status, out, err = finish(command("train.py", "--evaluate_only", workdir, cache=place))
    assert status == 0 and f"held-out loss: {loss:.4f} nats" in out, err
    other = place / "other.txt"
    other.write_text("qxz! " * 400)
    status, out, err = finish(
        command("train.py", "--evaluate_only", workdir, f"--config.data.path={other}", cache=place)
    )
    assert status == 0 and f"held-out loss: {loss:.4f}" not in out and "held-out bits per byte" in out, err
    assert "over 2,001 tokens of 1 documents" in out  # all of it, byte by byte
    for typed in ("--config.data.tokenizer=sentencepiece", "--config.model.num_layers=3"):
        status, _, err = finish(command("train.py", "--evaluate_only", workdir, typed, cache=place))
        assert status == 2 and "is fixed by the run in" in err


def test_evaluate_only_takes_longer_sequences_than_were_trained_also_in_parts(place, whole):
    typed = ("--evaluate_only", f"--workdir={place / 'whole'}", "--config.train.sequence_length=128")
    told = []
    for chunk in (0, 32):
        status, out, err = finish(command("train.py", *typed, f"--config.evaluation.chunk_tokens={chunk}", cache=place))
        assert status == 0, err
        told.append(out[out.index("held-out loss:") :])
    assert told[0] == told[1] and told[0].splitlines()[0] not in whole


def test_where_an_average_is_kept_the_loop_evaluates_it(single_device, tmp_path, monkeypatch):
    """With a decay that keeps it at the initial parameters, to which a run that learned has another loss."""
    evaluated = []
    monkeypatch.setattr(
        evaluators, "evaluate_heldout", lambda context, *_: evaluated.append(context.params) or ({"loss": 1.0}, 1)
    )
    monkeypatch.setattr(job, "sample_lines", lambda run, params, corpus: evaluated.append(params) or [])
    config = in_process(train__steps=3, optimizer__ema_decay=0.999999, data__source="text", data__path=str(tmp_path))
    config.optimizer.update(name="sgd", learning_rate=3.0)
    config.data.update(tokenizer="byte", cache_dir=str(tmp_path / "cache"))
    for number in range(40):
        (tmp_path / f"{number}.txt").write_text(f"{number} is a number\n" * 20)
    initial = assembly.assemble(config).init
    train.train(config, tmp_path / "run")
    with mesh_context(assembly.assemble(config).mesh):
        initial = initial().params
    assert len(evaluated) == 2
    for params in evaluated:
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, initial)


def test_a_model_that_cannot_generate_has_no_sample_and_no_command_for_one(single_device, tmp_path, monkeypatch):
    monkeypatch.setattr(job, "decodes", lambda graph: False)
    (tmp_path / "texts").mkdir()
    for number in range(40):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} is a number\n" * 20)
    config = in_process(train__steps=1, data__source="text", data__path=str(tmp_path / "texts"))
    config.data.update(tokenizer="byte", cache_dir=str(tmp_path / "cache"))
    assert config.evaluation.sample_tokens > 0
    train.train(config, tmp_path / "run")
    summary = (tmp_path / "run" / "summary.txt").read_text()
    assert "held-out loss" in summary and "sample (" not in summary and "generate.py" not in summary


def test_generate_is_greedy_reproducible_and_takes_several_prompts(place, whole):
    flags = (f"--workdir={place / 'whole'}", "--prompt=12 is ", "--prompt=9", "--max_tokens=5", "--temperature=0")
    outputs = [finish(command("generate.py", *flags, cache=place)) for _ in range(2)]
    assert outputs[0] == outputs[1] and outputs[0][0] == 0
    first, second = outputs[0][1].removesuffix("\n").split("\n---\n")
    assert len(first) == len("12 is ") + 5 and len(second) == len("9") + 5  # a byte a token
    streamed = finish(command("generate.py", flags[0], *flags[3:], "--prompt=12 is ", "--stream", cache=place))
    assert streamed == (0, f"{first}\n", outputs[0][2])


def in_process(**changes):
    """A configuration for the devices of this process, without a corpus."""
    config = base.get_config()
    for key, value in (SMALL | RISING | {k.replace("__", "."): v for k, v in changes.items()}).items():
        section, name = key.split(".")
        config[section][name] = value
    config.mesh.fsdp = len(jax.devices())
    config.logging.tensorboard = config.logging.report = False
    return config


def own_batches(config, steps: int):
    rng = np.random.default_rng(0)
    shape = (config.train.global_batch, config.train.sequence_length)
    for _ in range(steps):
        tokens = rng.integers(0, 7, shape).astype(np.int32)
        yield {
            "tokens": tokens,
            "targets": tokens,
            "segments": np.ones_like(tokens),
            "positions": np.broadcast_to(np.arange(shape[1], dtype=np.int32), shape),
        }


def test_the_loop_takes_batches_of_the_callers_own(single_device, tmp_path):
    config = in_process(train__steps=0, train__tokens=6 * 8 * 32)
    train.train(config, tmp_path, own_batches(config, 6))
    assert config.train.tokens == 6 * 8 * 32, "a second run of this configuration is as long"
    trained = lines_of(tmp_path, "train")
    assert sorted(trained) == [1, 2, 3, 4, 5, 6] and trained[6]["loss"] < trained[1]["loss"]
    assert (tmp_path / "checkpoints" / "6").is_dir()


def test_what_only_training_lacks_changes_no_folder(single_device, tmp_path, monkeypatch):
    """As a reward of a recipe that is not named; a run that has ended does not need it."""
    config, run = in_process(train__steps=2), tmp_path / "run"
    train.train(config, run, own_batches(config, 2))

    def contents():
        return {path: path.read_bytes() for path in run.iterdir() if path.is_file() and path.name != "lock"}

    before = contents()

    def refuse(objective):
        raise ConfigError("name the recipe")

    monkeypatch.setattr(LanguageModeling, "check_to_train", refuse)
    longer = in_process(train__steps=4)
    for workdir in (run, tmp_path / "new"):
        with pytest.raises(ConfigError, match="name the recipe"):
            train.train(longer, workdir, own_batches(longer, 4))
    assert contents() == before
    assert not (tmp_path / "new").exists()
    assert train.train(config, run, own_batches(config, 2)).reason == "nothing to train"


def test_no_value_of_a_step_is_waited_for_before_the_next_is_launched(single_device, tmp_path, monkeypatch):
    """Where devices queue their work; those of a CPU do not, so that the loop waits there before it launches."""
    launched, asked, read = [], [], []

    class Scalar:
        def __init__(self, value):
            self.value, self.step = value, len(launched)

        def copy_to_host_async(self):
            """Begin to copy, and wait for nothing."""

        def is_ready(self):
            asked.append((self.step, len(launched)))
            return True

        def __array__(self, *_, **__):
            read.append((self.step, len(launched)))
            return np.asarray(self.value)

    def watched(faults, train_step, job):
        monkeypatch.setattr(jax, "default_backend", lambda: "tpu")

        def step(state, batch):
            launched.append(step)
            state, scalars = train_step(state, batch)
            return state, jax.tree.map(Scalar, scalars)

        return step

    monkeypatch.setattr(train.Faults, "wrap", watched)
    config = in_process(train__steps=6, train__save_every=0)
    train.train(config, tmp_path, own_batches(config, 6))
    assert set(asked) == {(1, 2), (2, 3), (3, 4), (4, 5), (5, 6), (6, 6)}  # after the last there is no next
    assert {step for step, _ in read} == set(range(1, 7)) and all(ahead > step or step == 6 for step, ahead in read)


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing_of_it(single_device, tmp_path):
    """Batches from elsewhere come but once, so that there is no going back."""
    config = in_process(train__steps=9, optimizer__learning_rate=1e30, optimizer__clip_norm=0.0, train__save_every=1)
    config.train.bad_steps, config.optimizer.name = 3, "sgd"
    with pytest.raises(NonFinite, match=r"of 3 steps in a row were skipped .* at step \d, after 0 roll backs") as error:
        train.train(config, tmp_path, own_batches(config, 9))
    assert error.value.exit_status == 3
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest() < int(str(error.value).split(" at step ")[1].split(",")[0])


def test_steps_of_minutes_show_their_microbatches_and_are_each_saved(single_device, tmp_path, monkeypatch, capfd):
    config = in_process(train__steps=2, train__global_batch=32, train__save_every=0, optimizer__name="sgd")
    flops = assembly.assemble(config).flops_per_step
    monkeypatch.setattr(platform_defaults, "CPU_MICROBATCH_FLOPS", flops / 3)
    train.train(config, tmp_path, own_batches(config, 2))
    out = capfd.readouterr().out
    assert "= 8 a microbatch * 4 accumulated * 1 shard" in out
    assert "step 1/2: microbatch 4/4  loss " in out and "step 2/2: microbatch 1/4  loss " in out
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"1", "2"}


def test_the_length_of_a_run_in_tokens_and_epochs():
    class Windows:
        num_tokens = 1000

        def num_examples(self, length):
            return 1000 // length

    class Corpus:
        train, is_plain_text = Windows(), False

    config = in_process(train__steps=0, train__tokens=8 * 32 * 5 - 1)
    assert train.set_steps(config, None, None) == (0, 5) and config.train.tokens == 0
    config = in_process(train__steps=0, train__epochs=2.0)
    assert train.set_steps(config, Corpus(), None) == (0, 2 * 31 // 8)
    config = in_process(train__steps=0, train__epochs=0.2)
    with pytest.raises(ConfigError, match=r"train\.epochs=0\.2 of 31 rows is less than one step"):
        train.set_steps(config, Corpus(), None)
    Windows.num_examples = lambda self, length: 50_000_000
    config = in_process(train__steps=0, train__epochs=2.3)  # times 50,000,000 it is a little less than 115,000,000
    for done in (0, 115_000_000 // 8 - 1):
        record = {"step": done, "examples": 8 * done} if done else None
        assert train.set_steps(config.copy_and_resolve_references(), Corpus(), record)[1] == 115_000_000 // 8
    # Ten steps of four sequences are done; what is left of 80 sequences is five steps of eight.
    config = in_process(train__steps=0, train__tokens=80 * 32)
    assert train.set_steps(config, None, {"step": 10, "examples": 40}) == (10, 15)


def test_a_run_has_no_more_examples_than_it_can_count_whatever_its_batch_was_before():
    config = in_process(train__steps=2**31 - 1, train__global_batch=8)
    with pytest.raises(ConfigError, match=r"^after train\.steps=2147483647 the run would have had 17,179,869,176 "):
        train.set_steps(config, None, None)
    few, many = {"step": 3_000_000, "examples": 2**28}, {"step": 1_000_000, "examples": 4_096_000_000}
    config = in_process(train__steps=3_200_000, train__global_batch=2048)
    assert train.set_steps(config, None, few) == (3_000_000, 3_200_000)
    config = in_process(train__steps=2_000_000, train__global_batch=256)
    with pytest.raises(ConfigError, match=r"^after train\.steps=2000000 the run would have had 4,352,000,000 examples"):
        train.set_steps(config, None, many)


def test_two_processes_do_not_train_in_one_workdir_and_interrupting_twice_stops_at_once(place):
    endless = arguments(place, "twice", train__steps=100000)
    first = command("train.py", *endless, cache=place)
    while "step      2/" not in (line := first.stdout.readline()):
        assert line, first.stderr.read()
    status, _, err = finish(command("train.py", *endless, cache=place))
    assert status == 2 and " has been training in " in err and len(err.strip().splitlines()) == 1
    first.send_signal(signal.SIGINT)
    time.sleep(0.02)
    first.send_signal(signal.SIGINT)
    status, _, err = finish(first)
    assert status == 75 and err.strip().splitlines()[-1].endswith("run the same command to continue")


def test_a_step_of_minutes_is_not_waited_for(place):
    """A step of many microbatches: a stop within step 1 ends the process at once."""
    large = {"train__global_batch": 4096, "model__embed_dim": 128, "model__mlp_dim": 4096}
    long = arguments(place, "slow", data__source="synthetic", **large)
    of_texts = ("--config.data.path=", "--config.data.holdout_fraction=")
    long = [argument for argument in long if not argument.startswith(of_texts)]
    driver = (
        "import train; from core import command_line; from training import platform_defaults; "
        "platform_defaults.CPU_MICROBATCH_FLOPS = 1e8; train.main(command_line.parse(''))"
    )
    process = command("-c", driver, *long, cache=place)
    while "microbatch 3/" not in (line := process.stdout.readline()):
        assert line, process.stderr.read()
    process.send_signal(signal.SIGINT)
    started = time.monotonic()
    status, _, err = finish(process)
    assert status == 75 and time.monotonic() - started < 10
    assert err.strip().splitlines()[-1].startswith("stopped before the end of step 1")
