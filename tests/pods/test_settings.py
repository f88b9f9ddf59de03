# SPDX-License-Identifier: Apache-2.0
"""Flags win over the environment, which wins over defaults; what cannot be is answered in one line."""

import shlex
import subprocess

import pytest

from pods import hosts, recipes, settings
from pods.errors import PodError
from settings.environment import unread_lines

EARLIER = [
    "PROJECT", "ZONE", "NAME", "VERSION", "ACCEL", "PORT", "REPO_URL", "REPO_DIR", "PYTHON_BIN", "VENV_ACTIVATE",
    "COORDINATOR_WORKER", "MODEL_SIZE", "SEQ_LEN", "STEPS", "LR", "BATCH_SIZE", "PER_DEVICE_BATCH", "DTYPE",
    "DATASET", "CONFIG", "SPLIT", "TEXT_KEY", "DATASET2", "CONFIG2", "SPLIT2", "MIX_P2", "SPM_MODEL", "CKPT_OUT",
    "WORKDIR", "BUCKET", "ENABLE_OPTIMIZATIONS", "ENABLE_TPU_OPT", "ENABLE_NEUROPLASTICITY", "ENABLE_CAUSAL",
    "ENABLE_EVOLUTION", "ENABLE_META_LEARNING", "OPTIMIZATION_CONFIG", "POD_ROOT",
]  # fmt: skip
FITTING = {"NAME": "a-1", "DTYPE": "f32", "MODEL_SIZE": "tiny", "CONFIG": "realnewslike", "REPO_DIR": "/srv/x"}


def read(text: str = "", **environment: str) -> settings.Settings:
    return settings.read(shlex.split(text), environment)[0]


@pytest.mark.parametrize("name", EARLIER)
def test_every_variable_of_the_earlier_systems_is_read_and_a_flag_wins(name):
    default = settings.FIELDS[name.lower()].default
    one, two = ("false", "true") if isinstance(default, bool) else ("3", "4")
    one = FITTING.get(name, one)
    two = {"NAME": "b-2", "DTYPE": "bf16", "MODEL_SIZE": "small"}.get(name, two)
    from_environment = read(**{name: one})
    assert str(getattr(from_environment, name.lower())).lower() in (one, f"{one}.0")
    assert from_environment.origins[name.lower()] == "environment"
    both = read(f"--{name.lower()}={two}", **{name: one})
    assert str(getattr(both, name.lower())).lower() in (two, f"{two}.0")
    assert both.origins[name.lower()] == "flag" and both.given(name.lower())
    assert not read().given(name.lower()) and getattr(read(), name.lower()) == default


def test_evolution_is_off_by_default_and_the_others_on():
    switches = {name: getattr(read(), name) for name in settings.FIELDS if name.startswith("enable_")}
    assert [name for name, on in switches.items() if not on] == ["enable_evolution"]


MISTAKES = [
    ("--zon=a", {}, "--zon is not a flag; did you mean --zone"),
    ("--worker=worker-0", {}, "--worker=worker-0 is not all, a number, a range 0-3 or a list 0,2"),
    ("", {"STEPS": "many"}, "STEPS=many is not a whole number"),
    ("--lr=x", {}, "--lr=x is not a number"),
    ("--steps=-1", {}, "--steps=-1 must be at least 0"),
    ("", {"EVOLUTION_TRIALS": "0"}, "EVOLUTION_TRIALS=0 must be at least 1"),
    ("", {"ENABLE_CAUSAL": "maybe"}, "ENABLE_CAUSAL=maybe is neither true nor false"),
    ("", {"MODEL_SIZE": "mediun"}, "no recipe configs/mediun.py; did you mean medium"),
    ("--config=configs/larg.py", {}, "no recipe configs/larg.py; did you mean large"),
    ("--transport=ssh", {}, "TRANSPORT=ssh is not gcloud or local"),
    ("", {"DTYPE": "fp8"}, "DTYPE=fp8 is not bf16 or f32"),
    ("", {"NAME": "My Pod"}, "NAME=My Pod: use lowercase letters"),
    ("--tags=a,B", {}, "--tags=B: use lowercase letters"),
    ("--type=v4", {}, "--type and --topology must be given together"),
    ("--type=v5p --topology=2x2x1", {}, "--type=v5p: gcloud takes v2, v3 or v4; use ACCEL=v6e-8 for other types"),
    ("--slices=2", {}, "--slices=2 must be 1, or greater with --queued"),
    ("", {"REPO_DIR": "~me/x"}, "as ~/FOLDER"),
    ("--config.train.steps", {}, "has no value"),
]


@pytest.mark.parametrize("typed, environment, message", MISTAKES)
def test_mistakes_are_one_line(typed, environment, message):
    with pytest.raises(PodError) as error:
        read(typed, **environment)
    assert message in str(error.value) and "\n" not in str(error.value)
    assert error.value.exit_status == 2


def test_configuration_keys_go_through_to_the_run():
    given = read("--config.train.steps=5 --config.data.path='a b'")
    assert given.overrides == ("train.steps=5", "data.path=a b")


def test_config_is_the_data_sets_or_a_recipe():
    assert read(CONFIG="realnewslike").recipe == "configs/medium.py"
    assert read("--config=configs/tiny.py", MODEL_SIZE="large").recipe == "configs/tiny.py"


def test_experts_are_of_the_recipe_that_has_them():
    given = read(NUM_EXPERTS="6", MODEL_SIZE="small", ACCEL="v4-64")
    assert given.recipe == "configs/small_moe.py"
    assert recipes.training_keys(given) == {"model.num_experts": 6}
    words = recipes.arguments(given, {})
    assert "--config=configs/small_moe.py" in words and "--config.model.num_experts=6" in words
    assert "model.num_experts" not in recipes.training_keys(read())


def test_a_home_folder_that_the_shell_expanded_is_the_hosts(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert read(REPO_DIR="/home/me/aura_tpu").repo_dir == "~/aura_tpu"


def test_the_run_has_one_folder_for_all_hosts_or_one_of_each():
    assert read().run_folder() == "runs/medium"
    assert read(BUCKET="gs://b/", NAME="n").run_folder() == "gs://b/runs/n/medium"
    assert read(BUCKET="b", CKPT_OUT="models").run_folder() == "gs://b/runs/torus/models"
    assert read(WORKDIR="gs://c/x", CKPT_OUT="models", BUCKET="b").run_folder() == "gs://c/x"
    assert read("--transport=local --pod_root=/p").run_folder() == "/p/torus/shared/medium"
    assert read(BUCKET="b").shared_folder(4) == "gs://b/runs/torus/medium"
    assert read("--transport=local", WORKDIR="~/x").run_folder() == "~/x"
    per_host = {"models": True, "~/x": True, "/mnt/x": False, "gs://c/x": False}
    assert {folder: settings.is_per_host(folder, 4) for folder in per_host} == per_host
    assert not settings.is_per_host("models", 1)
    with pytest.raises(PodError, match="BUCKET=my-bucket") as error:
        read(CKPT_OUT="models").shared_folder(4)
    assert error.value.exit_status == 2


def test_the_software_of_the_hosts_is_that_of_the_chip_unless_it_is_set():
    """The table is in cloud.google.com/tpu/docs/runtimes."""
    lite, older = "v2-alpha-tpuv5-lite", "tpu-ubuntu2204-base"
    software = {"v6e-8": "v2-alpha-tpuv6e", "v5p-32": "v2-alpha-tpuv5", "v5e-16": lite, "v5litepod-16": lite}
    for accel, version in (software | {"v4-32": older, "v3-8": older}).items():
        assert read(ACCEL=accel).version == version
    assert read("--type=v4 --topology=2x2x4", ACCEL="v6e-8").version == older
    assert read("--version=mine", ACCEL="v6e-8").version == "mine"
    assert read(ACCEL="v6e-8", VERSION="").version == ""


def test_the_table_shows_each_value_and_where_it_is_from():
    lines = settings.lines(read("--zone=z", STEPS="7"))
    assert any("ZONE" in line and "z  (flag)" in line for line in lines)
    assert any("STEPS" in line and "7  (environment)" in line for line in lines)
    assert any("ACCEL" in line and "v4-32  (default)" in line for line in lines)


def test_variables_that_nothing_reads_are_reported():
    [line] = unread_lines({"PJRT_DEVICE": "TPU", "ZONE": "z"}, settings.UNREAD)
    assert line.startswith("PJRT_DEVICE=TPU is not read: ")


COMMANDS = {
    "launch": lambda s: hosts.launch(s, ["train", "it's"], environment={"A": "b c", "INDEX": hosts.WORKER_NUMBER}),
    "stop": hosts.stop,
    "status_line": lambda s: hosts.status_line(s, "~/torus/workers/$W.json"),
    "tail": lambda s: hosts.tail(s, follow=True),
    "setup": lambda s: hosts.setup(s, "https://example.com/x.git", "0" * 40),
    "count_devices": hosts.count_devices,
}


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("more", ["", "--venv_activate=~/my env/bin/activate --repo_dir=/srv/a b"])
def test_commands_of_the_hosts_are_one_line_that_a_posix_shell_reads(name, more):
    typed = ["--venv_activate=~/my env/bin/activate", "--repo_dir=/srv/a b"] if more else []
    command = COMMANDS[name](settings.read(typed, {})[0])
    assert "\n" not in command
    assert subprocess.run(["sh", "-n", "-c", command], capture_output=True, text=True).stderr == ""


def test_a_preset_sets_defaults_and_everything_that_is_typed_wins(tmp_path):
    production, development = read("--preset=production"), read("--preset=development")
    assert (production.recipe, production.enable_evolution) == ("configs/large.py", False)
    assert (development.recipe, development.enable_evolution) == ("configs/small.py", True)
    assert production.origins["model_size"] == "preset" and not production.given("model_size")
    assert read("--preset=research", MODEL_SIZE="tiny").recipe == "configs/tiny.py"
    (tmp_path / "switches.json").write_text('{"enable_evolution": false}')
    file = f"--optimization_config={tmp_path}/switches.json"
    assert recipes.resolved_switches(development).given["ENABLE_EVOLUTION"]
    assert not recipes.resolved_switches(read(f"--preset=development {file}")).given["ENABLE_EVOLUTION"]
    assert recipes.resolved_switches(read(f"--preset=development {file} --enable_evolution")).given["ENABLE_EVOLUTION"]
    with pytest.raises(PodError, match="PRESET=fast is not production or development or research"):
        read("--preset=fast")
