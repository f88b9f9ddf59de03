# SPDX-License-Identifier: Apache-2.0
"""What is printed on a terminal."""

from configs.errors import visible


def test_the_text_of_a_model_cannot_act_on_a_terminal():
    assert visible("def f():\n\tpass  # é\x1b[2J\r\x07") == "def f():\n\tpass  # é\ufffd[2J\ufffd\ufffd"
