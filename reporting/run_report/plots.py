# SPDX-License-Identifier: Apache-2.0
"""The plots of a run's report; each `draw_` function is an argument of reporting/page_parts.py: figure_of."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from reporting.goodput import PARTS
from reporting.page_parts import COLOURS, INK, add_legend, format_ticks, shortened
from reporting.run_report.reading import RunRecord
from reporting.run_report.thinning import Curve, thin

LOGARITHMIC = 50.0  # an axis of positive values with a greater ratio of its ends has a logarithmic scale
PLOT, TITLE, LABELS, POINTS = 1.65, 0.32, 0.45, 72  # inches of the parts of a plot; points of an inch
HEIGHT = PLOT + TITLE + LABELS  # without a legend
LEFT = 0.86  # inches; a tick label of five digits has at most ten characters, as 0.00012525
FEW = 3  # points of a curve that gets markers, since a line of them is hardly seen
ROW = 0.24  # inches of a row of the time line
UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))  # of the time line
PART_COLOURS = {  # of the account of time; waiting and lost time stand out
    "training": COLOURS[2], "compile": COLOURS[0], "start_up": COLOURS[4], "evaluation": COLOURS[5],
    "checkpoint": COLOURS[6], "data": COLOURS[3], "lost": COLOURS[1], "idle": COLOURS[7], "profile": "#8a8f98",
}  # fmt: skip
EVENTS = {  # rows of the time line: events, and their words
    "start": "start", "restart": "restart", "saved": "save", "save_failed": "save failed", "save_left_out": "no save",
    "update_not_taken": "update skipped", "roll_back": "roll back", "mesh": "mesh change", "batch": "batch change",
    "blame": "slow process", "damaged": "bad checkpoint",
}  # fmt: skip
BAD_EVENTS = ("save_failed", "save_left_out", "update_not_taken", "roll_back", "blame", "damaged")


@dataclasses.dataclass(frozen=True)
class Series:
    """A line of a plot; `last` is its last point, (step, value), which a thinned curve may not have."""

    label: str
    colour: str
    curve: Curve
    dashes: str
    last: tuple[float, float]


@dataclasses.dataclass(frozen=True)
class Panel:
    """A plot of figures over steps."""

    title: str
    series: Sequence[Series]
    may_be_logarithmic: bool  # if its values are positive and very different

    @property
    def is_logarithmic(self) -> bool:
        """Whether the axis of values is logarithmic."""
        lows = [series.curve.low.min() for series in self.series]
        highs = [series.curve.high.max() for series in self.series]
        return self.may_be_logarithmic and min(lows) > 0 and max(highs) > LOGARITHMIC * min(lows)


def panel(
    title: str, runs: Sequence[RunRecord], figures: Sequence[tuple[str, str, str, str]], *, logarithmic: bool = False
) -> Panel | None:  # fmt: skip
    """Return a plot of figures of all runs; None if no run has one of them.

    Args:
      figures: of each (kind of line, name, label, dashes of the line).
    """
    found = []
    for number, run in enumerate(runs):
        for which, (kind, name, label, dashes) in enumerate(figures):
            steps, values = run.column(kind, name)
            if len(steps):
                words = " ".join(word for word in (run.name if len(runs) > 1 else "", label) if word)
                colour = COLOURS[(number if len(runs) > 1 else which) % len(COLOURS)]
                found.append(Series(words or run.name, colour, thin(steps, values), dashes, (steps[-1], values[-1])))
    return Panel(title, found, logarithmic) if found else None


def draw_panel(shown: Panel, figure, tips: dict[str, str]) -> None:
    """Draw the lines of a plot, each with the band of its extremes."""
    width, height = figure.get_size_inches()
    axes = figure.add_axes((LEFT / width, LABELS / height, 1 - (LEFT + 0.25) / width, PLOT / height))
    for number, series in enumerate(shown.series):
        curve = series.curve
        if (curve.high > curve.low).any():
            axes.fill_between(curve.x, curve.low, curve.high, color=series.colour, alpha=0.25, linewidth=0)
        line = axes.plot(
            curve.x, curve.mean, series.dashes, color=series.colour, linewidth=1.3, label=series.label,
            marker="." if len(curve.x) <= FEW else "", gid=f"line{number}",
        )  # fmt: skip
        tips[line[0].get_gid()] = f"{series.label}: {series.last[1]:.5g} at step {series.last[0]:,.0f}"
    if shown.is_logarithmic:
        axes.set_yscale("log")
    format_ticks(axes.yaxis)
    format_ticks(axes.xaxis)
    axes.xaxis.get_major_locator().set_params(integer=True, nbins=6, min_n_ticks=1)
    axes.set(xlabel="step")
    axes.grid(axis="y")
    several = len(shown.series) > 1
    above = add_legend(axes, axes.lines, [series.label for series in shown.series]) if several else 0.0
    axes.set_title(shown.title, loc="left", fontsize=9.5, pad=6 + POINTS * above)


def draw_goodput(runs: Sequence[RunRecord], figure, tips: dict[str, str]) -> None:
    """Draw the time of each run as a bar of its parts, in percent."""
    height = figure.get_figheight()
    axes = figure.add_axes((0.14, 0.5 / height, 0.83, 1 - 0.55 / height))
    named = {}
    for row, run in enumerate(runs):
        whole, left = sum(run.seconds.values()) or 1.0, 0.0
        for part, colour in PART_COLOURS.items():
            share = 100 * run.seconds.get(part, 0.0) / whole
            if share <= 0:
                continue
            bar = axes.barh(row, share, left=left, height=0.62, color=colour, linewidth=0)
            bar[0].set_gid(f"part{row}-{part}")
            tips[f"part{row}-{part}"] = f"{PARTS[part][0]}: {share:.1f} % of {run.name}"
            named.setdefault(PARTS[part][0], bar)
            if share > 6:
                axes.text(left + share / 2, row, f"{share:.0f} %", ha="center", va="center", color="#15181c")
            left += share
    axes.set(yticks=range(len(runs)), yticklabels=[shortened(run.name) for run in runs], xlim=(0, 100))
    axes.set(xlabel="percent of the time since the run began", ylim=(len(runs) - 0.5, -0.5))
    add_legend(axes, list(named.values()), list(named))


def goodput_height(runs: Sequence[RunRecord]) -> float:
    """Return the height of `draw_goodput` in inches, without its legend."""
    return 0.65 + 0.34 * len(runs)


def rows_of(run: RunRecord) -> dict[str, np.ndarray]:
    """Return the rows of the time line: {event: Unix seconds}; every start but the first is a restart."""
    times: dict[str, list[float]] = {}
    for line in run.events:
        name = line.get("event", "")
        name = "restart" if name == "start" and "start" in times else name
        if name in EVENTS:
            times.setdefault(name, []).append(line["time"])
    return {name: np.array(times[name]) for name in EVENTS if name in times}


def draw_timeline(run: RunRecord, figure, tips: dict[str, str]) -> None:
    """Draw the steps over the time since the run began, and below it a row for each kind of event."""
    rows, height = rows_of(run), figure.get_figheight()
    times = np.concatenate([*rows.values(), run.progress[:, 0]])
    began, ended = times.min(), times.max()
    unit, word = next(found for found in UNITS if ended - began > 3 * found[0] or found == UNITS[-1])
    deep = ROW * len(rows) + 0.1
    below = figure.add_axes((0.14, 0.48 / height, 0.83, deep / height))
    above = figure.add_axes((0.14, (0.48 + deep + 0.1) / height, 0.83, 1 - (0.48 + deep + 0.2) / height), sharex=below)
    if len(run.progress):
        order = np.argsort(run.progress[:, 0], kind="stable")
        passed, steps = (run.progress[order, 0] - began) / unit, run.progress[order, 1]
        curve = thin(passed, steps)
        above.fill_between(curve.x, curve.low, curve.high, color=COLOURS[0], alpha=0.25, linewidth=0)
        marker = "." if len(curve.x) <= FEW else ""
        line = above.plot(curve.x, curve.mean, color=COLOURS[0], linewidth=1.3, marker=marker, gid="steps")
        tips[line[0].get_gid()] = f"step {steps[-1]:,.0f} after {passed[-1]:.3g} {word}"
    for row, (name, at) in enumerate(rows.items()):
        seen = thin(np.sort(at - began) / unit, np.full(len(at), float(row)))
        colour = COLOURS[1] if name in BAD_EVENTS else COLOURS[2]
        marks = below.plot(seen.x, seen.mean, "|", color=colour, markersize=11, markeredgewidth=1.4, gid=f"row{row}")
        tips[marks[0].get_gid()] = f"{EVENTS[name]}: {len(at):,}"
    below.set(yticks=range(len(rows)), ylim=(len(rows) - 0.4, -0.6), xlabel=f"{word} since the run began")
    below.set_yticklabels([f"{EVENTS[name]} ({len(at):,})" for name, at in rows.items()])
    margin = 0.01 * max(ended - began, 1.0) / unit
    below.set_xlim(-margin, (ended - began) / unit + margin)
    below.grid(axis="x")
    above.set(ylabel="step")
    format_ticks(above.yaxis)
    above.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    above.tick_params(labelbottom=False)
    above.grid()
    below.spines["left"].set_visible(False)
    above.yaxis.label.set_color(INK)


def timeline_height(run: RunRecord) -> float:
    """Return the height of `draw_timeline` in inches."""
    return 2.1 + ROW * len(rows_of(run))
