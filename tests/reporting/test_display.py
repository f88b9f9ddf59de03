# SPDX-License-Identifier: Apache-2.0
"""What is printed on a terminal."""

import time

import pytest

from configs.errors import visible
from reporting.display import Display, duration


def test_the_text_of_a_model_cannot_act_on_a_terminal():
    assert visible("def f():\n\tpass  # é\x1b[2J\r\x07") == "def f():\n\tpass  # é\ufffd[2J\ufffd\ufffd"


def test_spaces_and_joiners_of_any_language_stay_and_marks_that_reorder_a_line_do_not():
    assert visible("写真\u3000一 5\u00a0€ می\u200cخواهم 👨\u200d👩") == "写真\u3000一 5\u00a0€ می\u200cخواهم 👨\u200d👩"
    assert visible("a\u202egpj.exe\u2028b") == "a\ufffdgpj.exe\ufffdb"


def test_a_long_evaluation_shows_what_is_left_of_it(monkeypatch, capsys):
    """The first batch compiles for 100 s, and the others take 2 s each."""
    display, clock = Display(7), iter(100.0 + 2 * number for number in range(9))
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    for done in range(1, 10):
        display.evaluated(done, 50)
    assert capsys.readouterr().out.splitlines() == [
        "evaluated 4 of 50 batches  2 min left",
        "evaluated 7 of 50 batches  86 s left",
    ]


def test_a_microbatch_says_when_its_step_ends(monkeypatch, capsys):
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    display = Display(9)
    display.after(3)
    for index in range(3):
        now[0] += 2.0
        display.microbatch(3, index, 1.5)
    assert [line.rpartition("loss 1.500  ")[2] for line in capsys.readouterr().out.splitlines()] == [
        "2.0 s each  step ends in 4 s", "2.0 s each  step ends in 2 s", "2.0 s each  step ends in 0 ms",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.35, "350 ms"), (0.9994, "999 ms"), (0.9996, "1 s"), (45, "45 s"), (720, "12 min"), (12_600, "3.5 h"),
        (59 * 3600, "2.5 days"), (9.94 * 86_400, "9.9 days"), (9.96 * 86_400, "10 days"), (12 * 86_400, "12 days"),
    ],
)  # fmt: skip
def test_a_time_is_rounded_as_is_of_use(seconds, text):
    assert duration(seconds) == text


def test_while_the_batch_grows_the_time_left_is_the_least(capsys):
    figures = {"loss": 2.0, "tokens_per_second": 10.0, "mfu": None, "step_seconds": 2.0}
    for step, grows in ((1, True), (2, False), (10, True)):
        Display(10).train(step, figures, grows=grows)
    assert [line.partition("tokens/s")[2].strip() for line in capsys.readouterr().out.splitlines()] == [
        "at least 18 s left", "16 s left", "",
    ]  # fmt: skip


def test_the_bar_of_an_evaluation_is_that_of_the_steps_again_after_it(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    clock = iter([0.0, 0.0, 100.0, 110.0, 112.0])
    with Display(7) as display:
        monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
        display.after(3)
        bars = []
        for done in (1, 2, 3):
            display.evaluated(done, 3)
            (task,) = display.progress.tasks
            bars.append((task.completed, task.total))
    assert bars[1:] == [(2, 3), (3, 7)]


@pytest.mark.parametrize(("terminal", "is_live"), [("xterm", True), ("", True), ("dumb", False), ("unknown", False)])
def test_a_terminal_that_cannot_draw_a_line_again_has_plain_lines(monkeypatch, capsys, terminal, is_live):
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", terminal)
    figures = {"loss": 2.0, "tokens_per_second": 10.0, "mfu": None, "step_seconds": 2.0}
    with Display(10) as display:
        assert display.live == is_live
        display.train(1, figures)
    if not is_live:
        assert capsys.readouterr().out.startswith("step  1/10  loss 2.000")
