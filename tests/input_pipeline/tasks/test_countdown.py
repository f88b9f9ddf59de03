# SPDX-License-Identifier: Apache-2.0
"""Arithmetic countdown: what is a right answer, and what the rows teach."""

import fractions
import re

import numpy as np
import pytest

from input_pipeline.errors import DataError
from input_pipeline.packing import IGNORED
from input_pipeline.sources import read_source
from input_pipeline.tasks import countdown
from input_pipeline.tasks.countdown import CountdownWindows
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
        for used in (a, b):
            if used not in left:
                return False
            left.remove(used)
        left.append({"+": a + b, "-": a - b, "*": a * b, "/": a / b}[sign])
        if left[-1] != int(result) or sorted(left) != list(map(int, rest.split())):
            return False
    return left == [int(target)]


def texts(row: dict[str, np.ndarray]) -> list[tuple[str, str, str]]:
    """Return (question, answer, what is learned of it) of the segments of a row."""
    found, decode = [], NumberTokenizer().decode
    for segment in range(1, row["segments"].max() + 1):
        places = row["segments"] == segment
        tokens, targets = row["tokens"][places], row["targets"][places]
        assert row["positions"][places].tolist() == list(range(len(tokens)))
        learned = targets != IGNORED
        assert (targets[:-1] == tokens[1:])[learned[:-1]].all()
        whole = decode([*tokens.tolist(), int(targets[-1])])
        question, colon, answer = whole.partition(":")
        found.append((question + colon, answer, decode(targets[learned].tolist())))
    return found


@pytest.mark.parametrize("stream", ["train", "heldout"])
def test_rows_teach_right_answers_and_right_verdicts_of_their_stream(stream):
    windows = CountdownWindows(0, stream)
    batch, verdicts, right, mistakes = windows.read(np.arange(300), 128), [], [], 0
    for index in range(300):
        for problem, answer, learned in texts({name: values[index] for name, values in batch.items()}):
            numbers, target = countdown.parse(problem)
            assert countdown.is_heldout(numbers, target) == (stream == "heldout")
            lines = []
            for line, verdict in re.findall(r"([^\n]+)\n\?([yn])", answer):
                lines.append(line)
                left = countdown.state_after(numbers, lines)
                assert (verdict == "y") == (left is not None and target in countdown.reachable(left))
                assert left is not None or line not in learned, "a mistake is not learned"
                verdicts.append(verdict)
            mistakes += left is None
            assert countdown.is_correct(problem, answer.removesuffix("?y")) == is_right(problem, "\n".join(lines))
            right.append(is_right(problem, "\n".join(lines)))
            assert not right[-1] or lines[0] in learned
    assert 0.2 < verdicts.count("n") / len(verdicts) < 0.6, "the model must learn to tell them apart"
    assert 0.15 < mistakes / len(right) < 0.35 and 0.25 < np.mean(right) < 0.6
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


@pytest.mark.parametrize("kind", [CountdownWindows, countdown.CountdownRollouts])
def test_problems_that_do_not_fit_a_row_are_left_out_and_a_row_without_any_is_an_error(kind):
    windows = kind(seed=0, stream="train")
    learned = windows.read(np.arange(64), 32)["targets"] != IGNORED
    assert learned.any(axis=1).all(), "each row has an answer"
    windows.check_counts(32)
    with pytest.raises(DataError, match=r"train.sequence_length=8 is too short for a countdown problem; use 128"):
        windows.check_counts(8)


def test_the_source_needs_a_token_for_each_number():
    data = loading.load("configs/countdown.py", "", {}).config.data
    other = loading.load("configs/countdown.py", "", {"data.tokenizer": "sentencepiece"}).config.data
    train, heldout = read_source(data, vocab_size=228, seed=0)
    assert (train.stream, heldout.stream) == ("train", "heldout")
    with pytest.raises(DataError, match=r"not data\.tokenizer=sentencepiece; use --config\.data\.tokenizer=numbers"):
        read_source(other, vocab_size=228, seed=0)
