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
from input_pipeline.tokenization import NumberTokenizer
from settings import loading

ANSWER = "12+8=20;3 4 20\n20+4=24;3 24\n24+3=27;27\n"


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
        decode = NumberTokenizer().decode
        found.append((decode(tokens[:size].tolist()), decode(targets[learned].tolist())))
    return found


@pytest.mark.parametrize("stream", ["train", "heldout"])
def test_rows_teach_right_answers_and_right_verdicts_of_their_stream(stream):
    windows = CountdownWindows(0, stream)
    batch, verdicts, answers, mistakes, of_numbers = windows.read(np.arange(300), 128), [], [], 0, 0
    for index in range(300):
        for asked, answer in texts({name: values[index] for name, values in batch.items()}):
            problem, _, lines = asked.partition(":")
            problem += ":"
            numbers, target = countdown.parse(problem)
            assert len(numbers) == 2 or countdown.is_heldout(numbers, target) == (stream == "heldout")
            if not lines:
                assert is_right(problem, answer) == countdown.is_correct(problem, answer)
                assert countdown.state_after(numbers, answer[:-1].split("\n")) is not None, "attempts are moves too"
                answers.append(countdown.is_correct(problem, answer))
                continue
            assert lines.endswith("\n?") or lines == "?"
            left = countdown.state_after(numbers, lines[:-2].split("\n") if lines != "?" else [])
            assert (answer == "y") == (left is not None and target in countdown.reachable(left))
            verdicts.append(answer)
            mistakes += left is None
            of_numbers += lines == "?"
    assert 0.25 < verdicts.count("y") / len(verdicts) < 0.75, "the model must learn to tell them apart"
    assert mistakes > 0.1 * len(verdicts) and 0.3 < of_numbers / len(verdicts) < 0.6
    assert 0.1 < len(answers) / (len(answers) + len(verdicts)) < 0.3 and 0.4 < np.mean(answers) < 0.8
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
    problem = "3 4 8 12=27:"
    assert countdown.is_correct(problem, ANSWER) and is_right(problem, ANSWER)
    lines = ANSWER.splitlines()
    for wrong in ("", "\n".join(lines[:2]), ANSWER.replace("24+3=27;27", "24+3=27;28"),
                  "12+8=20;3 4 20\n20+4=26;3 26\n26+3=29;29", "12+12=24;3 4 24\n", "27", "x" * 100):  # fmt: skip
        assert not countdown.is_correct(problem, wrong)
    assert countdown.is_correct("8 4 12 3=27:", ANSWER), "numbers may be in any order"
    for text in ("", "82:", "3 4=x:", "3 4=7", "3 4=7: "):
        with pytest.raises(ValueError, match=r"is not a countdown problem; write one as '3 4 8 12=27:'"):
            countdown.parse(text)


def test_what_is_reachable():
    """Results are whole and from 1 to LARGEST, and nothing is multiplied or divided by 1."""
    assert countdown.reachable((2, 3)) == {5, 1, 6} and countdown.reachable((4, 4)) == {8, 16, 1}
    assert countdown.reachable((1, 7)) == {8, 6} and countdown.reachable((30, 30)) == {1}
    assert countdown.reachable((2, 3, 7)) == {
        *(12, 2),  # 5 and 7; their product is too large
        *(8, 6),
        *(13, 1),
        *(12, 6, 27, 3),
        *(8, 2, 15),
        *(17, 11),
        *(12, 8, 20, 5),
        *(6, 2, 8),
        *(23, 19),
    }


def test_the_source_needs_a_token_for_each_number():
    data = loading.load("configs/countdown.py", "", {}).config.data
    other = loading.load("configs/countdown.py", "", {"data.tokenizer": "sentencepiece"}).config.data
    train, heldout = read_source(data, vocab_size=228, seed=0)
    assert (train.stream, heldout.stream) == ("train", "heldout")
    with pytest.raises(DataError, match=r"not data\.tokenizer=sentencepiece; use --config\.data\.tokenizer=numbers"):
        read_source(other, vocab_size=228, seed=0)
