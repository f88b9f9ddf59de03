# SPDX-License-Identifier: Apache-2.0
"""What is printed on a terminal."""

import time

from configs.errors import visible
from reporting.display import Display


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
