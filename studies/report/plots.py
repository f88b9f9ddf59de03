# SPDX-License-Identifier: Apache-2.0
"""The plots of a study's page: learning curves, the scaling fit, and cost against the metric.

Each `draw_` function is an argument of reporting/page_parts.py: figure_of.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from reporting.page_parts import COLOURS, GRID, INK, add_legend, format_ticks, short
from studies.report.answers import Answer, Row, digits, figure
from studies.report.costs import Costs

HEIGHT = 2.9  # inches of a plot without a legend
PLACE = (0.095, 0.165, 0.88, 0.795)  # of the axes in a figure; labels of ticks go beyond their ends
MARKERS = ".s^Dv*"  # of each way of choosing
ALONE = "alone"  # one trajectory, as core/evaluations/breadth.py names it
LINE_POINTS = 60  # of a drawn line and its band


def draw_curves(drawn: tuple[list[Row], str], figure_, tips: dict[str, str]) -> None:
    """Draw (rows, metric): the metric over steps, a line for each seed."""
    rows, metric = drawn
    axes = figure_.add_axes(PLACE)
    for number, row in enumerate(rows):
        for which, (seed, curve) in enumerate(zip(row.seeds, row.curves, strict=True)):
            steps = sorted(curve)
            line = axes.plot(
                steps, [curve[step] for step in steps], color=COLOURS[number % len(COLOURS)], linewidth=1.3,
                marker="." if len(steps) < 3 else "", label="_" if which else row.name, gid=f"line{number}-{seed}",
            )  # fmt: skip
            tips[line[0].get_gid()] = f"{row.name}, seed {seed}: {digits(curve[steps[-1]])}" if steps else row.name
    format_ticks(axes.xaxis)
    finish(axes, "step", metric)
    add_legend(axes, *axes.get_legend_handles_labels())


def draw_breadth(rows: list[Row], figure_, tips: dict[str, str]) -> None:
    """Draw accuracy over supervision steps, the mean over seeds: alone, and by each way of choosing."""
    axes = figure_.add_axes(PLACE)
    drawn = [depth_curves(row.breadths) for row in rows]
    ways = sorted({way for curves in drawn for way in curves}, key=lambda way: (way != ALONE, way))
    for number, (row, curves) in enumerate(zip(rows, drawn, strict=True)):
        for way, curve in curves.items():
            line = axes.plot(
                sorted(curve), [curve[depth] for depth in sorted(curve)], color=COLOURS[number % len(COLOURS)],
                linewidth=1.3, linestyle="-" if way == ALONE else "--", marker=MARKERS[ways.index(way) % len(MARKERS)],
                markersize=4, label=f"{row.name}, {way}", gid=f"depth{number}-{way}",
            )  # fmt: skip
            tips[line[0].get_gid()] = f"{row.name}, {way}: {curve[max(curve)]:.4f} after {max(curve)} steps"
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    finish(axes, "supervision steps", "accuracy")
    add_legend(axes, *axes.get_legend_handles_labels())


def depth_curves(breadths: list[dict[str, float]]) -> dict[str, dict[int, float]]:
    """Return {way of choosing: {steps: mean accuracy over seeds}}: alone, and others with the most trajectories.

    Args:
      breadths: of each seed, {"WAY/STEPSxTRAJECTORIES": accuracy}.
    """
    shared = set.intersection(*map(set, breadths)) if breadths else set()
    points = [(way, *map(int, place.split("x")), name) for name in shared for way, place in [name.split("/")]]
    widest = max((width for *_, width, _ in points), default=1)
    curves: dict[str, dict[int, float]] = {}
    for way, depth, width, name in sorted(points):
        if width == (1 if way == ALONE else widest):
            title = way if way == ALONE else f"{way} of {width}"
            curves.setdefault(title, {})[depth] = statistics.fmean(of[name] for of in breadths)
    return curves


def draw_fit(drawn: tuple[Answer, str, str], figure_, tips: dict[str, str]) -> None:
    """Draw (answer with a fit, axis, metric): every seed's point, the line and its confidence band."""
    answer, axis, metric = drawn
    axes = figure_.add_axes(PLACE)
    shown = {name: size for name, size in answer.sizes.items() if size > 0}
    sizes = np.geomspace(min(shown.values()), max(shown.values()), LINE_POINTS)
    means, halves = answer.fit.line(sizes)
    axes.fill_between(sizes, means - halves, means + halves, color=COLOURS[0], alpha=0.25, linewidth=0)
    axes.plot(sizes, means, color=COLOURS[0], linewidth=1.3)
    for number, row in enumerate(row for row in answer.rows if row.name in shown):
        size = shown[row.name]
        axes.plot([size] * len(row.values), row.values, ".", color=INK, markersize=4, gid=f"point{number}")
        tips[f"point{number}"] = f"{row.name}, {axis} {size:g}: {figure(row)}"
    axes.set_xscale("log", base=2)
    ticks = sorted(set(shown.values()))
    axes.set_xticks(ticks, [short(size) for size in ticks])
    axes.minorticks_off()
    finish(axes, axis, metric)


def draw_costs(drawn: tuple[Costs, str], figure_, tips: dict[str, str]) -> None:
    """Draw (costs, metric): the mean and standard error of each configuration, and the Pareto front as steps."""
    found, metric = drawn
    axes = figure_.add_axes(PLACE)
    front = [(found.costs[index], found.rows[index].mean) for index in found.front]
    axes.plot(*zip(*front, strict=True), color=GRID, linewidth=1.3, drawstyle="steps-post")
    for number, (row, cost) in enumerate(zip(found.rows, found.costs, strict=True)):
        on_front, colour = number in found.front, COLOURS[number % len(COLOURS)]
        axes.errorbar(cost, row.mean, row.error, color=colour, linewidth=1.3, capsize=0)
        axes.plot(
            [cost], [row.mean], "o", color=colour, markerfacecolor=colour if on_front else "none", markersize=6,
            label=row.name, gid=f"cost{number}",
        )  # fmt: skip
        tips[f"cost{number}"] = f"{row.name}: {figure(row)} for {cost:.4g} {found.unit}"
    cost_ticks(axes, found.costs)
    finish(axes, found.unit, metric)
    add_legend(axes, *axes.get_legend_handles_labels())


def finish(axes, x: str, y: str) -> None:
    """Name both axes, label the y axis by plain numbers, and draw its grid."""
    axes.set(xlabel=x, ylabel=y)
    format_ticks(axes.yaxis)
    axes.grid(axis="y")


def cost_ticks(axes, costs: Sequence[float]) -> None:
    """Label an x axis of costs; it is logarithmic if they span more than a decade."""
    if max(costs) > 10 * min(costs):
        log_ticks(axes)
    else:
        format_ticks(axes.xaxis)


def log_ticks(axes) -> None:
    """Give an x axis a logarithmic scale with plain numbers at each decade, and at 2 and 5 if it spans at most two."""

    def between_decades(value: float, _) -> str:
        low, high = axes.get_xlim()
        return short(value) if high <= 100 * low else ""

    axes.set_xscale("log", subs=[2, 5])
    axes.xaxis.set_major_formatter(lambda value, _: short(value))
    axes.xaxis.set_minor_formatter(between_decades)
