# SPDX-License-Identifier: Apache-2.0
"""How a metric depends on a size: a line in the logarithm of the size, fitted by least squares to all seeds.

The slope is the change of the metric for each doubling. An accuracy lies in [0, 1], so a power law of it has no
meaning; the line only describes the sizes that were tried. The lack-of-fit test says where a line is the wrong curve
(Draper and Smith, Applied Regression Analysis, 3rd edition, sections 1.4 and 2.1).
"""

import dataclasses

import numpy as np
from scipy import special

from reporting import display

CONFIDENCE = 0.95
FEWEST = 3  # different sizes: two always lie on a line
ROUNDING = 8 * np.finfo(float).eps  # of a metric, as a fraction of the largest
BENDS = 0.05  # a smaller probability of the lack-of-fit test says that the points do not follow a line


@dataclasses.dataclass(frozen=True)
class Fit:
    """A line, metric = level + slope * log2(size), through at least FEWEST different sizes."""

    num_points: int  # number of (size, metric) pairs
    slope: float  # change of the metric for each doubling of the size
    level: float  # of the line at size 1
    mean: float  # of log2(size)
    spread: float  # sum of the squared deviations of log2(size) from `mean`
    deviation: float  # standard deviation of the points from the line
    # probability of a lack of fit at least as large as this one, if the metric does follow a line; None: no size has
    # two points
    bend: float | None

    @property
    def quantile(self) -> float:
        """The quantile of the t distribution for two-sided intervals."""
        return float(special.stdtrit(self.num_points - 2, (1 + CONFIDENCE) / 2))

    @property
    def interval(self) -> tuple[float, float]:
        """The confidence interval of the slope."""
        half = self.quantile * self.deviation / self.spread**0.5
        return self.slope - half, self.slope + half

    @property
    def figures(self) -> tuple[str, str, str]:
        """The slope and both ends of its interval, with signs and with as many decimals as the largest needs."""
        numbers = self.slope, *self.interval
        decimals = display.decimals(max(map(abs, numbers)))
        return tuple(f"{number:+,.{decimals}f}" for number in numbers)

    @property
    def bends(self) -> bool:
        """Whether the points do not follow a line."""
        return self.bend is not None and self.bend < BENDS

    def line(self, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the metric on the line, and half the width of the confidence band of the mean.

        Sizes are [n], greater than 0.
        """
        places = np.log2(sizes)
        error = self.deviation * np.sqrt(1 / self.num_points + (places - self.mean) ** 2 / self.spread)
        return self.level + self.slope * places, self.quantile * error


def fit(sizes: list[float], metrics: list[float]) -> Fit | None:
    """Return the line through the points with a size above 0; None if they have fewer than FEWEST different sizes."""
    x, y = (np.array(numbers, float) for numbers in (sizes, metrics))
    x, y = np.log2(x[x > 0]), y[x > 0]
    if len(np.unique(x)) < FEWEST:
        return None
    mean = x.mean()
    spread = float(((x - mean) ** 2).sum())
    slope = float(((x - mean) * (y - y.mean())).sum() / spread)
    level = float(y.mean() - slope * mean)
    residual = float((((y - y.mean()) - slope * (x - mean)) ** 2).sum())
    deviation = (residual / (len(x) - 2)) ** 0.5
    return Fit(len(x), slope, level, float(mean), spread, deviation, _bend(x, y, residual))


def _bend(x: np.ndarray, y: np.ndarray, residual: float) -> float | None:
    """Return the probability of the F test for lack of fit; `residual` is the sum of squares around the line."""
    places, which = np.unique(x, return_inverse=True)
    centred = y - y.mean()  # a large level would take the digits of small differences
    means = np.bincount(which, centred) / np.bincount(which)
    pure, freedom = float(((centred - means[which]) ** 2).sum()), len(x) - len(places)
    if not freedom:
        return None
    rounding = len(y) * float(ROUNDING * np.abs(y).max()) ** 2
    if pure <= rounding:  # equal points have no error, so that any distance from the line is a bend
        return float(residual <= rounding)
    bent = max(0.0, residual - pure) / (len(places) - 2)
    return float(special.fdtrc(len(places) - 2, freedom, bent / (pure / freedom)))


def sentence(found: Fit | None, num_sizes: int, axis: str, metric: str) -> str:
    """Return what the fit says, with its figures; `num_sizes` different sizes of the axis have a metric."""
    if found is None:
        return f"There is no fit from {num_sizes} sizes; it needs {FEWEST}."
    none = ", which includes 0" if found.interval[0] <= 0 <= found.interval[1] else ""
    slope, low, high = found.figures
    said = f"Each doubling of {axis} changes the {metric} by {slope} (95 % interval {low} to {high}{none})"
    if found.bends:
        return f"{said}, but the points do not follow a line (lack of fit, p = {found.bend:.2g})."
    return f"{said}." if found.bend is not None else f"{said}, if it follows a line, which one seed cannot show."
