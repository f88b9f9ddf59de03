# SPDX-License-Identifier: Apache-2.0
"""metrics.jsonl has one consistent history, even if the processes that wrote it were killed."""

import json
import resource
import time
import tracemalloc

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from files.json_reader import JsonError
from reporting.metrics import MetricsWriter, parse_lines, read_steps, steps_of, without_abandoned
from reporting.sink import Sink
from reporting.sinks.tensorboard import TensorBoard


def lines(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def write(folder, kind, **figures):
    with MetricsWriter(folder) as writer:
        writer.write(kind, **figures)


def wait_until_empty(lines):
    until = time.monotonic() + 60
    while not lines.empty():
        assert time.monotonic() < until
        time.sleep(0.01)
    time.sleep(0.1)  # the last line is being written


def test_times_of_lines_are_unix_seconds_that_do_not_jump_with_the_clock(tmp_path, monkeypatch):
    with MetricsWriter(tmp_path) as writer:
        writer.write("event", event="start", step=0)
        now = time.time()
        monkeypatch.setattr(time, "time", lambda: now - 1e6)
        writer.write("event", event="saved", step=1)
    before, after = (line["time"] for line in lines(tmp_path))
    assert before == pytest.approx(now, abs=60) and before <= after < before + 60  # seconds, of a busy machine


def test_tensorboard_finds_the_numbers_of_each_step(tmp_path):
    with MetricsWriter(tmp_path, sinks=[TensorBoard(tmp_path / "tensorboard")]) as writer:
        for step in (1, 2):
            writer.write("train", step=step, loss=2.5 / step, tokens=step * 64, mfu=None)
        writer.write("event", step=2, event="stop")
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = {tag: [(scalar.step, scalar.value) for scalar in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert found == {"train/loss": [(1, 2.5), (2, 1.25)], "train/tokens": [(1, 64.0), (2, 128.0)]}


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


def test_a_long_file_is_not_read_whole_to_find_its_torn_line(tmp_path):
    path, whole = tmp_path / "metrics.jsonl", 1 << 28
    with path.open("wb") as file:
        file.seek(whole - 1)  # a hole, which takes no room on the disk
        file.write(b"\n" + b"x" * 200_000)
    tracemalloc.start()
    with MetricsWriter(tmp_path):
        _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.stat().st_size == whole and peak < 1_000_000


def test_what_is_not_finite_or_unknown_is_null_so_that_every_line_is_json(tmp_path):
    write(tmp_path, "train", step=1, loss=float("nan"), gradient_norm=float("inf"), mfu=None)
    assert "NaN" not in (tmp_path / "metrics.jsonl").read_text()
    assert (lines(tmp_path)[0]["loss"], lines(tmp_path)[0]["gradient_norm"], lines(tmp_path)[0]["mfu"]) == (None,) * 3


def test_what_cannot_be_written_is_kept_and_written_when_it_can_be(tmp_path):
    """A folder that vanishes and comes back: no line is lost, none is torn."""
    with MetricsWriter(tmp_path / "run") as writer:
        writer.write("train", step=1)
        (tmp_path / "run").mkdir()
        writer.write("train", step=2)
        (tmp_path / "run").rename(tmp_path / "away")
        writer.write("train", step=3)
        (tmp_path / "away").rename(tmp_path / "run")
    assert [line["step"] for line in lines(tmp_path / "run")] == [1, 2, 3]


def test_a_line_for_which_there_is_no_room_is_not_left_half_written(tmp_path):
    write(tmp_path, "train", step=1)
    size = (tmp_path / "metrics.jsonl").stat().st_size
    with MetricsWriter(tmp_path) as writer:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, resource.RLIM_INFINITY))
        try:
            writer.write("train", step=2)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        assert [line["step"] for line in lines(tmp_path)] == [1]
    assert [line["step"] for line in lines(tmp_path)] == [1, 2]


def test_without_room_for_events_metrics_go_on_and_events_again_when_there_is(tmp_path):
    sink = TensorBoard(tmp_path / "tensorboard")
    with MetricsWriter(tmp_path, sinks=[sink]) as writer:
        writer.write("train", step=1, loss=3.0)
        wait_until_empty(sink.lines)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        try:
            for step in range(2, 40):  # TensorFlow notices after some
                writer.write("train", step=step, loss=3.0)
            wait_until_empty(sink.lines)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        for step in range(40, 60):
            writer.write("train", step=step, loss=3.0)
    assert [line["step"] for line in lines(tmp_path)] == [*range(1, 60)]
    accumulator = EventAccumulator(str(tmp_path / "tensorboard"))
    accumulator.Reload()
    assert accumulator.Scalars("train/loss")[-1].step == 59


def test_what_could_never_be_written_is_told_in_the_end(tmp_path, capfd):
    write(tmp_path / "gone", "train", step=1)
    assert capfd.readouterr().err == f"{tmp_path}/gone/metrics.jsonl: 1 lines could not be written\n"


def test_all_sinks_are_closed_even_if_the_user_interrupts_one(tmp_path):
    closed = []

    class Waits(Sink):
        def close(self, error):
            raise KeyboardInterrupt

    class Closes(Sink):
        def close(self, error):
            closed.append(error)

    with pytest.raises(KeyboardInterrupt), MetricsWriter(tmp_path, sinks=[Closes(), Waits(), Closes()]):
        pass
    assert closed == [None, None]


def test_a_sink_gets_nothing_after_its_end(tmp_path):
    """As the line of a save that ends after the loop; the file has it."""
    calls = []

    class Records(Sink):
        def write(self, kind, figures, step):
            calls.append(step)

        def close(self, error):
            calls.append("closed")

    with MetricsWriter(tmp_path, sinks=[Records()]) as writer:
        writer.write("train", step=1)
    writer.write("event", event="saved", step=1)
    assert calls == [1, "closed"]
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 2


def test_what_is_written_is_read_back_without_a_torn_line(tmp_path):
    write(tmp_path, "train", step=1, loss=2.5, mfu=None)
    write(tmp_path, "event", event="stop", step=1)
    content = (tmp_path / "metrics.jsonl").read_bytes()
    for torn in (b'{"kind": "train", "st', b'{"kind": "event", "event": "goodput", "seconds": {"step": 2.0}'):
        found = parse_lines(content + torn, "metrics.jsonl")
        assert [(line["kind"], line["step"]) for line in found] == [("train", 1), ("event", 1)]
        assert found[0]["mfu"] is None


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"kind": "train"}', "m, line 2: step is missing"),
        (b'{"step": 3}', "m, line 2: kind is missing"),
        (b'{"kind": "train", "step": "3"}', "m, line 2: step: should be a valid integer"),
        (b'{"kind": "train", "step": 3, "loss": []}', "m, line 2: loss: should be a valid number"),
        (b'{"kind": "event", "time": NaN}', "m, line 2: time: should be a finite number"),
        (b'{"a":' * 100_000 + b"}", "m, line 2: is not valid JSON (recursion limit"),
        (b'{"kind": "\xff"}', "m, line 2: is not valid JSON"),
    ],
)
def test_a_line_that_no_run_writes_is_named(line, message):
    with pytest.raises(JsonError) as error:
        parse_lines(b'{"kind": "event"}\n' + line + b"\n", "m")
    assert str(error.value).startswith(message) and len(str(error.value)) < 300


def test_the_last_line_of_each_step_is_read_in_order_and_a_line_without_a_step_is_left_out(tmp_path):
    found = ({"step": 2, "a": 1}, {"step": 1, "a": 2}, {"a": 3}, {"step": 2, "a": 4})
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"kind": "breadth"} | line) + "\n" for line in found))
    assert [(line["step"], line["a"]) for line in read_steps(path, "breadth")] == [(1, 2), (2, 4)]


def test_figures_of_steps_that_were_abandoned_are_left_out_and_events_stay():
    lines = [
        {"kind": "event", "event": "start", "step": 0}, {"kind": "train", "step": 500},
        {"kind": "eval", "step": 550}, {"kind": "event", "event": "saved", "step": 550},
        {"kind": "event", "event": "roll_back", "step": 500}, {"kind": "train", "step": 520},
        {"kind": "event", "event": "start", "step": 510}, {"kind": "train", "step": 511}, {"kind": "custom"},
    ]  # fmt: skip
    left_out = (lines[2], lines[5])
    assert without_abandoned(lines) == [line for line in lines if line not in left_out]
    assert [line["step"] for line in steps_of(lines, "train")] == [500, 511]


def test_steps_that_two_restarts_undid_are_left_out_by_the_earlier_step():
    lines = [
        {"kind": "train", "step": 15}, {"kind": "event", "event": "start", "step": 20}, {"kind": "train", "step": 21},
        {"kind": "event", "event": "roll_back", "step": 10}, {"kind": "train", "step": 11},
    ]  # fmt: skip
    assert [line["step"] for line in without_abandoned(lines)] == [20, 10, 11]
