# SPDX-License-Identifier: Apache-2.0
"""What is measured on held-out batches, and what is said where there was nothing to measure."""

import math
import types

import numpy as np
import pytest

from configs.base import get_config
from core import evaluation
from core.evaluations.votes import earlier_votes
from core.evaluators import EvaluationContext
from input_pipeline.tasks.countdown import CountdownWindows
from input_pipeline.tokenization import open_tokenizer
from objectives import language_modeling
from objectives.objective import Objective
from puzzles.voting import Votes
from reporting.step_log import format_evaluation


class Counting:
    """A run, and an objective, whose batches are what it measures."""

    objective = Objective()

    def eval_step(self, params, batch, frozen):
        return batch

    def format_metrics(self, figures):
        return "loss", f"{figures['loss']:.2f}", "tokens"


def measured(monkeypatch, *batches):
    monkeypatch.setattr(evaluation, "heldout_batches", lambda *_: batches)
    figures, weight = evaluation.evaluate_heldout(EvaluationContext(Counting(), {}, {}, None, None, 0))
    return figures, weight, format_evaluation(Counting(), figures, weight)


def test_means_are_of_all_that_counts(monkeypatch):
    figures, weight, said = measured(monkeypatch, {"loss": (6.0, 2)}, {"loss": (0.0, 0)}, {"loss": (2.0, 2)})
    assert (figures, weight, said) == ({"loss": 2.0}, 4, ("loss", "2.00", "tokens"))


@pytest.mark.parametrize("returned", [None, {}, {"mine": 1.0}], ids=str)
def test_what_summary_may_not_return_is_named(monkeypatch, returned):
    monkeypatch.setattr(Counting, "objective", types.SimpleNamespace(summary=lambda means: returned))
    with pytest.raises(TypeError, match=r"^summary of the objective returned .* must return a dictionary with 'loss'"):
        measured(monkeypatch, {"loss": (6.0, 2)})


@pytest.mark.parametrize("returned", [None, "loss 1.0", ("loss", 1.0, "tokens"), ("loss", "1.0")], ids=str)
def test_what_format_metrics_may_not_return_is_named(returned):
    with pytest.raises(TypeError, match=r"^format_metrics of the objective returned .*; it must return three texts"):
        format_evaluation(types.SimpleNamespace(format_metrics=lambda figures: returned), {}, 1)


def test_votes_of_later_steps_and_damaged_ones_are_left_out(tmp_path, caplog):
    """A damaged file ends no run, and the steps after a roll back are no earlier ones."""
    for name in ("10", "20", "30", "other"):
        Votes().save(tmp_path / f"{name}.gz")
    (tmp_path / "10.gz").write_bytes(b"no votes")
    assert list(earlier_votes(tmp_path, 30)) == ["20"]
    assert "the votes of step 10 are left out: " in caplog.text


def test_a_prompt_that_fills_the_model_has_no_sample_and_no_command():
    """The length of the cache is a multiple of 128, so a negative room would be 128 tokens."""
    tokenizer = open_tokenizer("byte")
    rows = {"tokens": np.array([[*b"some words, and more"]]), "segments": np.ones((1, 20))}
    heldout = types.SimpleNamespace(read=lambda rows_, length: rows)
    corpus = types.SimpleNamespace(heldout=heldout, tokenizer=tokenizer, is_of_conversations=False)
    config = get_config()
    for max_length, expected in ((12, []), (14, ["--max_tokens=1"]), (200, ["--max_tokens=64"])):
        config.model.max_length = max_length
        assert [line.split()[-1] for line in evaluation.next_lines(config, corpus, "runs/a")] == expected
    config.model.max_length = 12
    assert evaluation.sample_lines(types.SimpleNamespace(config=config), {}, corpus) == []


def test_a_mean_over_nothing_is_no_perfect_loss(monkeypatch):
    figures, weight, said = measured(monkeypatch, {"loss": (0.0, 0)})
    assert math.isnan(figures["loss"]) and weight == 0 and said == ("loss", "unknown", "tokens")


def test_a_lost_batch_does_not_lower_the_bits_per_byte():
    """The bytes are those of all held-out text, so a part of the tokens must stand for all of them."""
    text = types.SimpleNamespace(num_documents=1, num_tokens=100, num_bytes=300, packing_summary=lambda length: "")
    corpus = types.SimpleNamespace(heldout=text, is_of_conversations=False, unigram_bits_per_byte=None)
    run = types.SimpleNamespace(objective=language_modeling.make(get_config()), config=get_config())
    for weight in (100, 75):
        line = evaluation.heldout_lines(run, {"loss": 6 * math.log(2)}, weight, corpus)[-1]
        assert line == "held-out bits per byte: 2.00"


def test_a_problem_of_a_task_is_a_prompt_too():
    corpus = types.SimpleNamespace(heldout=CountdownWindows(0, "heldout"), tokenizer=open_tokenizer("numbers"))
    assert evaluation.opening(corpus, 128)
