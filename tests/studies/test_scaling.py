# SPDX-License-Identifier: Apache-2.0
"""The scaling fit has the figures of textbooks, its band covers the truth as often as it says, and bends are seen."""

import numpy as np
import pytest

from studies.report import scaling

SIZES = [1.0, 2.0, 4.0, 8.0, 16.0]  # log2: 0, 1, 2, 3, 4


def test_slope_interval_and_band_are_those_computed_by_hand():
    """y = (1, 3, 2, 5, 4): slope 0.8, level 1.4, sum of squares 3.6, so that the deviation is sqrt(1.2)."""
    found = scaling.fit(SIZES, [1.0, 3.0, 2.0, 5.0, 4.0])
    assert (found.slope, found.level, found.deviation) == pytest.approx((0.8, 1.4, 1.2**0.5))
    assert found.quantile == pytest.approx(3.182446, abs=1e-6), "t with 3 degrees of freedom, 97.5 %"
    half = 3.182446 * (1.2 / 10) ** 0.5
    assert found.interval == pytest.approx((0.8 - half, 0.8 + half))
    means, halves = found.line(np.array([4.0, 16.0]))
    assert means == pytest.approx([3.0, 4.6])
    assert halves == pytest.approx([3.182446 * (1.2 * 0.2) ** 0.5, 3.182446 * (1.2 * 0.6) ** 0.5])
    assert found.bend is None, "without repeated sizes there is no pure error"


def test_the_band_covers_the_true_mean_in_95_percent_of_simulated_studies():
    rng, sizes = np.random.default_rng(0), np.repeat(SIZES, 3)
    truth, covered, slopes = 0.3 + 0.05 * np.log2(SIZES), [], []
    for _ in range(400):
        found = scaling.fit(list(sizes), list(0.3 + 0.05 * np.log2(sizes) + rng.normal(0, 0.02, len(sizes))))
        means, halves = found.line(np.array(SIZES))
        covered.append(np.abs(means - truth) <= halves)
        slopes.append(found.interval[0] <= 0.05 <= found.interval[1])
    assert np.mean(covered, axis=0) == pytest.approx(0.95, abs=0.03) and np.mean(slopes) == pytest.approx(
        0.95, abs=0.03
    )


def test_a_curve_that_levels_off_is_said_to_bend_and_a_line_rarely():
    rng, sizes = np.random.default_rng(1), np.repeat(SIZES, 3)
    levels_off = np.minimum(np.log2(sizes), 2) * 0.1
    bent = [scaling.fit(list(sizes), list(levels_off + rng.normal(0, 0.01, 15))).bends for _ in range(100)]
    straight = [scaling.fit(list(sizes), list(np.log2(sizes) + rng.normal(0, 0.01, 15))).bends for _ in range(200)]
    assert np.mean(bent) == 1.0 and np.mean(straight) < 0.1


@pytest.mark.parametrize("sizes, count", [([1, 1, 2, 2], 2), ([0, 0, 3, 9], 3), ([5, 5], 1)])
def test_fewer_than_three_different_positive_sizes_have_no_fit(sizes, count):
    assert scaling.fit(sizes, [0.1 * n for n in range(len(sizes))]) is None
    assert scaling.sentence(None, count, "x", "y") == f"There is no fit from {count} sizes; it needs 3."
    assert scaling.fit([0, *SIZES], [9.0, 1.0, 3.0, 2.0, 5.0, 4.0]).slope == pytest.approx(0.8), (
        "a size of 0 is left out"
    )


def test_the_sentence_has_the_slope_with_its_interval_and_says_what_weakens_it():
    noisy = scaling.sentence(scaling.fit(SIZES, [1.0, 3.0, 2.0, 5.0, 4.0]), 5, "parameters", "exact accuracy")
    assert noisy == (
        "Each doubling of parameters changes the exact accuracy by +0.8000 "
        "(95 % interval -0.3024 to +1.9024, which includes 0), if it follows a line, which one seed cannot show."
    )
    small = scaling.sentence(scaling.fit(SIZES, [1e-5, 3e-5, 2e-5, 5e-5, 4e-5]), 5, "x", "y")
    assert "by +0.00000800 (95 % interval -0.00000302 to +0.00001902, which" in small
    bent = scaling.fit([1, 1, 2, 2, 4, 4], [0.0, 0.01, 1.0, 1.01, 1.0, 1.01])
    assert "the points do not follow a line (lack of fit, p = " in scaling.sentence(bent, 3, "x", "y")


def test_seeds_that_agree_exactly_still_show_a_bend():
    """Without an error of its own, any distance from the line is a bend."""
    bent = scaling.fit([1, 1, 2, 2, 4, 4], [0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    line = scaling.fit([1, 1, 2, 2, 4, 4], [0.1, 0.1, 0.2, 0.2, 0.3, 0.3])
    assert (bent.bend, line.bend) == (0.0, 1.0)
    for value in (0.3, 0.68, 0.1):  # whose means round
        assert scaling.fit([1, 1, 1, 2, 2, 2, 4, 4, 4], [value] * 9).bend == 1.0
    assert scaling.fit([1, 2, 4], [0.0, 1.0, 1.0]).bend is None, "one seed tests nothing"


@pytest.mark.parametrize("level", [0.0, 100.0, 10_000.0])
def test_a_bend_is_the_same_at_every_level_of_the_metric(level):
    """A cost in thousands with small differences had no bend, because its level counted as rounding.

    The sum of squares around the line is 3e-4, and 1.5e-6 around the means, so that F(1, 3) is 600.
    """
    metrics = level + np.array([0.5, 0.501, 0.51, 0.511, 0.55, 0.551])
    found = scaling.fit([1, 1, 2, 2, 4, 4], list(metrics))
    assert found.bends and found.bend == pytest.approx(0.000149157, rel=1e-5)
