# SPDX-License-Identifier: Apache-2.0
"""What the answers of a model come to: chosen by likelihood or by that per byte, exact or not, bits per byte."""

import math

import pytest

from configs.errors import ConfigError
from input_pipeline.tokenization import ByteTokenizer
from scoring import tasks
from scoring.likelihood import Likelihood
from scoring.questions import Item
from tests.scoring.test_texts import stand_in

CHOICES = {"question": "q", "choices": ["ä" * 4, "abc", "abcdefgh"], "answer": 0}
TEXTS = ["two words", "ä"]


@pytest.fixture
def scored(monkeypatch):
    """Score items by likelihoods and answers that are given, not computed."""

    def scored(items: list[Item], values: list[float], answers: list[str]):
        monkeypatch.setattr(
            tasks, "log_likelihoods", lambda model, rows: [Likelihood(value, False) for value in values]
        )
        monkeypatch.setattr(tasks, "continue_greedily", lambda model, prompts, **how: answers[: len(prompts)])
        results = tasks.score(stand_in(ByteTokenizer(), 100), items)
        return results, tasks.figures_of(results)

    return scored


def test_a_choice_is_normalised_by_its_bytes(scored):
    """By characters the third would be chosen: -8 / 8 bytes, -4 / 3 and -9 / 8."""
    [result], found = scored([Item("t", 1, "choices", CHOICES)], [-8.0, -4.0, -9.0], [])
    assert (result["chosen"], result["chosen_norm"]) == (1, 0)
    assert found["t"]["acc"].value == 0 and found["t"]["acc_norm"].value == 1


def test_an_answer_is_exact_but_for_white_space_at_its_ends(scored):
    items = [Item("t", n, "exact", {"prompt": "p", "exact": " 42"}) for n in range(3)]
    results, found = scored(items, [], [" 42 ", "42.", "4 2"])
    assert [result["exact_match"] for result in results] == [1, 0, 0]
    assert found["t"]["exact_match"].value == pytest.approx(1 / 3)


def test_perplexities_are_over_all_texts_of_a_task(scored):
    items = [Item("t", n, "text", {"text": text}) for n, text in enumerate(TEXTS)]
    _, found = scored([*items, Item("other", 1, "text", {"text": "a"})], [-8.0, -3.0, -1.0], [])
    assert found["t"]["bits_per_byte"].value == pytest.approx(11 / math.log(2) / 11)
    assert found["t"]["byte_perplexity"].value == found["t"]["token_perplexity"].value == pytest.approx(math.e)
    assert found["t"]["word_perplexity"].value == pytest.approx(math.exp(11 / 3))
    assert found["other"]["byte_perplexity"].value == pytest.approx(math.e)


def test_a_choice_that_no_row_can_hold_is_refused_with_its_line():
    """Before training begins, not at the first evaluation."""
    items = [Item("t", 1, "choices", CHOICES), Item("t", 2, "choices", CHOICES | {"choices": ["a" * 64, "b"]})]
    tasks.check_lengths(items, ByteTokenizer(), 65, "--questions")  # a space belongs to the choice
    with pytest.raises(ConfigError, match=r"^--questions: line 2 of t has a choice of 65 tokens, more than model"):
        tasks.check_lengths(items, ByteTokenizer(), 64, "--questions")


def test_a_space_stands_between_question_and_choice_unless_there_is_white_space():
    assert tasks.separated("q", "a") == " a"
    assert tasks.separated("q\n", "a") == tasks.separated("", "a") == "a" and tasks.separated("q", "\ta") == "\ta"
