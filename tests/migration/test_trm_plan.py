# SPDX-License-Identifier: Apache-2.0
"""What the v4-64 plan says to type works as typed, in any Python, and does what the same line of Torus does."""

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from configs.errors import ConfigError
from migration import trm_plan
from studies import suites
from tests.studies.conftest import needs_optuna
from tests.support import ROOT

COMPILING = {
    "JAX_COMPILATION_CACHE_DIR": os.environ["JAX_COMPILATION_CACHE_DIR"],
    "XLA_FLAGS": " ".join(flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag),
}
PYTHON = sys._base_executable  # which .venv was made from, without its packages
SMALL = {  # the words of a run that takes seconds, by the reference's names where it has one
    "arch.hidden_size": 32, "arch.num_heads": 2, "arch.L_layers": 1, "arch.H_cycles": 1, "arch.L_cycles": 1,
    "arch.puzzle_emb_ndim": 0, "arch.forward_dtype": "float32", "arch.halt_max_steps": 3, "arch.mlp_t": "False",
    "ema": "False", "global_batch_size": 16, "lr_warmup_steps": 5, "lr": 0.001, "+model.vocab_size": 6,
    "model.max_length": 16, "train.sequence_length": 16, "data.puzzle_size": 4, "data.puzzle_clues": 6,
    "data.puzzle_count": 16, "data.puzzle_augmentations": 0, "data.puzzle_heldout": 20, "eval_interval": 2,
    "inference.puzzles": 0,
    "logging.report": "false", "logging.tensorboard": "false",
}  # fmt: skip


def type_line(line: str, home: pathlib.Path, *, cwd: pathlib.Path = ROOT) -> subprocess.Popen:
    """Start a line of the guide; the environment has what every shell sets, and how tests compile."""
    words = [word if cwd == ROOT or not (ROOT / word).is_file() else str(ROOT / word) for word in line.split()[1:]]
    return subprocess.Popen(
        [PYTHON, *words], cwd=cwd, env={"PATH": os.environ["PATH"], "HOME": str(home)} | COMPILING, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def done(line: str, home: pathlib.Path, **more) -> tuple[int, str, str]:
    """Return (exit status, stdout, stderr) of a line that has ended."""
    process = type_line(line, home, **more)
    out, err = process.communicate(timeout=240)
    return process.returncode, out, err


def test_the_stubs_are_short_and_know_only_the_adapter():
    for path in ("pretrain_jax.py", "update_experiment_gcs_paths.py", "kellen/experiments/run_experiment.py"):
        assert len((ROOT / path).read_text().splitlines()) <= 10, path


def test_pretrain_jax_can_be_imported_and_starts_nothing():
    command = [PYTHON, "-c", "import pretrain_jax"]
    code = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)  # training would go on
    assert (code.returncode, code.stdout, code.stderr) == (0, "", "")


@pytest.mark.parametrize("line, group", [
    ("python kellen/experiments/run_experiment.py baseline --dry-run", "baseline"),
    ("python kellen/experiments/run_experiment.py --config kellen/configs/exp01_model_scaling.yaml --dry-run",
     "exp01-model-scaling"),
])  # fmt: skip
def test_a_dry_run_shows_every_trial_of_the_group_and_writes_nothing(line, group, tmp_path):
    status, out, err = done(line, tmp_path, cwd=tmp_path)
    assert status == 0, err
    assert out.splitlines()[0] == f"this is: python sweep.py run {group} --dry-run"
    study, _ = suites.find(group)
    shown = re.findall(rf"^({group}/\S+) +8,138 ", out, re.MULTILINE)
    assert shown == [f"{group}/{name}" for name in study.groups[group].configurations]
    assert not list(tmp_path.glob("*.db")) and not (tmp_path / "runs").exists()


@needs_optuna
def test_the_experiment_of_the_plan_claims_its_first_trial_and_can_be_stopped(tmp_path):
    line = "python kellen/experiments/run_experiment.py --config kellen/configs/exp01_model_scaling.yaml"
    process = type_line(line, tmp_path, cwd=tmp_path)
    output, deadline = tmp_path / "runs/trm/baseline/baseline/output.txt", time.monotonic() + 240
    while not output.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    process.send_signal(signal.SIGTERM)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 75 and output.exists(), err
    assert "trm: 6 trials, 6 of them new" in out
    from studies.storage import open_storage
    from studies.trials import Queue

    trials = Queue(open_storage(f"sqlite:///{tmp_path}/studies.db", create=False), "trm", create=False).everything()
    names = [trial.user_attrs["configuration"] for trial in trials]
    assert names == ["baseline", "a-256", "b-384", "d-768", "e-1024", "f-1536"]  # c-512 equals the baseline
    assert trials[3].user_attrs["config"]["model.embed_dim"] == 768
    assert "ran_seconds" in trials[0].user_attrs and "ran_seconds" not in trials[1].user_attrs


def test_pretraining_by_name_is_the_run_of_the_baseline_with_100_epochs(tmp_path):
    line = "python pretrain_jax.py --config-name baseline epochs=100"
    status, out, err = done(f"{line} --print_config", tmp_path, cwd=tmp_path)
    assert status == 0, err
    resolved = dict(re.findall(r"^(\S+) = (\S+)  \(", out, re.MULTILINE))
    study, names = suites.find("baseline")
    (member,) = suites.members(study, names, overrides={"train.epochs": "100"})
    expected = {key: repr(value) for key, value in member.values.items() if " " not in repr(value)}
    assert resolved == expected | {"mesh.data": "-1"}  # it is printed as it was before the devices are known
    assert resolved["train.epochs"] == "100.0" and resolved["train.global_batch"] == "6144"


@pytest.mark.slow
def test_a_run_is_trained_with_the_keys_of_the_reference_and_its_folder_is_never_null(tmp_path):
    words = " ".join(f"{key}={value}" for key, value in SMALL.items())
    line = f"python pretrain_jax.py --config-name baseline epochs=2 {words}"
    status, _, err = done(line, tmp_path, cwd=tmp_path)
    assert status == 0, err
    folder = tmp_path / "runs" / "baseline" / "baseline"
    values = json.loads((folder / "config.json").read_text())
    wanted = {
        "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 256,
        "model.mixer": "attention", "optimizer.ema_decay": 0.0, "optimizer.learning_rate": 0.001,
        "train.global_batch": 16, "train.steps": 2, "supervision.max_steps": 3, "train.eval_every": 2,
    }  # fmt: skip
    assert {key: values[key] for key in wanted} == wanted
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "eval"][-1] == 2
    assert [path.name for path in (folder / "checkpoints").iterdir()] == ["2"]


def test_every_configuration_has_the_folder_that_its_trial_writes_to(tmp_path):
    status, out, err = done("python update_experiment_gcs_paths.py", tmp_path)
    assert status == 0, err
    listed = [line for line in out.splitlines() if line.startswith("gs://")]
    study, names = suites.find("trm")
    owners = suites.owners(suites.members(study, names)).values()
    assert len(listed) == len(set(listed)) == 67
    assert {suites.folder(trm_plan.BUCKET, member) + "/" for member in owners} <= set(listed)
    assert listed[0] == "gs://sculptor-tpu-experiments/checkpoints/contrib01-curriculum/baseline/"
    assert len({line.split("/")[4] for line in listed}) == 14


@pytest.mark.parametrize("planted, message", [
    ([("a", "")], "/a/ is the folder of a configuration without a name"),
    ([("", "b")], "//b is the folder of a configuration without a name"),
    ([("a", "b-seed1"), ("a", "c"), ("a", "b-seed1")], "/a/b-seed1 is the folder of two configurations; rename one"),
])  # fmt: skip
def test_a_null_or_double_path_is_named(planted, message):
    members = [suites.Member(group, name, 0, "", {}, {}) for group, name in planted]
    with pytest.raises(ConfigError, match=message):
        suites.folders(trm_plan.BUCKET, members)


def test_each_group_has_its_file_and_each_file_its_group():
    _, names = suites.find("trm")
    files = {path.stem: trm_plan.group_of(str(path)) for path in (ROOT / "kellen" / "configs").iterdir()}
    assert sorted(files.values()) == sorted([*names, "baseline"])
    assert all(stem.replace("_", "-") == group for stem, group in files.items())


@pytest.mark.parametrize("command, words, message", [
    ("pretrain_jax", "--config-name baselin", "did you mean baseline?"),
    ("pretrain_jax", "--config-name exp08_ema", "exp08_ema names several runs; choose one of exp08-ema/NAME: a-off, b"),
    ("pretrain_jax", "--config-name exp08_ema/f", "exp08_ema/f has no configuration f; choose one of exp08-ema/NAME"),
    ("pretrain_jax", "--config-name trm", "trm names several runs; choose one of GROUP/NAME: contrib01-c"),
    ("pretrain_jax", "epoch=100", "the TRM reference: epoch is not a key; did you mean epochs?"),
    ("pretrain_jax", "arch.H_cycle=2", "did you mean arch.H_cycles?"),
    ("pretrain_jax", "data_paths=[data/sudoku]", "=[data/sudoku] is not supported: type data.path=FOLDER"),
    ("pretrain_jax", "ema=maybe", "ema=maybe is not one of true, false"),
    ("pretrain_jax", "arch.hidden_size=wide", "arch.hidden_size=wide is not a whole number"),
    ("pretrain_jax", "checkpoint_path=null", "checkpoint_path=null is not a folder; omit it, or name one like gs"),
    ("pretrain_jax", "--config-name=", "--config-name has no value"),
    ("run_experiment", "", "takes GROUP, as baseline, or --config="),
    ("run_experiment", "baseline --config kellen/configs/baseline.yaml", "give one"),
    ("run_experiment", "--config kellen/configs/exp99.yaml", "exp99.yaml is not a file; kellen/configs/"),
    ("run_experiment", "--config README.md", "README.md cannot be read: "),
    ("run_experiment", "--config .ci", ".ci is not a file; "),
])  # fmt: skip
def test_mistakes_are_one_line_and_status_2(command, words, message):
    with pytest.raises(ConfigError) as error:
        trm_plan.COMMANDS[command](words.split())
    assert message in str(error.value) and "\n" not in str(error.value) and error.value.exit_status == 2


@pytest.mark.parametrize("line, message", [
    ("python pretrain_jax.py epoch=100", "error: the TRM reference: epoch is not a key; did you mean epochs?"),
    ("python update_experiment_gcs_paths.py --force", "error: --force is not a flag"),
])  # fmt: skip
def test_a_mistake_ends_the_command_with_one_line(line, message, tmp_path):
    status, _, err = done(line, tmp_path)
    assert status == 2 and err.startswith(message) and err.count("\n") == 1


def test_a_file_with_more_than_a_group_is_refused(tmp_path):
    (tmp_path / "x.yaml").write_text("group: exp08-ema\nepochs: 100\n")
    with pytest.raises(ConfigError, match="must hold `group: GROUP` alone; type keys after it, as epochs=100"):
        trm_plan.group_of(str(tmp_path / "x.yaml"))


@pytest.mark.parametrize("words, keys", [
    ("ema=False ema_rate=0.99", {"optimizer.ema_decay": "0.0"}),
    ("ema=True ema_rate=0.99", {"optimizer.ema_decay": "0.99"}),
    ("arch.num_heads=4", {"model.num_heads": "4", "model.num_kv_heads": "4"}),
    ("arch.hidden_size=768", {"model.embed_dim": "768", "model.mlp_dim": "2048", "model.puzzle_dim": "768"}),
    ("arch.loss.loss_type=softmax_cross_entropy", {"supervision.loss": "softmax"}),
    ("++data.path=gs://x/y=z", {"data.path": "gs://x/y=z"}),
])  # fmt: skip
def test_words_mean_these_keys(words, keys):
    command = trm_plan.training(["--config-name=baseline", *words.split()])
    assert command[3:] == [
        "--config.model.dtype=bfloat16", *(f"--config.{key}={value}" for key, value in keys.items())
    ]  # fmt: skip


def test_a_checkpoint_path_is_the_folder_of_the_run_and_flags_stay():
    path = "gs://sculptor-tpu-experiments/checkpoints/baseline/baseline"
    command = trm_plan.training([f"checkpoint_path={path}", "--topology", "v4-64", "lr=2e-4", "--tune"])
    assert command == [
        "train.py", "--config=configs/trm/sudoku.py", f"--workdir={path}", "--topology", "v4-64", "--tune",
        "--config.model.dtype=bfloat16", "--config.optimizer.learning_rate=2e-4",
    ]  # fmt: skip


def test_the_page_has_every_promise_and_every_line():
    page = (ROOT / "docs" / "coming_from_the_v4_64_plan.md").read_text()
    assert re.findall(r"^\| (D\d+) \|", page, re.MULTILINE) == [f"D{number}" for number in range(1, 35)]
    typed = re.findall(r"^\| `python (?!-)(\S+\.py)([^`]*)` \|", page, re.MULTILINE)
    assert [path for path, _ in typed] == [
        "pretrain_jax.py", *["kellen/experiments/run_experiment.py"] * 2, "update_experiment_gcs_paths.py",
    ]  # fmt: skip
    for path, words in typed:  # each is a test above
        assert f"python {path}{words}" in pathlib.Path(__file__).read_text()


def test_figures_of_the_page_are_those_of_the_benchmark():
    page = (ROOT / "docs" / "coming_from_the_v4_64_plan.md").read_text()
    section = (ROOT / "benchmarks" / "RESULTS.md").read_text().partition("\n## trm_plan\n")[2].partition("\n## ")[0]
    figures = {name: float(value) for name, value in re.findall(r"^\| (\w+) \| ([\d.]+) \|$", section, re.MULTILINE)}
    for name in (
        "step_ms", "forward_ms", "backward_ms", "update_ms", "step_ms_at_peak", "exchange_ms", "exposed_exchange_ms",
        "examples_per_second", "gib_a_chip", "gib_a_worker", "hours_of_the_whole_run", "largest_batch",
        "largest_batch_gib_a_chip", "largest_width", "largest_width_gib_a_chip",
    ):  # fmt: skip
        shown = f"{figures[name]:,.0f}" if figures[name] >= 1000 else f"{figures[name]}"
        assert re.search(rf"(?<![\d.]){re.escape(shown)}(?![\d.]*\d)", page), name
