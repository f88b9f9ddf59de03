# SPDX-License-Identifier: Apache-2.0
"""The report of runs: what is read, how curves are thinned, and the page in a browser."""

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

from configs.errors import ConfigError
from files.json_reader import JsonError
from reporting import page_parts
from reporting.goodput import PARTS
from reporting.run_report import page, plots, reading
from reporting.run_report.thinning import thin
from tests.browser import Browser
from tests.support import ROOT, drawn

BEGAN = 1_780_000_000.0


def write_run(folder: pathlib.Path, *, steps: int = 40, rate: float = 0.01) -> pathlib.Path:
    """Make the folder of a run with a restart, skipped updates and evaluations."""
    folder.mkdir(parents=True)
    lines = [{"kind": "event", "event": "start", "step": 0, "time": BEGAN}]
    for step in range(1, steps + 1):
        lines.append({
            "kind": "train", "step": step, "loss": 5 / step + rate, "gradient_norm": 1.0, "learning_rate": rate,
            "tokens_per_second": 1000.0 + step, "mfu": 0.4, "host_memory_gib": 1.5, "device_memory_gib": 2.0,
            "device_memory_peak_gib_min": 2.5, "device_memory_peak_gib_max": 3.0, "total_tokens": 64 * step,
            "step_seconds": 0.5, "time": BEGAN + step,
        })  # fmt: skip
        if step % 10 == 0:
            lines.append({"kind": "eval", "step": step, "eval_loss": 5 / step, "time": BEGAN + step})
            tasks = {"qa/accuracy": step / steps, "qa/accuracy_stderr": 0.01}
            lines.append({"kind": "tasks", "step": step, **tasks, "time": BEGAN + step})
            lines.append({"kind": "event", "event": "saved", "step": step, "time": BEGAN + step})
    lines.append({"kind": "event", "event": "start", "step": steps, "time": BEGAN + steps + 9})
    lines.append({"kind": "event", "event": "update_not_taken", "step": steps, "loss": None, "time": BEGAN + 60})
    parts = {"training": 60.0, "compile": 30.0, "idle": 10.0}
    lines.append({"kind": "event", "event": "goodput", "step": steps, "seconds": parts, "time": BEGAN + 61})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    config = {"optimizer.learning_rate": rate, "train.steps": steps, "train.seed": 0}
    (folder / "config.json").write_text(json.dumps(config))
    origin = {
        "recipe": "configs/tiny.py",
        "recipe_config": {**config, "train.steps": 7},
        "command": ["train.py", "a b"],
    }
    (folder / "run.json").write_text(json.dumps(origin))
    (folder / "summary.txt").write_text("held-out loss: 1\nsample:\n  | <script>alert(1)</script>")
    return folder


def add_lines(folder: pathlib.Path, *lines: dict) -> pathlib.Path:
    with (folder / "metrics.jsonl").open("a") as file:
        file.writelines(json.dumps({"time": BEGAN + 70, **line}) + "\n" for line in lines)
    return folder


def run(folder: pathlib.Path, name: str = "mine", **options) -> reading.RunRecord:
    return reading.read_run(write_run(folder / name, **options), name)


def report(*arguments) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, str(ROOT / "report.py"), *map(str, arguments)], capture_output=True, text=True
    )  # fmt: skip


def test_a_thinned_curve_keeps_every_extreme_and_the_means():
    x = np.arange(1.0, 100_001.0)
    y = np.sin(x / 5000)
    y[[7, 60_000, 99_999]] = (50.0, -30.0, np.nan)
    curve = thin(x, y, 500)
    assert len(curve.x) <= 500 and curve.high.max() == 50.0 and curve.low.min() == -30.0
    assert (curve.low <= curve.mean).all() and (curve.mean <= curve.high).all() and (np.diff(curve.x) > 0).all()
    assert curve.mean[100] == pytest.approx(np.sin(curve.x[100] / 5000), abs=1e-3)


def test_a_short_curve_is_left_as_it_is_and_one_of_repeated_places_too():
    curve = thin(np.array([1.0, 2.0, 3.0]), np.array([1.0, np.inf, 2.0]), 3)
    assert curve.x.tolist() == [1, 3] and curve.low.tolist() == curve.high.tolist() == [1, 2]
    assert thin(np.full(9, 4.0), np.arange(9.0), 3).high.max() == 8.0
    assert len(thin(np.empty(0), np.empty(0)).x) == 0


def test_the_last_line_of_a_repeated_step_counts_and_unknown_figures_are_left_out(tmp_path):
    folder = write_run(tmp_path / "mine")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 3, "loss": 9.5, "mfu": null, "note": "x", "big": 1e999, "time": 1}\n')
        file.write('{"kind": "train", "step": 4, "lo')
    found = reading.read_run(folder, "mine")
    steps, losses = found.column("train", "loss")
    assert losses[steps == 3] == [9.5] and len(steps) == 40
    assert 3 not in found.column("train", "mfu")[0] and "note" not in found.kinds["train"]
    assert {name: len(times) for name, times in plots.rows_of(found).items()} == {
        "start": 1, "restart": 1, "saved": 4, "update_not_taken": 1,
    }  # fmt: skip
    assert found.seconds == {"training": 60.0, "compile": 30.0, "idle": 10.0}


def test_steps_that_the_run_went_back_before_are_no_longer_shown(tmp_path):
    folder = write_run(tmp_path / "mine")
    again = {"kind": "train", "step": 12, "loss": 2.0, "total_tokens": 768, "time": BEGAN + 90}
    with (folder / "metrics.jsonl").open("a") as file:
        for line in ({"kind": "event", "event": "roll_back", "step": 11, "time": BEGAN + 80}, again):
            file.write(json.dumps(line) + "\n")
    shown = page.page([reading.read_run(folder, "mine")])
    assert "<td>last step</td><td>12</td>" in shown and "<td>tokens</td><td>768</td>" in shown
    assert "0.5000 at step 10" in shown, "the lowest held-out loss was that of step 40"


@pytest.mark.parametrize(("seconds_later", "training"), [(-1, 60.0), (1, 7.0)])
def test_the_later_of_the_heartbeat_and_the_last_account_counts(tmp_path, seconds_later, training):
    """Where another host has continued the run, the heartbeat of this one is old."""
    folder = write_run(tmp_path / "mine")
    account = {"began": BEGAN, "time": BEGAN + 61 + seconds_later, "parts": {"training": 7.0}}
    (folder / "workers").mkdir()
    (folder / "workers" / "0.json").write_text(json.dumps({"seconds": account}))
    assert reading.read_run(folder, "mine").seconds["training"] == training


def test_a_page_has_a_section_for_what_there_is_and_none_for_what_there_is_not(tmp_path):
    shown = page.page([run(tmp_path)])
    assert re.findall(r"<h2 id=\"[a-z-]+\">(.*?)</h2>", shown) == [
        "Overview", "Loss", "Speed", "Goodput", "Memory", "Optimization", "Time line", "Evaluations", "Samples",
        "Configuration",
    ]  # fmt: skip
    assert "<script" not in shown and "&lt;script&gt;" in shown and "http" not in shown.replace("http://www.w3", "")
    assert "<td>60.0% of 2 min</td>" in shown and "Command: train.py &#x27;a b&#x27;" in shown
    assert "<td>train.steps</td><td>7</td><td>40</td>" in shown
    assert shown == page.page([reading.read_run(tmp_path / "mine", "mine")]), "the same files give the same bytes"


def test_a_last_loss_that_is_not_finite_is_said_to_be_so(tmp_path):
    folder = add_lines(
        write_run(tmp_path / "mine"), {"kind": "train", "step": 41, "loss": None},
        {"kind": "eval", "step": 41, "eval_loss": None},
    )  # fmt: skip
    shown = page.page([reading.read_run(folder, "mine")])
    assert "<td>last step</td><td>41</td>" in shown and "<td>training loss, last</td><td>not finite</td>" in shown
    assert "<td>held-out loss, last</td><td>not finite</td>" in shown and "0.1250 at step 40" in shown
    (tmp_path / "new").mkdir()
    never = add_lines(tmp_path / "new", {"kind": "train", "step": 1, "loss": None})
    shown = page.page([reading.read_run(never, "new")])
    assert "<td>training loss, last</td><td>not finite</td>" in shown and "held-out loss, last" not in shown


def test_a_run_whose_name_begins_with_a_capital_has_no_column_of_numbers(tmp_path):
    shown = page.page([run(tmp_path, "Mine"), run(tmp_path, "other", rate=0.5)])
    for section in ("overview", "configuration"):
        table = shown.partition(f'<h2 id="{section}">')[2].partition("</table>")[0]
        assert "<th>Mine</th><th>other</th>" in table and 'class="number"' not in table


def test_the_legend_of_all_parts_of_the_time_stays_inside_the_figure(tmp_path):
    parts = {"kind": "event", "event": "goodput", "step": 40, "seconds": dict.fromkeys(PARTS, 10.0)}
    runs = [reading.read_run(add_lines(write_run(tmp_path / "mine"), parts), "mine")]
    [axes] = drawn(plots.draw_goodput, runs, plots.goodput_height(runs)).axes
    assert len(axes.get_legend().get_texts()) == len(PARTS)


def test_the_legend_and_the_title_of_runs_with_long_names_stay_inside_the_figure(tmp_path):
    runs = [run(tmp_path, name) for name in ("a" * 80, "b-run-of-thirty-characters-" * 2, "c", "d", "e")]
    shown = plots.panel("loss", runs, [("train", "loss", "", "-")])
    [axes] = drawn(plots.draw_panel, shown, plots.HEIGHT, page.HALF).axes
    assert len(axes.get_legend().get_texts()) == 5


def test_a_run_of_one_step_is_seen_in_its_time_line_at_a_whole_step(tmp_path):
    one = run(tmp_path, steps=1, rate=0.000125)
    above = drawn(plots.draw_timeline, one, plots.timeline_height(one)).axes[1]
    assert [line.get_marker() for line in above.lines] == ["."]
    shown = plots.panel("learning rate", [one], [("train", "learning_rate", "", "-")])
    [axes] = drawn(plots.draw_panel, shown, plots.HEIGHT, page.HALF).axes
    for axis in (above.yaxis, axes.xaxis):
        assert [place for place in axis.get_majorticklocs() if 0.5 < place < 1.5] == [1.0]
    assert "0.000125" in [label.get_text() for label in axes.get_yticklabels()], "and inside the figure"


def test_several_runs_are_drawn_over_each_other_with_the_keys_that_differ(tmp_path):
    shown = page.page([run(tmp_path, "慢"), run(tmp_path, "fast", rate=0.5, steps=20)])
    table = shown.partition('<h2 id="configuration">')[2].partition("</table>")[0]
    assert re.findall(r"<td>([a-z_.]+)</td><td>([\d.]+)</td><td>([\d.]+)</td>", table) == [
        ("optimizer.learning_rate", "0.01", "0.5"), ("train.steps", "40", "20")
    ]  # fmt: skip
    assert shown.count("慢 training") == 2 and shown.count("fast held-out") == 2, "in a legend and a tooltip"


def test_a_profile_a_rehearsal_and_answers_are_shown_if_they_are_there(tmp_path):
    folder = write_run(tmp_path / "mine")
    table = {"title": "Operations", "columns": ["operation", "Seconds"], "rows": [["fusion.1", 0.25], ["copy", None]]}
    (folder / "profile.json").write_text(json.dumps({"summary": ["Of <one> step."], "tables": [table]}))
    rehearsed = {"topology": "v4-32", "fits": True, "step_seconds": 0.25, "mfu": None, "hbm_gib": {"total": 2.5}}
    (folder / "rehearsal.json").write_text(json.dumps(rehearsed))
    answers = [{"kind": "rollout", "step": n, "prompt": "2 + 2", "answer": "4" * 999, "reward": 1.0} for n in range(20)]
    (folder / "rollouts.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers) + '{"torn')
    shown = page.page([reading.read_run(folder, "mine")])
    assert "Of &lt;one&gt; step." in shown and '<td>fusion.1</td><td class="number">0.25</td>' in shown
    assert '<td>step, seconds</td><td class="number">0.25</td><td class="number">0.5</td>' in shown
    assert shown.count("<td>2 + 2</td>") == reading.MOST_ANSWERS and "4" * 601 not in shown


def test_a_run_that_has_logged_nothing_yet_has_a_page(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind": "event", "event": "start", "step": 0, "time": 1780000000.0}\n')
    shown = page.page([reading.read_run(tmp_path, "new")])
    assert "new: not finished, last line written 2026-05-28 20:26 UTC." in shown and "Loss" not in shown
    (tmp_path / "metrics.jsonl").write_text("")
    assert "<td>events</td><td>none</td>" in page.page([reading.read_run(tmp_path, "new")])


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("metrics.jsonl", '{"kind": "train"}\n', "metrics.jsonl, line 1: step is missing"),
        ("metrics.jsonl", '{"kind": "train", "step": 1, "loss": "x"}\n', "metrics.jsonl, line 1: loss: "),
        ("config.json", "{", "config.json: is not valid JSON"),
        ("profile.json", '{"summary": []}', "profile.json: tables is missing"),
        ("rehearsal.json", '{"mfu": "high"}', "rehearsal.json: mfu: "),
        ("rollouts.jsonl", '{"step": []}\n', "rollouts.jsonl: step: "),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, name, content, message):
    folder = write_run(tmp_path / "mine")
    (folder / name).write_text(content)
    with pytest.raises(JsonError) as error:
        reading.read_run(folder, "mine")
    assert message in str(error.value) and "\n" not in str(error.value) and error.value.exit_status == 2


def test_what_is_no_run_is_told(tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a folder"):
        reading.read_run(tmp_path / "nowhere", "nowhere")
    with pytest.raises(ConfigError, match=r"has no metrics\.jsonl, so it holds no run"):
        reading.read_run(tmp_path, "empty")


def test_folders_without_a_run_are_left_out_beside_runs(tmp_path):
    """`report.py runs/*` finds those of runs that were refused before they began, and other files."""
    write_run(tmp_path / "runs" / "a")
    (tmp_path / "runs" / "refused" / "logs").mkdir(parents=True)
    (tmp_path / "runs" / "studies.db").touch()
    made = report(*(tmp_path / "runs").iterdir(), f"--html={tmp_path}/page.html")
    assert made.returncode == 0 and (tmp_path / "page.html").exists()
    assert "left out, since they hold no run that was trained: " in made.stderr
    assert "refused" in made.stderr and "studies.db" in made.stderr
    absent = report(tmp_path / "runs" / "a", tmp_path / "absent", f"--html={tmp_path}/page.html")
    assert absent.returncode == 2 and "absent is not a folder" in absent.stderr


def test_a_profile_with_a_row_of_another_length_is_told(tmp_path):
    folder = write_run(tmp_path / "mine")
    table = {"title": "Operations", "columns": ["operation", "Seconds"], "rows": [["fusion.1"]]}
    (folder / "profile.json").write_text(json.dumps({"summary": [], "tables": [table]}))
    with pytest.raises(JsonError, match=r"profile\.json: a row of the table Operations has 1 cells, not 2"):
        reading.read_run(folder, "mine")


@pytest.mark.slow
def test_the_command_writes_the_page_without_jax_and_tells_every_mistake_in_one_line(tmp_path):
    one, other = write_run(tmp_path / "a" / "mine"), write_run(tmp_path / "b" / "mine")
    done = report(one, f"--html={tmp_path / 'out.html'}")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"report: {tmp_path / 'out.html'}\n", "")
    assert (tmp_path / "out.html").read_text().startswith("<!DOCTYPE html>")
    for arguments, message in (
        ([], "no run is named; give its folder"),
        ([tmp_path / "none"], "none is not a folder"),
        ([one, other], f"{one} and {other} are both named mine"),
        ([one, f"--html={tmp_path}/none/x.html"], "the folder"),
        ([one, "--htm=x"], "--htm is not a flag"),
        ([one, "--workdir=x"], "--workdir is not read here"),
        ([one, "--config.train.steps=3"], "--config.train.steps is not read here"),
    ):
        done = report(*arguments)
        assert done.returncode == 2 and message in done.stderr, (arguments, done.stderr)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_the_command_does_not_import_jax():
    program = "import sys, report; from reporting.run_report import page, reading; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"


@pytest.mark.parametrize("width", [1200, 390])
def test_the_page_is_whole_in_a_browser_light_dark_and_in_print(tmp_path, width):
    runs = [run(tmp_path, "slow"), run(tmp_path, "fast", rate=0.5)]
    (tmp_path / "report.html").write_text(page.page(runs))
    with contextlib.closing(Browser(tmp_path / "profile")) as browser:
        colours = []
        for dark in (False, True):
            browser.open(f"file://{tmp_path}/report.html", width=width, dark=dark)
            assert browser.value("document.documentElement.scrollWidth") <= width, "nothing but figures scrolls"
            colours.append(browser.value("getComputedStyle(document.body).backgroundColor"))
            drawn = "[...document.querySelectorAll('svg')].every(svg => svg.getBoundingClientRect().height > 60)"
            assert browser.value(drawn)
            unreadable = "[...document.querySelectorAll('svg text')].filter(t => t.getBoundingClientRect().height < 7)"
            assert browser.value(f"{unreadable}.length") == 0
        assert colours == ["rgb(255, 255, 255)", "rgb(22, 25, 30)"]
        browser.call("Emulation.setEmulatedMedia", media="print")
        assert browser.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert browser.value("getComputedStyle(document.body).color") == "rgb(0, 0, 0)"
        assert browser.errors == []


def test_every_part_of_the_account_of_time_has_a_colour():
    """A part without one would leave a gap in the bar."""
    assert plots.PART_COLOURS.keys() == PARTS.keys()


def test_close_and_large_ticks_differ_and_lie_inside_the_figure(tmp_path):
    lines = [{"kind": "train", "step": 1_234_000 + 10 * n, "loss": -2.5e6 + 20 * n} for n in range(60)]
    one = reading.read_run(add_lines(tmp_path, *lines), "mine")
    [axes] = drawn(plots.draw_panel, plots.panel("loss", [one], [("train", "loss", "", "-")]), 2.4, page.HALF).axes
    for axis, label in ((axes.xaxis, "1.2342M"), (axes.yaxis, "-2.4995M")):
        labels = [tick.get_text() for tick in axis.get_ticklabels()]
        assert label in labels and len(set(labels)) == len(labels)
    assert [page_parts.short(number) for number in (-5.03e6, -6144.0, 0.002)] == ["-5.03M", "-6,144", "0.002"]


def test_many_runs_are_not_all_named_in_the_title(tmp_path):
    one = run(tmp_path)
    shown = page.page([dataclasses.replace(one, name=f"run-{number}") for number in range(10)])
    title = shown.partition("<title>")[2].partition("</title>")[0]
    assert title.startswith("10 runs: run-0, run-1, ") and title.endswith(", run-7 and 2 more")


def test_a_standard_error_is_that_of_the_step_of_its_figure(tmp_path):
    folder = write_run(tmp_path / "mine")
    add_lines(folder, {"kind": "tasks", "step": 50, "qa/accuracy": 0.75, "qa/accuracy_stderr": None})
    shown = page.page([reading.read_run(folder, "mine")])
    assert '<td class="number">0.75</td><td class="number">-</td><td class="number">50</td>' in shown


def test_a_column_of_a_profile_may_have_no_name(tmp_path):
    folder = write_run(tmp_path / "mine")
    table = {"title": "Operations", "columns": ["", "Seconds"], "rows": [["fusion.1", 0.25]]}
    (folder / "profile.json").write_text(json.dumps({"summary": [], "tables": [table]}))
    assert '<th></th><th class="number">Seconds</th>' in page.page([reading.read_run(folder, "mine")])


def test_a_folder_whose_name_is_not_utf_8_is_told_in_one_line(tmp_path):
    made = report(os.fsdecode(b"bad\xff"), f"--html={tmp_path}/page.html")
    assert (made.returncode, made.stderr) == (2, "error: run='bad\\udcff' is not UTF-8\n")
