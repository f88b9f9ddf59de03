# SPDX-License-Identifier: Apache-2.0
"""What is measured on held-out batches, and what is said where there was nothing to measure."""

import math

from core import evaluation
from objectives.objective import Objective
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
    figures, weight = evaluation.evaluate_heldout(Counting(), {}, None)
    return figures, weight, format_evaluation(Counting(), figures, weight)


def test_means_are_of_all_that_counts(monkeypatch):
    figures, weight, said = measured(monkeypatch, {"loss": (6.0, 2)}, {"loss": (0.0, 0)}, {"loss": (2.0, 2)})
    assert (figures, weight, said) == ({"loss": 2.0}, 4, ("loss", "2.00", "tokens"))


def test_a_mean_over_nothing_is_no_perfect_loss(monkeypatch):
    figures, weight, said = measured(monkeypatch, {"loss": (0.0, 0)})
    assert math.isnan(figures["loss"]) and weight == 0 and said == ("loss", "unknown", "tokens")
