# SPDX-License-Identifier: Apache-2.0
"""Arithmetic countdown: what is a right answer, and what the rows teach."""

import fractions
import re

import numpy as np
import pytest

from input_pipeline import countdown
from input_pipeline.countdown import CountdownWindows
from input_pipeline.errors import DataError
from input_pipeline.packing import IGNORED
from input_pipeline.sources import read_source
from settings import loading

ANSWER = "50+25=75;3 4 75\n75+4=79;3 79\n79+3=82;82\n"


def is_right(problem: str, answer: str) -> bool:
    """Judge by exact arithmetic on the expressions alone; an independent writing of `is_correct`."""
    numbers, target = re.fullmatch(r"([\d ]+)=(\d+):", problem).groups()
    left = [fractions.Fraction(number) for number in numbers.split()]
    for line in answer.splitlines():
        first, sign, second, result, rest = re.fullmatch(r"(\d+)([-+*/])(\d+)=(\d+);([\d ]+)", line).groups()
        a, b = fractions.Fraction(first), fractions.Fraction(second)
        left.remove(a)
        left.remove(b)
        left.append({"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign])
        if left[-1] != int(result) or sorted(left) != list(map(int, rest.split())):
            return False
    return left == [int(target)]


def texts(row: dict[str, np.ndarray]) -> list[tuple[str, str]]:
    """Return (question, answer) of the segments of a row."""
    found = []
    for segment in range(1, row["segments"].max() + 1):
        places = row["segments"] == segment
        tokens, targets = row["tokens"][places], row["targets"][places]
        assert row["positions"][places].tolist() == list(range(len(tokens)))
        learned = targets != IGNORED
        size = len(tokens) - learned.sum() + 1
        assert learned[size - 1 :].all() and (targets[size - 1 : -1] == tokens[size:]).all()
        found.append(
            (bytes(tokens[:size].astype(np.uint8)).decode(), bytes(targets[learned].astype(np.uint8)).decode())
        )
    return found


@pytest.mark.parametrize("stream", ["train", "heldout"])
def test_rows_teach_right_answers_and_right_verdicts_of_their_stream(stream):
    windows = CountdownWindows(0, stream)
    batch, verdicts, solved, mistakes = windows.read(np.arange(300), 128), [], 0, 0
    for index in range(300):
        for asked, answer in texts({name: values[index] for name, values in batch.items()}):
            problem, _, lines = asked.partition(":")
            problem += ":"
            numbers, target = countdown.parse(problem)
            assert countdown.is_heldout(numbers, target) == (stream == "heldout")
            if not lines:
                assert is_right(problem, answer) and countdown.is_correct(problem, answer)
                solved += 1
                continue
            assert lines.endswith("\n?")
            left = countdown.state_after(numbers, lines[:-2].split("\n"))
            assert (answer == "y") == (left is not None and target in countdown.reachable(left))
            verdicts.append(answer)
            mistakes += left is None
    assert 0.25 < verdicts.count("y") / len(verdicts) < 0.75, "the model must learn to tell them apart"
    assert mistakes > 0.2 * len(verdicts) and 0.15 < solved / (solved + len(verdicts)) < 0.35
    assert (batch["segments"] > 0).mean() > 0.75, "rows are nearly full"


def test_rows_are_a_function_of_seed_stream_and_number():
    batch = CountdownWindows(0, "train").read(np.array([7, 3]), 128)
    for again, equal in (
        (CountdownWindows(0, "train").read(np.array([3]), 128), True),
        (CountdownWindows(1, "train").read(np.array([3]), 128), False),
        (CountdownWindows(0, "heldout").read(np.array([3]), 128), False),
    ):
        assert all(np.array_equal(batch[name][1:], again[name]) for name in batch) == equal
    assert CountdownWindows(0, "train").num_examples(72) > 10_000_000


def test_only_a_complete_answer_that_uses_each_number_once_is_correct():
    problem = "3 4 25 50=82:"
    assert countdown.is_correct(problem, ANSWER) and is_right(problem, ANSWER)
    lines = ANSWER.splitlines()
    for wrong in ("", "\n".join(lines[:2]), ANSWER.replace("79+3=82;82", "79+3=82;83"),
                  "50+25=75;3 4 75\n75+4=82;3 82\n82+3=85;85", "50+50=100;3 4 100\n", "82", "x" * 100):  # fmt: skip
        assert not countdown.is_correct(problem, wrong)
    assert countdown.is_correct("25 4 50 3=82:", ANSWER), "numbers may be in any order"
    for text in ("", "82:", "3 4=x:", "3 4=7", "3 4=7: "):
        with pytest.raises(ValueError, match=r"is not a countdown problem; write one as '3 4 25 50=82:'"):
            countdown.parse(text)


def test_what_is_reachable():
    """Results are whole and from 1 to LARGEST, and nothing is multiplied or divided by 1."""
    assert countdown.reachable((2, 3)) == {5, 1, 6} and countdown.reachable((4, 4)) == {8, 16, 1}
    assert countdown.reachable((1, 7)) == {8, 6} and countdown.reachable((50, 50)) == {1}
    assert countdown.reachable((2, 3, 7)) == {
        *(12, 2, 35),
        *(8, 6),
        *(13, 1, 42),  # 5, 1 or 6 with 7
        *(12, 6, 27, 3),
        *(8, 2, 15),
        *(17, 11, 42),  # 9, 5 or 14 with 3
        *(12, 8, 20, 5),
        *(6, 2, 8),
        *(23, 19, 42),  # 10, 4 or 21 with 2
    }


def test_the_source_needs_bytes():
    data = loading.load("configs/countdown.py", "", {}).config.data
    other = loading.load("configs/countdown.py", "", {"data.tokenizer": "sentencepiece"}).config.data
    train, heldout = read_source(data, vocab_size=128, seed=0)
    assert (train.stream, heldout.stream) == ("train", "heldout")
    with pytest.raises(DataError, match=r"not data\.tokenizer=sentencepiece; use --config\.data\.tokenizer=byte"):
        read_source(other, vocab_size=128, seed=0)
