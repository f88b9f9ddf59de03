# SPDX-License-Identifier: Apache-2.0
"""What rehearse.py says of an objective that draws answers: both phases, and one verdict."""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from types import SimpleNamespace

import pytest

from configs import topologies
from reasoning.rollouts import tokens_of_row
from rehearsal import page, rollout, sections
from rehearsal.compiler import GIB, Compiled
from settings import loading
from settings.ramp import known_steps
from tests.support import ROOT

SMALL = {
    "model.dtype": "bfloat16", "model.num_layers": 1, "model.embed_dim": 256, "model.num_heads": 4,
    "model.num_kv_heads": 4, "model.head_dim": 128, "model.mlp_dim": 512, "model.max_length": 512,
    "train.sequence_length": 128, "tot.use_tot": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def rehearsed(tmp_path_factory):
    """Rehearse a small model on v4-8 with the TPU compiler; return (report, what is printed)."""
    folder = tmp_path_factory.mktemp("rollout")
    environment = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    command = ["--config=configs/countdown_grpo.py", *(f"--config.{key}={value}" for key, value in SMALL.items())]
    command += ["--topology=v4-8", "--advice_seconds=0", f"--json={folder}/r.json", f"--html={folder}/r.html"]
    done = subprocess.run(
        [sys.executable, "rehearse.py", *command], cwd=ROOT, env=environment | {"XDG_CACHE_HOME": str(folder)},
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads((folder / "r.json").read_text()), done.stdout, (folder / "r.html").read_text()


@pytest.mark.slow
def test_a_step_is_its_rollout_and_its_update(rehearsed):
    report, printed, html = rehearsed
    rollout, hbm, rows, length = report["rollout"], report["rollout"]["hbm_gib"], 128, 144
    assert (rollout["rows"], rollout["length"]) == (rows, length) and report["fits"] and rollout["fits"]
    seconds = rollout["prefill"]["seconds"] + length * rollout["decode"]["step_seconds"]
    assert rollout["seconds"] == pytest.approx(seconds)
    assert report["update"] == {"fits": True, "seconds": report["step_seconds"]}
    assert report["update_and_rollout_seconds"] == pytest.approx(seconds + report["step_seconds"])
    assert report["run"]["days"] * 86_400 == pytest.approx(200 * report["update_and_rollout_seconds"])
    assert hbm["total"] == pytest.approx(sum(hbm[name] for name in ("training_state", "weights", "cache", "temporary")))
    keys_and_values = 2 * rows * (length + 16) * 4 * 128 * 2 / 4  # bfloat16, with room for the padding of a chunk
    assert hbm["cache"] * GIB == pytest.approx(keys_and_values, rel=0.02)
    assert hbm["training_state"] * GIB == pytest.approx(3 * 4 * report["num_parameters"] / 4, rel=0.5)
    for text in (printed, html):
        assert "FITS: the update and the rollout; at most " in text and "ROLLOUT: " in text


@pytest.mark.slow
def test_the_decode_kernel_reads_the_cache_of_a_rollout(rehearsed):
    """It needs whole tiles; without it a token of llama_1b took twelve times its bound."""
    assert rehearsed[0]["rollout"]["decode"]["seconds_by_category"]["attention kernel"] > 0
    assert [tokens_of_row(length) for length in (80, 127, 128, 1024)] == [96, 128, 144, 1040]


def both(rows: int, *, update_fits: bool = True, decodes: bool = True, weights: float = 2.0, steps: int = 1) -> dict:
    """Return what is added to the report on a step of 256 answers; `rows` are drawn at a time."""
    config = loading.load("configs/countdown_grpo.py", "v4-8", {"train.global_batch": "256"}).config
    state = {"parameters": 4 * GIB, "optimizer": 8 * GIB, "extra": 0, "carry": 0, "batch": 0}
    topology = dataclasses.replace(topologies.get("v4-8"), hbm_gib=24)
    facts = {"state": state, "frozen": GIB, "steps_of_batch": steps}
    compiled = Compiled(config, topology, facts, pathlib.Path("unused"))
    figures = {"fits": update_fits, "step_seconds": 1.0 if update_fits else None, "tokens_per_step": 256 * 80}
    found = {
        "fits": decodes, "rows": rows, "length": 96, "mesh": {"model": 4},
        "hbm_gib": {"weights": weights, "cache": 3.0, "temporary": 0.5},
        "prefill": {"seconds": 0.5, "calls": 2, "call_seconds": 0.25} if decodes else None,
        "decode": {"step_seconds": 0.01} if decodes else None,
    }  # fmt: skip
    return rollout.added(compiled, figures, found)


def test_the_length_of_a_run_may_be_its_tokens():
    """80 tokens a row, 256 rows a step; a run of epochs is as long as its documents say."""
    for key, value, steps in (("steps", 7, 7), ("tokens", 256 * 80 * 9 - 1, 9), ("epochs", 2, None)):
        keys = {"train.global_batch": "256", "train.sequence_length": "80", f"train.{key}": str(value)}
        assert known_steps(loading.load("configs/tiny.py", "", keys).config) == steps


def test_answers_wait_for_rows_and_the_copied_weights_are_briefly_there_twice():
    found = both(128)
    assert found["rollout"]["seconds"] == pytest.approx(2 * (0.5 + 96 * 0.01)), "two rounds of 128 rows"
    assert found["rollout"]["hbm_gib"]["total"] == pytest.approx(13 + 2 + 3 + 0.5)
    assert both(256)["rollout"]["seconds"] == pytest.approx(0.5 + 96 * 0.01)
    assert both(100)["rollout"]["seconds"] == pytest.approx(3 * (0.5 + 96 * 0.01)), "the last round is not full"
    assert both(256, weights=5.0)["rollout"]["hbm_gib"]["total"] == pytest.approx(13 + 2 * 5)


def test_steps_on_one_rollout_share_its_time():
    once, often = both(256), both(256, steps=4)
    assert once["rollout"]["seconds"] == often["rollout"]["seconds"] == pytest.approx(1.46)
    assert (once["update_and_rollout_seconds"], often["update_and_rollout_seconds"]) == pytest.approx((2.46, 1.365))
    assert often["run"]["days"] * 86_400 == pytest.approx(often["run"]["steps"] * 1.365)


@pytest.mark.parametrize("changes, title", [
    ({}, "FITS: the update and the rollout; at most 2.46 s a step"),
    ({"weights": 9.0}, "DOES NOT FIT: the update and the rollout; at most 2.46 s a step"),
    ({"decodes": False}, "DOES NOT FIT: the update and the rollout"),
    ({"update_fits": False}, "DOES NOT FIT: the update and the rollout"),
])  # fmt: skip
def test_it_fits_if_both_phases_do(changes, title):
    found = both(256, **changes)
    update = {"hbm_gib": {"total": 20.0, "capacity": 24}}
    section = sections._phases(update | found)
    assert section.title == title and section.bad == (not found["fits"])
    assert [row[2] for row in section.tables[0].rows] == [
        "fits" if phase["fits"] else "does not fit" for phase in (found["update"], found["rollout"])
    ]
    assert page._section(sections._rollout(found["rollout"]), update | found)


def test_other_objectives_have_one_phase():
    compiled = SimpleNamespace(topology=topologies.get("v4-8"), facts={"decoded": None})
    assert rollout.rehearse(None, compiled, {}, None) == {}
