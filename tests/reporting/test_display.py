# SPDX-License-Identifier: Apache-2.0
"""What is printed on a terminal."""

from configs.errors import visible


def test_the_text_of_a_model_cannot_act_on_a_terminal():
    assert visible("def f():\n\tpass  # é\x1b[2J\r\x07") == "def f():\n\tpass  # é\ufffd[2J\ufffd\ufffd"


def test_spaces_and_joiners_of_any_language_stay_and_marks_that_reorder_a_line_do_not():
    assert visible("写真\u3000一 5\u00a0€ می\u200cخواهم 👨\u200d👩") == "写真\u3000一 5\u00a0€ می\u200cخواهم 👨\u200d👩"
    assert visible("a\u202egpj.exe\u2028b") == "a\ufffdgpj.exe\ufffdb"
