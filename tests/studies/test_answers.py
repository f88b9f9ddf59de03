# SPDX-License-Identifier: Apache-2.0
"""The sentence of a group claims a difference as rarely as it says, and says how one configuration stands."""

import numpy as np
import pytest

pytest.importorskip("optuna", reason="studies need `make setup EXTRAS=studies`")

from studies.report import answers


def row(name: str, values: list[float], *, failures: tuple[str, ...] = (), left: int = 0) -> answers.Row:
    """Return a row of a table with the values of its seeds."""
    return answers.Row(name, "nothing", values, [{} for _ in values], 0.0, None, list(failures), left)


def said(*rows: answers.Row) -> str:
    """Return the answer of a group."""
    return answers.sentence(list(rows), "eval_exact_accuracy", "maximize")


def test_the_least_difference_is_that_of_the_tables_of_tukey_s_test():
    """q(0.95; 3 means, 6 degrees of freedom) = 4.339; the pooled variance of three rows of three is 1."""
    rows = [row(name, [mean - 1.0, mean, mean + 1.0]) for name, mean in (("a", 0.0), ("b", 2.0), ("c", 4.0))]
    assert answers.least_difference(rows, *rows[:2]) == pytest.approx(4.339 / 3**0.5, abs=1e-3)


@pytest.mark.slow
def test_six_equal_configurations_rarely_differ():
    rng, wrong = np.random.default_rng(0), 0
    for _ in range(100):
        rows = [row(f"{number}", list(rng.normal(0.5, 0.02, 3))) for number in range(6)]
        wrong += not said(*rows).startswith("No difference beyond the spread over seeds: ")
    assert wrong <= 12, "5 of 100 are expected"


def test_a_group_of_one_configuration_states_its_mean():
    assert said(row("baseline", [0.5, 0.7])) == "baseline has the exact accuracy 0.6000 ± 0.1000, mean of 2 seeds."
    assert said(row("baseline", [0.5], left=1)) == (
        "baseline has the exact accuracy 0.5000: no conclusion from one seed; 1 trial is left."
    )


def test_a_group_whose_trials_have_all_ended_does_not_promise_an_answer():
    ended = said(row("a", [0.5]), row("b", [], failures=("status 3",)))
    assert ended == "No answer: 1 of 2 configurations are done, 1 failed, cancelled or refused, 0 trials are left."
    assert said(row("a", [], left=1), row("b", [], left=1)).startswith("No answer yet: 0 of 2 ")
    assert said(row("a", [0.5], left=1), row("b", [], left=2)).startswith("No answer yet: 0 of 2 "), "one seed is left"


@pytest.mark.parametrize(("values", "shown"), [
    ([1.2e-5, 1.4e-5], "0.00001300 ± 0.00000100"),
    ([123_456.0, 123_458.0], "123,457 ± 1"),
    ([-0.5, -0.7], "-0.6000 ± 0.1000"),
])  # fmt: skip
def test_a_figure_has_the_decimals_of_its_size(values, shown):
    """As a mean squared error, or tokens a second."""
    assert f" {shown}, mean of 2 seeds." in said(row("a", values))


@pytest.mark.parametrize(("direction", "best", "worst"), [("minimize", "a", "c"), ("maximize", "c", "a")])
def test_the_best_configuration_is_the_one_with_the_metric_in_the_direction_of_the_suite(direction, best, worst):
    rows = [row(name, [mean - 0.01, mean + 0.01]) for name, mean in (("a", 1.0), ("b", 2.0), ("c", 3.0))]
    told = answers.sentence(rows, "eval_loss", direction)
    assert told.startswith(f"{best} has the best loss, ") and f", and {worst} the worst, " in told


def test_equal_values_have_no_best_and_no_worst():
    assert said(row("a", [1.0, 1.0]), row("b", [1.0, 1.0])) == (
        "All 2 configurations have the same exact accuracy, 1.0000 ± 0.0000."
    )
    assert said(row("a", [0.0]), row("b", [0.0])) == (
        "All 2 configurations have the same exact accuracy, 0.0000: no conclusion from one seed."
    )


def test_the_spread_of_a_row_weighs_by_its_seeds():
    """Variances of 1 from 3 seeds and of 4 from 2, with 2 and 1 degrees of freedom: 2. q(0.95; 2 means, 3) = 4.501."""
    rows = [row("a", [-1.0, 0.0, 1.0]), row("b", [8**0.5, 0.0])]
    assert answers.least_difference(rows, *rows) == pytest.approx(4.501 * (2 * (1 / 3 + 1 / 2) / 2) ** 0.5, abs=1e-3)
