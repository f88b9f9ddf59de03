# SPDX-License-Identifier: Apache-2.0
"""Benchmarks judge what they measured, and measure what they were asked to."""

import json
import types

import pytest

from settings import loading
from settings.keys import flat
from tests.support import benchmark

RECIPE = "configs/trm/sudoku_mini.py"


@pytest.fixture
def stored(tmp_path):
    """A folder with the configuration of a run of RECIPE with Muon."""
    config = loading.load(RECIPE, "", {"optimizer.name": "muon"}).config
    (tmp_path / "config.json").write_text(json.dumps(flat(config) | {"mesh.data": 4}))
    return tmp_path


def test_a_stored_run_of_another_configuration_is_refused_in_one_line(stored):
    """The mesh is the machine's. A folder without a run is one to train in."""
    with benchmark("support") as support:
        support.check_unchanged(stored, RECIPE, {"optimizer.name": "muon"})
        support.check_unchanged(stored / "nothing", RECIPE, {})
        with pytest.raises(SystemExit, match=f"^{stored} was trained .*: optimizer.name muon -> .*; delete {stored}"):
            support.check_unchanged(stored, RECIPE, {})


def test_an_arm_that_has_ended_with_other_levers_is_not_taken(stored, monkeypatch):
    with benchmark("trm_fast") as trm_fast:
        monkeypatch.setattr(trm_fast, "FOLDER", stored)
        (stored / "muon-seed0").mkdir()
        (stored / "config.json").rename(stored / "muon-seed0" / "config.json")
        monkeypatch.setattr(trm_fast, "recorded", lambda workdir: {trm_fast.STEPS: 0.5})
        with pytest.raises(SystemExit, match=r"muon-seed0 was trained with .*optimizer\.learning_rate"):
            trm_fast.curve("muon", {"optimizer.learning_rate": 0.125}, 0)


def test_an_arm_that_is_unknown_is_one_line(monkeypatch, capsys):
    with benchmark("trm_fast") as trm_fast:
        monkeypatch.setattr("sys.argv", ["trm_fast.py", "--mechanism=nonsense"])
        with pytest.raises(SystemExit) as ended:
            trm_fast.main()
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("error: --mechanism=nonsense is not an arm; the arms are baseline, ")


def test_the_minutes_of_a_run_are_those_of_all_calls_without_pauses(tmp_path):
    accounts = [{"training": 60, "idle": 0, "lost": 0}, {"training": 100, "compile": 20, "idle": 900, "lost": 9}]
    lines = [{"kind": "event", "event": "goodput", "seconds": seconds} for seconds in accounts]
    lines.append({"kind": "event", "event": "saved"})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with benchmark("support") as support:
        assert support.run_minutes(tmp_path) == 2.0


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({}, ""),
        ({"wall_error": 0.02}, "the account's wall-clock time is off by 2.0%"),
        ({"parts_sum_error": 0.02}, "its parts differ from it by 2.0%"),
    ],
)
def test_an_account_of_time_is_judged_by_another_clock_and_by_its_sum(changed, wrong):
    with benchmark("goodput") as goodput:
        assert goodput.wrong_account({"wall_error": 0.003, "parts_sum_error": 0.0} | changed) == wrong


def test_simulated_pods_miss_a_loss_that_does_not_fall(monkeypatch):
    with benchmark("simulated_pods") as pods:

        def train(steps, recipe, topology):
            last = 6.5 if topology == "--topology=v4-32" else 3.0
            return types.SimpleNamespace(lines={"train": {1: {"loss": 6.0}, 2: {"loss": last}}}, seconds=1.0)

        monkeypatch.setattr(pods.support, "train", train)
        with pytest.raises(SystemExit, match=r"^simulated_pods: the loss on v4-32 does not fall$"):
            pods.main()


@pytest.mark.parametrize("quick", [True, False])
def test_meta_learning_is_judged_unless_it_was_cut_short(quick, monkeypatch):
    figures = {"maml_mse": 1.0, "pretrained_mse": 1.0, "glyphs_protonet": 0.5, "glyphs_pixels": 0.5}
    with benchmark("meta_learning") as meta_learning:
        monkeypatch.setattr(meta_learning, "figures_of", lambda seed: figures)
        monkeypatch.setattr(meta_learning.support, "QUICK", quick)
        if quick:
            meta_learning.main()
            return
        with pytest.raises(SystemExit, match="meta_learning: the gate fails"):
            meta_learning.main()


def test_a_text_without_a_cache_is_padded_to_the_next_bucket():
    with benchmark("decoding") as decoding:
        assert [decoding.padded_length(size) for size in (16, 64, 65, 256)] == [128, 128, 192, 320]


@pytest.mark.parametrize("command", ["make clean", "make format"])
def test_a_command_that_changes_the_tree_is_not_said_to_take_hours(command):
    with benchmark("docs") as docs:
        shown = docs.pages.Shown("README.md", command)
        assert docs.why_not(shown) == docs.CHANGES
