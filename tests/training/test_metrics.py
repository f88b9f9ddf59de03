# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl: one clean history, whatever happened to the processes that wrote it."""

import json

from training.metrics import MetricsWriter, elapsed_before


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, kind, **figures):
    with MetricsWriter(folder, tensorboard=False) as writer:
        writer.write(kind, **figures)


def test_a_torn_last_line_is_cut_off_and_the_rest_kept(tmp_path):
    write(tmp_path, "train", step=1, loss=2.0)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 2, "lo')
    write(tmp_path, "train", step=2, loss=1.5)
    assert [(line["step"], line["loss"]) for line in lines(tmp_path)] == [(1, 2.0), (2, 1.5)]


def test_a_file_that_is_one_torn_line_begins_anew(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"kind"')
    write(tmp_path, "train", step=1)
    assert len(lines(tmp_path)) == 1


def test_what_is_not_finite_or_unknown_is_null_so_that_every_line_is_json(tmp_path):
    write(tmp_path, "train", step=1, loss=float("nan"), gradient_norm=float("inf"), mfu=None)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert (lines(tmp_path)[0]["loss"], lines(tmp_path)[0]["gradient_norm"], lines(tmp_path)[0]["mfu"]) == (None,) * 3


def test_elapsed_time_adds_up_the_processes_and_not_the_time_between(tmp_path):
    history = [("start", 100.0), (None, 130.0), ("start", 1000.0), (None, 1005.0), (None, 1010.0)]
    with (tmp_path / "metrics.jsonl").open("w") as file:
        for event, time in history:
            line = {"kind": "event", "event": event, "time": time} if event else {"kind": "train", "time": time}
            file.write(json.dumps(line) + "\n")
    assert elapsed_before(tmp_path) == 30.0 + 10.0
    assert elapsed_before(tmp_path / "nothing") == 0.0
