# SPDX-License-Identifier: Apache-2.0
"""Standard errors are those of repeated draws, and progress is shown while the figures are computed."""

import math
import sys

import numpy as np
import pytest

from scoring import figures
from scoring.figures import Figure, Progress


def test_the_error_of_a_mean_is_that_of_the_sample():
    values = [0, 1, 1, 0, 1]
    found = figures.mean(values)
    assert found == Figure(0.6, pytest.approx(np.std(values, ddof=1) / np.sqrt(5)), 5)
    assert figures.mean([1]).value == 1 and math.isnan(figures.mean([1]).error)


def test_the_error_of_a_ratio_is_the_spread_over_other_draws_of_the_items():
    rng = np.random.default_rng(0)
    weights = rng.integers(5, 50, (2000, 100))
    totals = 1.5 * weights + rng.normal(0, 8, weights.shape)
    drawn = (totals.sum(axis=1) / weights.sum(axis=1)).std()
    found = figures.ratio(totals[0].tolist(), weights[0].tolist())
    assert found.value == pytest.approx(totals[0].sum() / weights[0].sum()) and found.count == 100
    assert found.error == pytest.approx(drawn, rel=0.2)


def test_a_perplexity_of_no_model_is_infinite_and_its_error_is_that_of_the_exponential():
    assert figures.exponential(Figure(2.0, 0.1, 5)) == Figure(math.exp(2), pytest.approx(0.1 * math.exp(2)), 5)
    assert figures.exponential(Figure(1e4, 0.1, 5)).value == math.inf


def test_an_infinite_perplexity_of_equal_items_has_no_error():
    assert figures.exponential(Figure(800.0, 0.0, 3)) == Figure(math.inf, 0.0, 3)


def test_figures_are_flat_in_metrics_and_a_table_on_the_terminal():
    tasks = {"mine": {"acc": Figure(0.5, 0.25, 4), "acc_norm": Figure(1.0, math.nan, 1)}}
    assert figures.flat(tasks) == {"mine/acc": 0.5, "mine/acc_stderr": 0.25, "mine/acc_norm": 1.0}
    assert figures.lines(figures.flat(tasks)) == ["mine/acc: 0.5000 (standard error 0.2500)", "mine/acc_norm: 1.0000"]
    assert figures.table(tasks.items())[1:] == [
        "mine  acc       0.5000  0.2500          4", "mine  acc_norm  1.0000  -               1",
    ]  # fmt: skip


def test_progress_says_how_long_the_rest_takes(capsys, monkeypatch):
    progress, now = Progress(), iter([100.0, 101.0, 110.0])
    monkeypatch.setattr(figures.time, "monotonic", lambda: next(now))
    for done in (0, 1, 5):
        progress("log-likelihoods", done, 10)
    assert capsys.readouterr().err == "log-likelihoods: 5 of 10, 10 s left\n"


def test_the_time_left_of_a_second_suite_counts_from_its_beginning(capsys, monkeypatch):
    progress, now = Progress(), iter([100.0, 110.0, 200.0, 205.0, 210.0])  # no answer has ended at 205
    monkeypatch.setattr(figures.time, "monotonic", lambda: next(now))
    for done in (0, 10, 0, 0, 5):
        progress("log-likelihoods", done, 10)
    assert capsys.readouterr().err.splitlines()[-1] == "log-likelihoods: 5 of 10, 10 s left"


def test_on_a_terminal_the_progress_is_gone_before_the_table(capsys, monkeypatch):
    """Several answers end at once, so the last call may be far from the end."""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    progress, quiet = Progress(), Progress(quiet=True)
    for shown in (progress, quiet):
        shown("answers", 1, 9)
        shown.end()
    assert capsys.readouterr().err.count("answers: 1 of 9") == 1
    progress("answers", 2, 9)
    progress.end()
    assert capsys.readouterr().err.endswith("\r\x1b[K")
