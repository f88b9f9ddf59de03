# SPDX-License-Identifier: Apache-2.0
"""The plots of a search's page; each is an argument of reporting/page_parts.py: figure_of."""

import math
import textwrap

from optuna.distributions import CategoricalDistribution, IntDistribution
from optuna.trial import FrozenTrial, TrialState

from reporting.page_parts import COLOURS, INK, add_legend, format_ticks
from studies.report.plots import PLACE, cost_ticks, finish, log_ticks
from studies.search.searches import Searched, point

COLUMNS = 3  # of small multiples
ROW = 2.5  # inches of a row of them
LABELS = 46  # characters on the x axis of one
TRIAL, BEST = COLOURS[0], COLOURS[1]


def draw_best(found: Searched, figure, tips: dict[str, str]) -> None:
    """Draw the metric of each trial in the order of their ends, and the best one until then."""
    axes = figure.add_axes(PLACE)
    done = sorted(found.done, key=lambda one: (one.datetime_complete, one.number))
    values = [one.values[0] for one in done]
    best = [min(values[: number + 1]) for number in range(len(values))]
    axes.plot(range(1, len(done) + 1), values, ".", color=TRIAL, markersize=4, label="trial")
    axes.plot(range(1, len(done) + 1), best, color=BEST, linewidth=1.3, drawstyle="steps-post", label="best so far")
    axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    finish(axes, "trials that are done", found.objectives[0])
    add_legend(axes, *axes.get_legend_handles_labels())


def height_of_parameters(found: Searched) -> float:
    """Return the inches of `draw_parameters`."""
    return ROW * math.ceil(len(found.trials[0].params) / COLUMNS)


def draw_parameters(found: Searched, figure, tips: dict[str, str]) -> None:
    """Draw the metric against each parameter; pruned trials are hollow, at the value at which they ended."""
    done, pruned = found.done, found.in_state(TrialState.PRUNED)
    names, rows = list(found.trials[0].params), math.ceil(len(found.trials[0].params) / COLUMNS)
    grid = figure.subplots(rows, COLUMNS, sharey=True, squeeze=False, gridspec_kw={
        "left": PLACE[0], "right": PLACE[0] + PLACE[2], "bottom": 0.72 / (ROW * rows), "top": 1 - 0.1 / (ROW * rows),
        "hspace": 0.5, "wspace": 0.12,
    })  # fmt: skip
    for number, axes in enumerate(grid.flat):
        if number >= len(names):
            axes.remove()
            continue
        name = names[number]
        places = _places(axes, name, found.trials)
        axes.plot(*places(pruned), "o", color=INK, alpha=0.5, markerfacecolor="none", markersize=3)
        axes.plot(*places(done), "o", color=TRIAL, markersize=3, alpha=0.7, markeredgewidth=0)
        axes.plot(*places(done[:1]), "o", color=BEST, markersize=6, gid=f"best{number}")
        tips[f"best{number}"] = f"trial {done[0].number}: {point(done[0])}"
        axes.set_xlabel(name)
        axes.grid(axis="y")
        if number % COLUMNS == 0:
            axes.set_ylabel(found.objectives[0])
    format_ticks(grid[0, 0].yaxis)  # which all of them share


def _places(axes, name: str, trials: list[FrozenTrial]):
    """Prepare the x axis of a parameter; return trials -> (places, metrics) on it."""
    distribution = trials[0].distributions[name]
    if isinstance(distribution, CategoricalDistribution):
        width = max(4, LABELS // len(distribution.choices))
        labels = [textwrap.fill(str(choice), width) for choice in distribution.choices]
        axes.set_xticks(range(len(labels)), labels)
        axes.set_xlim(-0.5, len(labels) - 0.5)
        place = distribution.choices.index
    else:
        place = float
        if distribution.log:
            log_ticks(axes)
        else:
            whole = isinstance(distribution, IntDistribution)
            axes.xaxis.get_major_locator().set_params(nbins=5, integer=whole, min_n_ticks=1 if whole else 2)
            format_ticks(axes.xaxis)
    return lambda some: ([place(one.params[name]) for one in some], [one.values[0] for one in some])


def draw_front(found: Searched, figure, tips: dict[str, str]) -> None:
    """Draw both objectives of all complete trials, and the Pareto front as steps."""
    axes = figure.add_axes(PLACE)
    front = sorted(found.front, key=lambda one: one.values[1])
    metrics, costs = zip(*(one.values for one in found.done), strict=True)
    axes.plot(costs, metrics, ".", color=TRIAL, markersize=4)
    axes.plot([one.values[1] for one in front], [one.values[0] for one in front], color=BEST, drawstyle="steps-post")
    for number, one in enumerate(front):
        axes.plot([one.values[1]], [one.values[0]], "o", color=BEST, markersize=6, gid=f"front{number}")
        tips[f"front{number}"] = f"trial {one.number}: {point(one)}"
    cost_ticks(axes, costs)
    finish(axes, found.objectives[1], found.objectives[0])
