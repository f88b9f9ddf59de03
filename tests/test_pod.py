# SPDX-License-Identifier: Apache-2.0
"""The command line of pod.py: what is typed wrongly is one line, status 2, and gcloud is never called."""

import importlib
import inspect
import json
import os
import re
import subprocess
import sys

import pytest

import pod
from pods import settings, switches
from tests.pods.recording import BASE, OPTIMIZED, Recorder
from tests.support import ROOT

TYPED = {"copy": ["pod.py", "torus:~/x"], "ssh": ["--", "ls"]}
CALLING = [name for name, subcommand in pod.SUBCOMMANDS.items() if subcommand.calls]


@pytest.fixture
def gcloud(tmp_path):
    return Recorder(tmp_path)


@pytest.mark.parametrize("name", CALLING)
def test_without_zone_or_project_nothing_is_called(gcloud, name):
    for variable in ("ZONE", "PROJECT"):
        done = gcloud.run(name, *TYPED.get(name, []), **{variable: "-"})
        assert (done.status, done.calls) == (2, []), done.stderr
        assert done.stderr == f"error: {variable} is not set: export {variable}=... or give --{variable.lower()}=...\n"
    both = gcloud.run(name, *TYPED.get(name, []), ZONE="-", PROJECT="-")
    said = "ZONE and PROJECT are not set: export ZONE=... PROJECT=... or give --zone=... --project=..."
    assert (both.status, both.calls, both.stderr) == (2, [], f"error: {said}\n")


@pytest.mark.parametrize("entry", [BASE, OPTIMIZED])
def test_nor_by_the_scripts(gcloud, entry):
    done = gcloud.run("create", entry=entry, ZONE="-")
    assert (done.status, done.calls) == (2, []) and done.last_line.startswith("error: ZONE is not set")


MISTAKES = [
    (["descibe"], "descibe is not a subcommand; did you mean describe"),
    (["launch-optimized"], "did you mean launch_optimized"),
    (["describe", "--zonne=a"], "--zonne is not a flag; did you mean --zone"),
    (["create", "--dry-runn"], "did you mean --dry_run"),
    ([], "no subcommand is given"),
    (["stop", "--worker=1"], "stop does not take --worker, which is for copy, ssh, tail"),
    (["restart", "--config.train.steps=9"], "restart does not take --config.train.steps, which is for create, "),
    (["launch", "--watch"], "launch does not take --watch, which is for status, metrics"),
    (["describe", "torus"], "describe does not take the argument 'torus'"),
    (["describe", "--", "ls"], "describe takes no command after --"),
    (["ssh", "ls"], "write a command after --: pod.py ssh -- ls"),
    (["ssh"], "ssh takes a command: pod.py ssh [--worker=0] -- COMMAND"),
    (["ssh", "--worker=worker-0", "--", "ls"], "--worker=worker-0 is not all"),
    (["copy", "torus:/a"], "copy takes a source and a target, one of them torus:PATH; got 1 path"),
    (["copy", "a", "b"], "one of the two must be on the pod, as torus:PATH"),
    (["copy", "torus:a", "torus:b"], "one of the two must be on the pod"),
    (["copy", "gs://b/x", "torus:b"], "copy a bucket with `gcloud storage cp`"),
    (["copy", "no_such_file", "torus:b"], "there is no no_such_file here"),
    (["copy", "--name=mine", "pod.py", "torus:b"], "the pod is mine, not torus"),
    (["backup", "a", "b"], "backup takes one folder"),
    (["manifest"], "one of --gke and --slurm"),
    (["create", "--steps=few"], "--steps=few is not a whole number"),
]


@pytest.mark.parametrize("words, message", MISTAKES, ids=[" ".join(words) for words, _ in MISTAKES])
def test_a_mistake_is_one_line_and_nothing_is_called(gcloud, words, message):
    done = gcloud.run(*words)
    assert (done.status, done.calls, done.stdout) == (2, [], "")
    assert message in done.stderr and len(done.stderr.splitlines()) == 1


def test_an_empty_version_lists_them_and_stops(gcloud):
    done = gcloud.run("create", VERSION="")
    assert done.status == 2 and [argv[3:5] for argv in done.argvs] == [
        ["versions", "list"],
        ["accelerator-types", "list"],
    ]


def test_without_gcloud_it_is_told(gcloud):
    done = gcloud.run("describe", PATH=str(gcloud.folder))
    assert (done.status, len(done.stderr.splitlines())) == (1, 1)
    assert "gcloud is not installed here" in done.stderr


@pytest.mark.parametrize("words", [["help"], ["--help"], ["launch", "-h"]])
def test_help_lists_every_subcommand_and_every_variable_with_its_origin(gcloud, words):
    done = gcloud.run(*words, ZONE="-", PROJECT="-", MODEL_SIZE="large")
    assert (done.status, done.calls) == (0, [])
    lines = [line.split() for line in done.stdout.splitlines()]
    for name in pod.SUBCOMMANDS:
        assert any(line[:1] == [name] and len(line) > 1 for line in lines), name
    for name in settings.FIELDS:
        assert any(line[:1] == [f"--{name}"] for line in lines), name
    assert ["--model_size", "MODEL_SIZE", "large", "(environment)"] in [line[:4] for line in lines]


@pytest.mark.parametrize("alias", ["launch_pretrain_hf_optimized", "launch_pretrain_optimized"])
def test_the_earlier_aliases_launch_the_optimized_run(gcloud, alias):
    common = {"entry": OPTIMIZED}
    done = gcloud.run(alias, "--dry-run", **common)
    assert done.status == 0 and "logs/train_optimized_worker_" in done.stdout, done.stderr
    assert done.stdout == gcloud.run("launch_optimized", "--dry-run", **common).stdout


GUIDE = {"NAME": "aura-v4-32", "VERSION": "tpu-ubuntu2204-base"}  # all that its lines set, except PROJECT and ZONE
ORIGIN = {"REPO_URL": "https://example.com/x"}  # in place of the origin that the clone of a user has
MIGRATION = {  # what the earlier guides type
    OPTIMIZED: "create setup setup_optimizations validate launch_optimized launch_pretrain_hf status metrics describe "
    "stop backup versions tail delete help",
    BASE: "create describe setup stop launch_pretrain_hf",
}


LAUNCHED = {  # as pods/launch.py keeps it
    "subcommand": "launch_optimized", "words": ["python", "train.py"], "environment": {}, "workdir": "gs://b/models",
    "log": "train_optimized_worker", "switches": None, "recipe": "configs/tiny.py", "accelerator": "v4-32",
    "commit": "0" * 40, "changed": [], "time": 0.0,
}  # fmt: skip


@pytest.mark.parametrize("entry", MIGRATION)
def test_every_subcommand_of_the_earlier_guides_can_be_typed(gcloud, entry):
    """Each is understood and dry-run, where that needs no answer from a pod; what it does is tested with each."""
    record = gcloud.folder / "pods" / "aura-v4-32" / "launch.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps(LAUNCHED))
    for name in MIGRATION[entry].split():
        done = gcloud.run(name, "--dry-run", entry=entry, **GUIDE, **ORIGIN)
        assert done.calls == [] and "Traceback" not in done.stderr, (name, done.stderr)
        assert done.status == 0, (name, done.stderr)


@pytest.mark.parametrize("name", ["launch", "launch_optimized", "launch_pretrain_hf", "validate"])
def test_without_a_bucket_the_run_is_in_the_folder_of_the_guide_on_each_host(gcloud, name):
    done = gcloud.run(name, "--dry-run", entry=OPTIMIZED, **GUIDE)
    assert done.status == 0, done.stderr
    folder = "models-readiness-[0-9a-f]{6}" if name == "validate" else "models"
    assert re.search(rf" --workdir={folder} .*--config\.checkpoint\.per_host=True ", done.stdout)
    lost = "in ~/aura_tpu/models; they are lost with the pod unless BUCKET is set"
    assert (lost in done.stdout + done.stderr) == (name != "validate")
    for shared in ({"BUCKET": "b"}, {"WORKDIR": "/mnt/all/x"}, {"ACCEL": "v4-8"}):
        done = gcloud.run(name, "--dry-run", entry=OPTIMIZED, **GUIDE | shared)
        assert (done.status, "per_host" in done.stdout, lost in done.stderr) == (0, False, False), done.stderr


def test_a_search_needs_a_folder_that_all_hosts_share(gcloud):
    done = gcloud.run("launch_optimized", "--dry-run", entry=OPTIMIZED, **GUIDE, ENABLE_EVOLUTION="true")
    assert done.status == 2 and "aura-v4-32 has 4 hosts, and each would write its own" in done.last_line


def test_a_dry_run_of_metrics_knows_the_folder_of_the_run(gcloud):
    record = gcloud.folder / "pods" / "torus" / "launch.json"
    record.parent.mkdir(parents=True)
    record.write_text(json.dumps(LAUNCHED))
    done = gcloud.run("metrics", "--dry-run")
    assert done.status == 0, done.stderr
    assert "gs://b/models/metrics.jsonl" in done.stdout and "gs://b/models/config.json" in done.stdout


def test_recipes_alone_are_offered(gcloud):
    said = gcloud.run("launch", MODEL_SIZE="tinny").last_line
    assert "did you mean tiny? " in said
    assert not {"base", "loading"} & set(re.findall(r"\w+", said.partition("all: ")[2]))


def test_the_scripts_can_be_executed():
    assert all(os.access(ROOT / entry, os.X_OK) for entry in (BASE, OPTIMIZED))


@pytest.mark.parametrize("name", [name for name, each in pod.SUBCOMMANDS.items() if each.function])
def test_the_function_of_every_subcommand_is_there(name):
    module, _, function = pod.SUBCOMMANDS[name].function.rpartition(".")
    found = getattr(importlib.import_module(f"pods.{module}"), function)
    assert list(inspect.signature(found).parameters) == ["settings", "transport", "rest"]
    assert inspect.getdoc(found)


def test_it_answers_without_jax_and_tensorflow():
    program = (
        "import pod, sys; from pods import backup, life, launch, gcloud, local, manifests; print(sorted(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"jax", "tensorflow", "numpy", "flax"} & set(eval(done.stdout))


def test_an_error_of_ours_ends_with_its_place(monkeypatch, capsys):
    try:
        raise KeyError("what")
    except KeyError as error:
        pod.end_with_one_line(KeyError, error, error.__traceback__)
    assert capsys.readouterr().err.splitlines()[-1].startswith("error: KeyError: 'what' (test_pod.py:")


def test_the_subcommands_of_the_issue_are_all_there():
    wanted = (
        "versions create wait describe setup setup_optimizations validate launch launch_optimized launch_pretrain_hf "
    )
    wanted += "supervise status metrics tail copy ssh backup stop restart delete help manifest"
    assert set(wanted.split()) == set(pod.SUBCOMMANDS)


def test_the_folder_that_the_guide_lists_names_where_each_mechanism_is():
    """`ls -la ~/aura_tpu/src/aura/optimization/` is a line of AURA's guide."""
    folder = ROOT / "src" / "aura" / "optimization"
    text = (folder / "README.md").read_text()
    modules = {"tpu_optimizer", "neuroplasticity", "causal_reasoning", "evolutionary_experts", "meta_learning"}
    assert {f"{name}.py" for name in modules} == set(re.findall(r"^\| `(\w+\.py)`", text, re.MULTILINE))
    assert {f"`{switch}`" for switch in switches.SWITCHES} <= set(re.findall(r"`\w+`", text))
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) > 7 and all((folder / link).exists() for link in links)
