# SPDX-License-Identifier: Apache-2.0
"""Real runs of a tiny recursive model on Sudokus of 4 x 4 made on the spot, by the loop that trains everything."""

import contextlib
import json
import pathlib
import shutil

import httpx2
import jax
import numpy as np
import pytest

import train
from checkpointing.checkpoints import Checkpoints
from configs.trm import sudoku_mini
from core import assembly, start
from parallelism.mesh import mesh_context
from reporting import preflight
from settings.validation import validate
from tests.browser import Browser, executable
from tests.serving.conftest import serving
from tests.test_train import command, finish

STEPS, SAVED = 52, 48
SMALL = {
    "model.num_layers": 1, "model.embed_dim": 32, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 64,
    "model.dtype": "float32",
    "model.high_cycles": 1, "model.low_cycles": 1, "model.puzzle_dim": 16, "model.prefix_length": 1,
    "model.layer_loop": "unroll", "supervision.max_steps": 3, "supervision.exploration": 0.3, "train.global_batch": 16,
    "train.steps": STEPS, "train.log_every": 1, "train.eval_every": 0, "train.save_every": SAVED,
    "data.puzzle_count": 4, "data.puzzle_augmentations": 0, "data.puzzle_heldout": 20,
    "optimizer.learning_rate": 1e-2, "optimizer.warmup_steps": 5, "optimizer.table_learning_rate": 0.01,
    "logging.tensorboard": False, "logging.report": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> pathlib.Path:
    """Where puzzles are kept, made once."""
    return tmp_path_factory.mktemp("cache")


def tiny(cache: pathlib.Path, **changes):
    """Return a validated run on the devices of this process."""
    config = sudoku_mini.get_config()
    changes = {key.replace("__", "."): value for key, value in changes.items()}
    for key, value in (SMALL | {"data.cache_dir": str(cache)} | changes).items():
        section, name = key.split(".")
        config[section][name] = value
    validate(config, len(jax.devices()))
    return config


def lines_of(workdir: pathlib.Path, kind: str) -> dict[int, dict]:
    lines = map(json.loads, (workdir / "metrics.jsonl").read_text().splitlines())
    return {line["step"]: line for line in lines if line["kind"] == kind}


@pytest.mark.slow
def test_cycles_grow_while_a_run_trains_and_it_resumes_in_the_middle(cache, tmp_path, capsys, monkeypatch):
    """Bit for bit, with a checkpoint inside a stage of fewer cycles; MFU counts the cycles of each step."""
    monkeypatch.setattr(preflight, "peak_flops", lambda topology, size: (1e12, "this test's peak"))
    grows = {
        "model__low_cycles": 3, "supervision__first_high_cycles": 1, "supervision__first_low_cycles": 1,
        "supervision__growth_fraction": 0.5, "train__steps": 16, "train__save_every": 6,
        "supervision__final_exploration": 0.1,
    }  # fmt: skip
    train.train(tiny(cache, **grows), tmp_path / "whole")
    shown = capsys.readouterr().out
    assert " for 4 steps (an estimate" in shown, "of the first stage alone"
    assert [" at least " in line for line in shown.splitlines() if line.startswith("step ") and " left" in line] == (
        [True] * 8 + [False] * 7
    )
    shutil.copytree(tmp_path / "whole", tmp_path / "resumed")
    for step in (12, 16):
        shutil.rmtree(tmp_path / "resumed" / "checkpoints" / str(step), ignore_errors=True)
    train.train(tiny(cache, **grows), tmp_path / "resumed")
    alone = dict(grows, supervision__first_high_cycles=0, supervision__first_low_cycles=0)
    train.train(tiny(cache, **alone), tmp_path / "alone")
    whole, resumed, alone = (lines_of(tmp_path / name, "train") for name in ("whole", "resumed", "alone"))
    flops = [line["mfu"] / line["examples_per_second"] for line in whole.values()]
    assert flops[0] == pytest.approx(flops[1]) and flops[0] < 0.7 * flops[-1], "of the cycles of each step"
    assert flops[-1] == pytest.approx(alone[1]["mfu"] / alone[1]["examples_per_second"])
    whole, resumed, alone = ({n: line["loss"] for n, line in lines.items()} for lines in (whole, resumed, alone))
    assert len(whole) == 16 and whole == resumed
    assert whole[1] != alone[1], "the first stage has other cycles"


@pytest.fixture(scope="module")
def whole(cache, tmp_path_factory) -> pathlib.Path:
    """The workdir of a run that was never stopped."""
    workdir = tmp_path_factory.mktemp("whole")
    train.train(tiny(cache), workdir)
    return workdir


def test_a_run_that_lost_its_last_steps_does_them_again_bit_for_bit(cache, whole, tmp_path):
    """With what every slot holds: some take the next puzzle after the checkpoint, others are at work on one."""
    workdir = tmp_path / "run"
    shutil.copytree(whole, workdir)
    shutil.rmtree(workdir / "checkpoints" / str(STEPS))
    lines = (workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
    (workdir / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= SAVED))
    train.train(tiny(cache), workdir)
    run = assembly.assemble(tiny(cache))

    def state(workdir: pathlib.Path, step: int):
        with Checkpoints(workdir) as checkpoints, mesh_context(run.mesh):
            return jax.device_get(checkpoints.restore(step, run.abstract_state))

    halted = state(whole, SAVED).carry["halted"]
    assert halted.any() and not halted.all()
    jax.tree.map(np.testing.assert_array_equal, state(workdir, STEPS), state(whole, STEPS))
    ours, theirs = lines_of(workdir, "train"), lines_of(whole, "train")
    for key in ("loss", "gradient_norm", "exact_accuracy"):
        assert [ours[step][key] for step in range(1, STEPS + 1)] == [theirs[step][key] for step in range(1, STEPS + 1)]


def test_metrics_hold_what_is_held_out_and_what_slots_did(whole):
    trained, evaluated = lines_of(whole, "train"), lines_of(whole, "eval")
    wanted = {"exact_accuracy", "accuracy", "halt_accuracy", "steps", "lm_loss", "halt_loss", "loss"}
    assert wanted <= trained[STEPS].keys()
    assert {f"eval_{name}" for name in wanted} <= evaluated[STEPS].keys()
    assert evaluated[STEPS]["eval_steps"] == 3 and 0 <= evaluated[STEPS]["eval_exact_accuracy"] <= 1


@pytest.mark.parametrize(("batch", "steps", "eval_every"), [(6144, 8138, 813), (768, 65104, 6510)])
def test_published_epochs_come_to_the_published_steps(cache, batch, steps, eval_every):
    """50,000 passes over 1,000 puzzles, and an evaluation each 5,000."""

    class Windows:
        def num_examples(self, length):
            return 1000

    class Corpus:
        train, is_plain_text = Windows(), False

    config = tiny(cache, train__steps=0, train__epochs=50_000.0, train__global_batch=batch)
    config.evaluation.every_epochs = 5000.0
    start.set_eval_every(config, Corpus())
    assert start.set_steps(config, Corpus(), None) == (0, steps)
    assert config.train.eval_every == eval_every


def test_a_pass_has_each_puzzle_once_however_many_versions_it_is_in(cache, tmp_path):
    """24 puzzles in 4 versions are 24 examples: 3 passes are 4 batches of 16 and a half."""
    config = tiny(cache, train__steps=0, train__epochs=3.0, data__puzzle_count=24, data__puzzle_augmentations=3)
    assert start.set_steps(config, train.prepare_corpus(config, True), None) == (0, 4)


def test_a_few_boards_are_learned_and_then_take_fewer_steps(whole):
    trained = lines_of(whole, "train")
    last = [trained[step] for step in range(STEPS - 9, STEPS + 1)]
    assert trained[3]["steps"] == 3 and trained[3]["exact_accuracy"] < 0.5
    assert min(line["exact_accuracy"] for line in last) == 1.0
    assert np.mean([line["steps"] for line in last]) < 2


def test_generate_solves_by_a_trained_checkpoint(whole, tmp_path):
    file, page = (tmp_path / name for name in ("puzzle.txt", "steps.html"))
    file.write_text("1..4\n....\n....\n4..1\n")
    told = [f"--workdir={whole}", f"--puzzle={file}", f"--html={page}", "--supervision_steps=2"]
    status, out, err = finish(command("generate.py", *told, cache=tmp_path / "cache"))
    assert status == 0, err
    assert out.startswith("puzzle\n1 . | . 4\n") and "\nstep 2: " in out and "\nstep 3: " not in out
    assert out.splitlines()[-1].startswith(("NOT a solution: ", "a valid solution"))
    assert page.read_text().count("<figure>") == 3


@pytest.fixture(scope="module")
def served(whole):
    """A server of the run."""
    pytest.importorskip("uvicorn", reason="needs the packages of `make setup EXTRAS=serve`")
    with serving(whole) as served:
        yield served


def test_a_server_solves_as_generate_does_and_says_what_is_no_puzzle(served, whole, tmp_path):
    puzzle = "1..4\n....\n....\n4..1\n"
    (tmp_path / "puzzle.txt").write_text(puzzle)
    flags = [f"--workdir={whole}", f"--puzzle={tmp_path}/puzzle.txt", "--supervision_steps=2"]
    printed = finish(command("generate.py", *flags, cache=tmp_path / "cache"))[1].splitlines()
    ask = lambda **body: httpx2.post(f"{served.url}/v1/puzzles", json=body)  # noqa: E731
    answer = ask(puzzle=puzzle, supervision_steps=2).raise_for_status().json()
    assert answer["given"] == puzzle.split() and answer["box"] == [2, 2] and answer["verdict"] == printed[-1]
    assert answer["solved"] == answer["verdict"].startswith("a valid")
    last = [line.replace(" ", "").replace("|", "") for line in printed[-6:-1] if "-" not in line]
    assert answer["steps"][-1]["rows"] == last and len(answer["steps"]) == 2
    assert f"step 2: probability of halting {answer['steps'][1]['halt']:.3f}" in "\n".join(printed)
    assert len(ask(puzzle=puzzle).json()["steps"]) == 3  # as in training
    for body, message in [
        ({"puzzle": "1"}, "puzzle:1: the Sudoku has 1 cells; it needs 16, 36 or 81"),
        ({"puzzle": "S G"}, "the puzzle is a maze of 1 x 3, but the model was trained on data.source=sudoku"),
        ({"puzzle": puzzle, "supervision_steps": 0}, "supervision_steps should be greater than or equal to 1, not 0"),
    ]:
        refused = ask(**body)
        assert refused.status_code == 400 and message in refused.json()["error"]["message"]
    assert httpx2.post(f"{served.url}/v1/completions", json={"prompt": "x"}).status_code == 404


def test_the_page_shows_how_the_answer_changes(served, tmp_path):
    executable()
    with contextlib.closing(Browser(tmp_path / "profile")) as browser:
        browser.open(served.url, width=390)
        browser.wait("!document.querySelector('#puzzles').hidden")
        browser.value("document.querySelector('#solve button').click()")
        browser.wait("document.querySelector('#at').value === '3'")
        assert browser.value("document.querySelectorAll('#board i').length") == 16
        assert browser.value("document.querySelector('#caption').textContent").startswith("Step 3 of 3: ")
        assert browser.value("document.querySelector('#verdict').textContent").startswith("After 3 steps: ")
        browser.value("const at = document.querySelector('#at'); at.value = 0; at.oninput()")
        assert browser.value("document.querySelector('#board').ariaLabel") == "1..4\n....\n....\n4..1"
        browser.fill("#puzzle", "1")
        browser.value("document.querySelector('#solve button').click()")
        browser.wait("document.querySelector('#puzzle-error').textContent.includes('it needs 16, 36 or 81')")
        assert len(browser.screenshot(tmp_path / "page.png")) > 10_000
