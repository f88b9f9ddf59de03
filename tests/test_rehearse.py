# SPDX-License-Identifier: Apache-2.0
"""rehearse.py as its users meet it: real processes and the real TPU compiler, on small models."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import time
import types

import pytest

import rehearse as command
import train
from cluster import identity
from cluster.hub import RunError
from configs import base, topologies
from configs.errors import ConfigError
from core import assembly, layout_proof
from rehearsal import compilation, compiler, hlo, record
from settings import loading, validation
from tests.support import ROOT

CONTRACT = {
    "fits", "hbm_gib", "step_seconds", "mfu", "tokens_per_second", "tokens_per_second_per_device", "collectives",
    "exposed_communication_seconds", "flops_model", "flops_hardware", "cost_per_billion_tokens", "advice",
}  # fmt: skip
SMALL = ("--config=configs/tiny.py", *(f"--config.{key}={value}" for key, value in record.SMALL.items()))


@pytest.fixture(scope="module")
def rehearse(tmp_path_factory):
    """Run rehearse.py with a cache of this module; returns (status, stdout, stderr)."""
    cache = tmp_path_factory.mktemp("cache")

    def run(*arguments: str) -> tuple[int, str, str]:
        environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
        done = subprocess.run(
            [sys.executable, "rehearse.py", *arguments], cwd=ROOT, env=environment | {"XDG_CACHE_HOME": str(cache)},
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        return done.returncode, done.stdout, done.stderr

    run.cache = cache
    return run


@pytest.fixture(scope="module")
def rehearsed(rehearse, tmp_path_factory):
    """A small model on v4-8, all files asked for, where a damaged compilation was in its place: (folder, stdout)."""
    folder = tmp_path_factory.mktemp("report")
    place(rehearse.cache).mkdir(parents=True)
    for name in ("facts.json", "program.txt.gz"):
        (place(rehearse.cache) / name).write_text("{")
    files = [f"--{name}={folder}/r.{name}" for name in ("json", "html", "hlo")]
    status, out, err = rehearse(*SMALL, "--topology=v4-8", "--advice_seconds=0", "--checklist", *files)
    assert status == 0, err
    return folder, out


def place(cache: pathlib.Path) -> pathlib.Path:
    """Return where the compilation of the small model on v4-8 is kept."""
    typed = dict(argument.removeprefix("--config.").split("=") for argument in SMALL[1:])
    loaded = loading.load("configs/tiny.py", "v4-8", typed)
    validation.validate(loaded.config, loaded.topology.chips, loaded)
    return compiler.Compiler(cache / "torus" / "rehearsals").folder(loaded.config, loaded.topology)


def test_the_checklist_judges_ten_points(rehearsed):
    folder, out = rehearsed
    points = {point["name"]: point for point in json.loads((folder / "r.json").read_text())["checklist"]}
    assert len(points) == 10 and "points hold" in out
    assert points["one reduction of gradients"]["holds"] and points["state updated in place"]["holds"]
    assert points["full matrix units"]["evidence"] in " ".join(out.split())


def test_the_report_keeps_its_contract(rehearsed):
    report = json.loads((rehearsed[0] / "r.json").read_text())
    hbm = report["hbm_gib"]
    assert report.keys() >= CONTRACT
    assert hbm.keys() >= {"parameters", "optimizer", "activations_and_temporaries", "total", "capacity"}
    assert report["fits"] is True
    assert hbm["capacity"] == 32
    parts = hbm["parameters"] + hbm["optimizer"] + hbm["batch"] + hbm["activations_and_temporaries"]
    assert parts == pytest.approx(hbm["total"])
    assert hbm["parameters"] == pytest.approx(4 * report["num_parameters"] / 4 / 2**30, rel=0.01)  # float32 on 4 chips
    assert 0 < report["mfu"] <= report["hardware_utilisation"] < 1
    assert report["flops_model"] / report["step_seconds"] / 275e12 == pytest.approx(report["mfu"])
    assert report["tokens_per_second"] == pytest.approx(64 * 128 / report["step_seconds"])
    assert report["tokens_per_second_per_device"] == pytest.approx(report["tokens_per_second"] / 4)
    dollars = 4 * 3.22 / 3600 * 1e9 / report["tokens_per_second"]
    assert report["cost_per_billion_tokens"] == pytest.approx(dollars)
    assert {c["axes"] for c in report["collectives"]} == {"fsdp"}
    assert any(o["source"].startswith("layers/mlp.py:") for o in report["operations"])


def test_every_phase_of_the_run_has_a_verdict(rehearsed):
    folder, out = rehearsed
    report = json.loads((folder / "r.json").read_text())
    phases = {row["phase"]: row for row in report["phases"]}
    assert list(phases) == ["step", "evaluation", "sample", "save", "restore"]
    assert phases["step"]["chip_gib"] == pytest.approx(report["hbm_gib"]["total"])
    state = report["hbm_gib"]["parameters"] + report["hbm_gib"]["optimizer"]
    assert phases["save"]["chip_gib"] == pytest.approx(state, rel=0.01)
    assert phases["save"]["host_gib"] == pytest.approx(4 * state + 8, rel=0.01), "four chips a host"
    assert state < phases["evaluation"]["chip_gib"] < phases["step"]["chip_gib"]
    assert "FITS: every phase of the run" in out and "every phase of the run" in (folder / "r.html").read_text()


def test_all_time_is_accounted_for(rehearsed):
    report = json.loads((rehearsed[0] / "r.json").read_text())
    assert sum(report["seconds_by_category"].values()) == pytest.approx(report["step_seconds"], rel=1e-6)


def test_a_small_step_costs_what_is_recorded(rehearsed):
    """So that a change that makes steps dearer is seen; tests/rehearsal/test_record.py has what is caught."""
    recorded = json.loads((record.FOLDER / "tiny_remat_v4-8.json").read_text())
    now = record.figures(json.loads((rehearsed[0] / "r.json").read_text()))
    other = record.other_versions(recorded, compiler.versions())
    assert record.changes(recorded["figures"], now) == [], other or "python benchmarks/record.py"


def test_the_program_is_the_scheduled_one_with_the_attention_kernel(rehearsed):
    text = (rehearsed[0] / "r.hlo").read_text()
    assert "is_scheduled=true" in text.splitlines()[0]
    assert "tpu_custom_call" in text and "splash" in text


def test_what_is_printed_says_what_a_stranger_needs(rehearsed):
    out = rehearsed[1]
    for words in ("FITS:", "of 32 GiB a chip", "TIME:", "an estimate from the schedule of the TPU compiler", "COST: $"):
        assert words in out
    assert "<svg" in (rehearsed[0] / "r.html").read_text()


def test_the_second_time_comes_from_the_cache(rehearse, rehearsed, tmp_path):
    before = sorted(rehearse.cache.rglob("facts.json"))
    start = time.monotonic()
    status, out, _ = rehearse(*SMALL, "--topology=v4-8", "--advice_seconds=0", "--price=1", f"--json={tmp_path}/r.json")
    assert time.monotonic() - start < 3 * 3  # alone it takes under a second; other tests may run at the same time
    assert status == 0 and out.startswith("tiny on v4-8") and "as given by --price" in out
    assert sorted(rehearse.cache.rglob("facts.json")) == before


def damage(file: pathlib.Path) -> None:
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


@pytest.mark.parametrize("name", ["estimate-*.json", "advice-*.json"])
def test_a_damaged_file_of_the_cache_is_made_again(rehearse, rehearsed, name):
    """Without a word: what is lost is time alone."""
    damage(next(iter(rehearse.cache.rglob(name))))
    status, out, err = rehearse(*SMALL, "--topology=v4-8", "--advice_seconds=0")
    assert status == 0, err
    assert "FITS:" in out


def test_a_damaged_compilation_is_made_again(rehearse, rehearsed, tmp_path):
    """Whichever of its files it is; the first rehearsal here found one in its place."""
    folder = place(rehearse.cache)
    assert compiler.is_whole(folder)
    for name in ("facts.json", "program.txt.gz"):
        damage(shutil.copytree(folder, tmp_path / name) / name)
        assert not compiler.is_whole(tmp_path / name)


def collectives(text: str) -> dict[str, float]:
    """Return how often each collective of a program runs in a step, one that goes on over several fusions once."""
    module, runs = hlo.parse(text), {}

    def count(computation: str, times: float, fused: bool = False) -> None:
        for i in module.computations[computation]:
            if hlo.collective_kind(i):
                channel = (fused and i.attribute(r"channel_id=(\d+)")) or i.name  # outside of fusions many share one
                runs[channel] = max(runs.get(channel, 0), times)
            trips = module.trip_count(i) if i.opcode == "while" else 1
            for kind, names in i.called.items():
                for name in names if kind in ("calls", "body", "branch_computations") else ():
                    count(name, times * trips, i.opcode == "fusion")

    count(module.entry, 1)
    return runs


@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "changes"),
    [("v4-8", ()), ("v5e-8", ("--config.optimizer.name=sgd", "--config.train.global_batch=8"))],  # not compiled before
    ids=["v4-8", "v5e-8"],
)
def test_no_collective_is_overlooked(rehearse, rehearsed, tmp_path, topology, changes):
    """In each form that the compiler gives them: alone, asynchronous, in a fusion, or in a chain of fusions."""
    files = [f"--{name}={tmp_path}/r.{name}" for name in ("json", "hlo")]
    status, _, err = rehearse(*SMALL, *changes, f"--topology={topology}", "--advice_seconds=0", *files)
    assert status == 0, err
    report = json.loads((tmp_path / "r.json").read_text())
    runs = collectives((tmp_path / "r.hlo").read_text())
    assert sum(c["count"] for c in report["collectives"]) == sum(runs.values()) > 20


@pytest.mark.slow
def test_what_does_not_fit_is_a_verdict_with_what_would(rehearse, tmp_path):
    """Out of memory in the compiler is an answer: status 0, the amount, and the smallest changes in their order."""
    large = ("--config.train.global_batch=131072", "--config.model.remat=dots")
    files = [f"--{name}={tmp_path}/r.{name}" for name in ("json", "html")]
    status, out, err = rehearse(*SMALL, "--topology=v4-8", "--advice_seconds=0", *files, *large)
    report = json.loads((tmp_path / "r.json").read_text())
    assert status == 0, err
    assert report["fits"] is False and report["hbm_gib"]["total"] > 32 and report["step_seconds"] is None
    assert "DOES NOT FIT" in out
    assert [next(iter(r["keys"])) for r in report["remedies"]][:2] == ["train.gradient_accumulation", "model.remat"]
    assert not any(r["verified"] for r in report["remedies"])  # in no time


@pytest.mark.slow
def test_a_layout_is_proved_on_simulated_chips(rehearse, tmp_path):
    """By a process that has one CPU device otherwise."""
    mesh = ("--config.mesh.fsdp=2", "--config.mesh.model=2", "--config.optimizer.name=sgd")
    status, out, err = rehearse(*SMALL, *mesh, "--topology=v4-8", "--prove", f"--json={tmp_path}/proof.json")
    assert status == 0, err
    assert "The layout (fsdp=2 * model=2) computes what one device computes" in out
    assert json.loads((tmp_path / "proof.json").read_text())["differences"] == {"fsdp=2 * model=2": []}


def test_a_layout_that_computes_something_else_is_a_failure(monkeypatch, capsys):
    """Status 1, with a line for each array; tests/parallelism/test_proof.py finds the arrays."""
    monkeypatch.setattr(command.startup, "simulate", lambda chips: chips)  # this process has its devices
    monkeypatch.setattr(command.startup, "update_imported_jax", lambda **values: None)
    monkeypatch.setattr(layout_proof, "layout_differences", lambda config: ["gradient norm.scale: relative"])
    monkeypatch.setattr(command, "FLAGS", types.SimpleNamespace(json=""))
    loaded = loading.load("configs/tiny.py", "v4-8", {})
    with pytest.raises(RunError, match=r"the layout \(fsdp=4\) does not compute what one device computes"):
        command.prove(loaded, types.SimpleNamespace(line=print))
    assert "gradient norm.scale" in capsys.readouterr().out


def test_what_the_mesh_does_not_divide_is_one_line(rehearse):
    sizes = ("--config.model.embed_dim=254", "--config.model.head_dim=128")
    status, _, err = rehearse(*SMALL, "--topology=v4-8", *sizes)
    assert status == 2 and "mesh.fsdp=4 does not divide" in err and len(err.strip().splitlines()) == 1


def test_a_missing_compiler_is_told_with_how_to_install_it(monkeypatch):
    monkeypatch.setattr(compiler.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"libtpu, which is not installed here; `make setup` installs it"):
        compiler.check_compiler(topologies.get("v4-8"))


def configuration(**keys):
    config = base.get_config()
    config.model.update(num_layers=1, embed_dim=32, num_heads=2, num_kv_heads=2, mlp_dim=48, vocab_size=300)
    config.train.update(global_batch=8, sequence_length=32, steps=2, eval_every=0)
    config.data.update(source="synthetic", tokenizer="byte")
    config.evaluation.sample_tokens, config.optimizer.name = 0, "sgd"
    config.model.update(keys)
    return config


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("raise SystemExit(print('Traceback:\\n  File x\\nValueError: broken kernel\\nmore') or 1)",
         "ended with status 1: ValueError: broken kernel"),
        ("raise SystemExit(print('F1128 18:52:37 utils.cc:79] Check failed: a == b\\n@ 0x7f3\\nE1128 RAW: hook') or 1)",
         "ended with status 1: F1128 18:52:37 utils.cc:79. Check failed: a == b"),
        ("import os; os.kill(os.getpid(), 9)", "ended with status -9: it printed nothing"),
    ],
)  # fmt: skip
def test_a_failing_compiler_is_one_line_and_leaves_nothing(monkeypatch, tmp_path, script, says):
    """The first line that says what is wrong, not the 300 that lead to it."""
    (tmp_path / "python").write_text(f"#!/usr/bin/env python3\n{script}\n")  # no path of ours, which may have spaces
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(compiler.sys, "executable", str(tmp_path / "python"))
    config = configuration()
    validation.resolve_mesh(config, 4)
    with pytest.raises(compiler.CompileError, match=says):
        compiler.Compiler(tmp_path / "cache").compile(config, topologies.get("v4-8"))
    assert not list((tmp_path / "cache").glob("*"))


def test_another_precision_of_products_is_another_compilation(tmp_path, monkeypatch):
    def folder(precision: str = ""):
        return compiler.Compiler(tmp_path, precision=precision).folder(configuration(), topologies.get("v4-8"))

    monkeypatch.delenv(identity.PRECISION, raising=False)
    of_layers, default = folder(), folder("default")
    monkeypatch.setenv(identity.PRECISION, "default")
    assert folder() == default != of_layers and folder("highest") not in (of_layers, default)


def test_an_evaluation_is_compiled_in_the_parts_that_the_run_computes():
    """A step does not depend on them. All at once, an evaluation may need more memory than in parts."""
    whole, in_parts = configuration(), configuration()
    in_parts.evaluation.chunk_tokens = 8
    call = compiler.Call(compiler.EVALUATION, 1, 32, "model")
    sent = [compiler._request(config, topologies.get("v4-8"), call)["config"] for config in (whole, in_parts)]
    assert [keys["evaluation.chunk_tokens"] for keys in sent] == [0, 8]
    of_step = [compiler._request(config, topologies.get("v4-8")) for config in (whole, in_parts)]
    assert of_step[0] == of_step[1]


def test_a_teacher_is_found_from_the_callers_folder_and_what_its_recipe_imports_counts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "teacher.py").write_text(
        "from settings.loading import run_recipe\n\ndef get_config():\n    return run_recipe('parent.py')[0]\n"
    )

    def request(num_layers: int) -> dict:
        (tmp_path / "parent.py").write_text(
            f"from configs import small\n\ndef get_config():\n    config = small.get_config()\n"
            f"    config.model.num_layers = {num_layers}\n    return config\n"
        )
        typed = {"train.objective": "distillation", "distillation.teacher": "teacher.py"}
        loaded = loading.load("configs/small.py", "v4-8", typed)
        return compiler._request(loaded.config, loaded.topology)

    two, three = request(2), request(3)
    assert (two["teacher"]["model.num_layers"], three["teacher"]["model.num_layers"]) == (2, 3)
    assert two["config"]["distillation.teacher"] == str(tmp_path / "teacher.py")


def test_compilations_that_are_given_up_leave_no_process_and_no_file(tmp_path):
    config = configuration()
    validation.resolve_mesh(config, 4)
    pairs = [(config, topologies.get("v4-8"))]
    assert not list(compiler.Compiler(tmp_path).compile_all(pairs, until=time.monotonic() + 0.3))
    assert list(tmp_path.iterdir()) == []


def test_a_killed_rehearsal_leaves_no_process_and_no_file(rehearse, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    killed = subprocess.Popen(
        [sys.executable, "rehearse.py", *SMALL, "--topology=v4-8"], cwd=ROOT, stdout=subprocess.DEVNULL,
        env=environment | {"XDG_CACHE_HOME": str(tmp_path)},
    )  # fmt: skip
    folders = tmp_path / "torus" / "rehearsals"

    def compiling() -> list[pathlib.Path]:
        programs = [pathlib.Path("/proc", name, "cmdline") for name in os.listdir("/proc") if name.isdigit()]
        return [path.parent for path in programs if str(folders) in said(path)]

    wait_until(compiling)
    time.sleep(0.5)  # the compiling process is under way
    killed.kill()
    killed.wait()
    wait_until(lambda: not compiling())
    assert not list(folders.glob("*"))


def said(path: pathlib.Path) -> str:
    """Return the text of a file, "" where it is gone: its process has ended."""
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def wait_until(holds, seconds: float = 60) -> None:
    """Wait for something to come true."""
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("message", "gib"),
    [
        (
            "Ran out of memory on HBM, the total memory required for HLO temporaries (39.90G) exceeds available HBM",
            39.9,
        ),
        ("Ran out of memory in memory space hbm. Used 35.14G of 30.75G hbm. Exceeded hbm capacity by 4.39G.", 35.14),
        ("Used 35.1G of 30.7G hbm.\n\nTotal hbm usage >= 36.39G:\n    reserved 1.25G", 36.39),
        ("the total memory required for HLO temporaries (512.00M) exceeds", 0.5),
    ],
)
def test_the_missing_amount_is_read_from_the_compilers_message(message, gib):
    assert compilation.needed_bytes(message) == pytest.approx(gib * 2**30)


def test_what_is_compiled_is_the_step_that_train_runs(monkeypatch, tmp_path):
    """train.train and the compiler of rehearsals hand the same program to XLA, through the same function."""
    compile_step, texts = assembly.Run.compile, []

    class Handed(Exception):
        pass

    def spy(run):
        with assembly.mesh_context(run.mesh):
            texts.append(run.train_step.lower(run.abstract_state, run.abstract_batch).as_text())
        if len(texts) == 1:  # of train.train, which needs not run it
            raise Handed
        return compile_step(run)

    monkeypatch.setattr(assembly.Run, "compile", spy)
    config = configuration()
    validation.validate(config, 8)
    with pytest.raises(Handed):
        train.train(config, tmp_path / "run")
    facts, _ = compilation.compile_step(config.copy_and_resolve_references(), topologies.get("cpu-8"))
    assert len(texts) == 2 and texts[0] == texts[1]
    assert facts["num_parameters"] > 0 and facts["measured_peak_flops"] > 0
