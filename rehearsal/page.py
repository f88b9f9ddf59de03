# SPDX-License-Identifier: Apache-2.0
"""The page that `rehearse.py --html` writes: one file that needs no other file, network or script.

It shows the sections of rehearsal/sections.py and plots of the figures that `--json` writes. Only the functions that
draw import matplotlib, so a rehearsal without a page starts without it.
"""

import html
import itertools
import math

from rehearsal import checklist, phases, sections
from rehearsal.sections import COLOURS, SPENT, seconds_text
from reporting import html_page, page_parts
from reporting.page_parts import GRID, INK, figure_of, paragraphs, table_of

INCH = 72  # a unit of an SVG is a point
LABELLED_RANGE = 3000  # a logarithmic axis with a smaller ratio of its ends has labels at 2 and 5 too
AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7))  # for a label
CSS = """
:root { --bad: #b3261e; } @media (prefers-color-scheme: dark) { :root { --bad: #ff8a80; } }
h3 { font-size: 15px; margin: 20px 0 4px; } .bad { color: var(--bad); }
.bar i { display: inline-block; height: 11px; border-radius: 2px; margin-right: 8px; }
.bar td:first-child { white-space: nowrap; } td { overflow-wrap: break-word; }
"""


def page(report: dict) -> str:
    """Return the HTML document of a rehearsal; the same report gives the same bytes.

    Args:
      report: the dictionary of `rehearse.py --json`; without a compiled program it has no times, and the page says so.
    """
    first, *others = [
        *sections.of_step(report), *phases.sections(report), *checklist.sections(report), *sections.of_changes(report)
    ]  # fmt: skip
    body = "\n".join([paragraphs(first.lines), *(_section(section, report) for section in others)])
    return html_page.document(first.title, body, page_parts.CSS + CSS)


def _section(section: sections.Section, report: dict) -> str:
    bars = [
        f'<tr class="bar"><td>{SPENT.get(name, name)}</td><td class="number">{text}</td><td class="number">'
        f'{size / section.whole:.1%}</td><td><i style="width:{40 * size / section.whole:.1f}em;'
        f'background:{COLOURS[name]}"></i></td></tr>'
        for name, size, text in section.bars
    ]  # fmt: skip
    return "\n".join([
        f'<h2 class="{"bad" if section.bad else ""}">{html.escape(section.title)}</h2>',
        f'<div class="wide"><table>{"".join(bars)}</table></div>' if bars else "",
        paragraphs(section.lines),
        *(PLOTS[name](report) for name in section.plots),
        *(_table(table, numbered="roofline" in section.plots) for table in section.tables),
    ])  # fmt: skip


def _memory(report: dict) -> str:
    text = """The memory of one chip during one step. The dashed line is the compiler's total. Memory that belongs to no
known buffer counts as temporaries above."""
    return figure_of(_draw_memory, report, "memory", 3.4) + paragraphs([text])


def _draw_memory(report: dict, figure, tips: dict[str, str]) -> None:
    total, capacity, over_time = report["hbm_gib"]["total"], report["hbm_gib"]["capacity"], report["memory_over_time"]
    series = {name: [sample[name] for sample in over_time] for name in over_time[0] if name != "seconds"}
    series = {name: values for name, values in series.items() if max(values) > 0.002 * total}
    times, colours = [sample["seconds"] for sample in over_time], [COLOURS[name] for name in series]
    axes = figure.add_axes([0.055, 0.15, 0.935, 0.73])
    areas = axes.stackplot(times, *series.values(), labels=series, colors=colours, step="pre")
    for number, ((name, values), area) in enumerate(zip(series.items(), areas, strict=True)):
        area.set(linewidth=0, gid=f"area{number}")
        tips[f"area{number}"] = f"{name}: at most {max(values):.3f} GiB"
    for at, text, dashes, x, side in (
        (capacity, f"capacity {_short(capacity)} GiB", "-", 0.995, "right"),
        (total, f"{_short(total)} GiB in all", "--", 0.005, "left"),
    ):
        axes.axhline(at, color=INK, linewidth=1.2, linestyle=dashes)
        largest = max(capacity, total)
        up = 1 if at == largest or at < 0.15 * largest else -1  # a label below a low line would cover the axis
        axes.annotate(text, (x, at), (0, 3 * up), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                      ha=side, va="bottom" if up > 0 else "top")  # fmt: skip
    axes.set(xlim=(0.0, max(times) or 1.0), ylim=(0.0, 1.12 * max(total, capacity)), xlabel="seconds", ylabel="GiB")
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(series), borderaxespad=0.2)


def _roofline(report: dict) -> str:
    text = """A disc has the number of its operation in the table; its area is the operation's share of the step.
Operations without FLOPs have no disc. A disc above the roof reads less from main memory than the sizes of its operands,
because some operands are on the chip already."""
    return figure_of(_draw_roofline, report, "roofline", 4.2) + paragraphs([text])


def _draw_roofline(report: dict, figure, tips: dict[str, str]) -> None:
    peak, bandwidth = report["peak_flops"], report["memory_bandwidth"] or math.inf
    points = [(number, o) for number, o in enumerate(report["operations"], 1) if o["flops_per_second"]]
    ridge = peak / bandwidth
    met = [o["intensity"] for _, o in points] + ([ridge] if ridge else [])
    x, lowest = (min(met) / 2, max(met) * 2), min(o["flops_per_second"] for _, o in points)
    axes = figure.add_axes([0.06, 0.12, 0.91, 0.86])
    axes.set(xscale="log", yscale="log", xlim=x, ylim=(lowest / 1.5e12, 1.4 * peak / 1e12))
    roof = [x[0], max(x[0], ridge), x[1]]
    axes.plot(roof, [min(peak, at * bandwidth) / 1e12 for at in roof], color=INK, linewidth=1.5)
    slope = f"{bandwidth / 1e9:,.0f} GB/s up to {ridge:,.0f} FLOP/byte, then " if ridge else ""
    axes.text(0.99 * x[1], 1.04 * peak / 1e12, f"{slope}{peak / 1e12:,.0f} TFLOP/s", ha="right")
    discs, to_points = [], axes.transData + axes.transAxes.inverted()
    size = axes.bbox.width * INCH / figure.dpi, axes.bbox.height * INCH / figure.dpi
    for number, o in points:
        at, area = (o["intensity"], o["flops_per_second"] / 1e12), max(14.0, 2000 * o["share"])
        colour = COLOURS[o["category"]]
        axes.scatter(*at, s=area, color=colour, edgecolors=INK, linewidths=0.6, zorder=3, gid=f"disc{number}")
        tips[f"disc{number}"] = f"{number}: {o['name']}, {o['source']}, {o['pass']}, {seconds_text(o['seconds'])}"
        discs.append((str(number), *(to_points.transform(at) * size), math.sqrt(area / math.pi)))
    roof_y = to_points.transform((x[1], peak / 1e12))[1] * size[1]
    for text, place, label, far in _label_places(discs, size, (0.0, roof_y - 1, size[0], roof_y + 12)):
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": INK} if far else None
        axes.annotate(text, place, label, xycoords="axes points", textcoords="axes points", ha="center", va="center",
                      zorder=4, arrowprops=line)  # fmt: skip
    for axis, (low, high) in ((axes.xaxis, axes.get_xlim()), (axes.yaxis, axes.get_ylim())):
        labelled = "125" if high < LABELLED_RANGE * low else "1"  # more labels of a long axis would overlap
        for set_formatter in (axis.set_major_formatter, axis.set_minor_formatter):
            set_formatter(lambda value, _, digits=labelled: _tick(value) if f"{value:e}"[0] in digits else "")
    axes.set(xlabel="FLOP/byte", ylabel="TFLOP/s a chip")
    axes.grid()


def _label_places(discs: list[tuple], size: tuple[float, float], roof: tuple):
    """Yield (text, disc, position of the text, whether it is far); a text avoids discs, the roof and other texts."""

    def meet(a, b):
        return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]

    spots: list[list] = []
    for text, x, y, radius in discs:
        if spot := next((s for s in spots if math.dist(s[1:3], (x, y)) < 5), None):
            spot[0] += f", {text}"
        else:
            spots.append([text, x, y, radius])
    taken = [roof, *((x - r, y - r, x + r, y + r) for _, x, y, r in spots)]
    for text, x, y, radius in spots:
        wide, high, options = 2.9 * len(text) + 2, 5.5, []
        for away, (dx, dy) in itertools.product((1, 10, 20, 32, 46), AROUND):
            at = x + dx * (radius + away + wide), y + dy * (radius + away + high)
            box = at[0] - wide, at[1] - high, at[0] + wide, at[1] + high
            if min(box) > 0 and box[2] < size[0] and box[3] < size[1]:
                options.append((at, away > 1, box))
        free = (o for o in options if not any(meet(o[2], other) for other in taken))
        at, far, box = next(free, options[0])
        taken.append(box)
        yield text, (x, y), at, far


def _layers(report: dict) -> str:
    text = paragraphs([
        "One iteration of each loop over layers. Point at a bar to read its name. The core waits where its lane is "
        "empty."
    ])  # fmt: skip
    for number, timeline in enumerate([timeline for timeline in report["timelines"] if timeline["events"]][:2]):
        height = 0.8 + 0.32 * len({event["lane"] for event in timeline["events"]})
        text += f"<h3>{html.escape(timeline['name'])}, {timeline['share']:.0%} of the step</h3>"
        text += figure_of(_draw_layer, timeline, f"layer{number}", height)
    return text


def _draw_layer(timeline: dict, figure, tips: dict[str, str]) -> None:
    """Draw one row for each lane, the core first."""
    from matplotlib.patches import Patch

    events, height = timeline["events"], figure.get_figheight()
    lanes = sorted({event["lane"] for event in events}, key=lambda lane: (lane != "core", lane != "copies", lane))
    axes = figure.add_axes([0.13, 0.42 / height, 0.86, 1 - 0.75 / height])
    end = max(event["start"] + event["seconds"] for event in events) or 1.0
    for number, event in enumerate(events):
        at, seconds, name = lanes.index(event["lane"]), event["seconds"], event["label"].split("/")[0]
        style = {"color": COLOURS[event["category"]], "edgecolor": GRID, "linewidth": 0.3}
        bar = axes.barh(at, 1e3 * seconds, left=1e3 * event["start"], **style)
        bar[0].set_gid(f"bar{number}")
        tips[f"bar{number}"] = f"{event['label']}: {event['category']}, {seconds_text(seconds)}"
        if 5.5 * len(name) < axes.bbox.width * INCH / figure.dpi * seconds / end:
            axes.text(1e3 * event["start"] + 2 * end, at, name, va="center", color="#15181c", fontsize=8)
    axes.set(yticks=range(len(lanes)), yticklabels=lanes, xlabel="milliseconds", xlim=(0.0, 1e3 * end))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    used = {event["category"] for event in events}
    key = [Patch(color=colour, label=name) for name, colour in COLOURS.items() if name in used]
    axes.legend(handles=key, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(key), borderaxespad=0.2)


def _table(table: sections.Table, *, numbered: bool) -> str:
    """Return an HTML table; `numbered` adds a first column with the row numbers of the plot."""
    columns, rows = table.columns, table.rows
    if numbered:
        columns, rows = ("No.", *columns), [(str(number), *row) for number, row in enumerate(rows, 1)]
    return table_of(columns, rows)


def _tick(value: float) -> str:
    """Return a tick label: 0.5, 200, 50k or 1M."""
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= 10_000 and value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


PLOTS = {"memory": _memory, "layers": _layers, "roofline": _roofline}  # of a section
