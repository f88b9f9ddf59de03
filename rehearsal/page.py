# SPDX-License-Identifier: Apache-2.0
"""A rehearsal to look at: what `rehearse.py --html` writes, one page that needs no other file, network or script.

It shows the dictionary that `--json` writes and computes nothing of its own but sums. matplotlib is imported by the
functions that draw, so that a rehearsal without a page starts without it.
"""

import html
import io
import itertools
import math
import re

INK, GRID = "#010203", "#040506"  # matplotlib is told these; they become the page's colours, light or dark
COLOURS = {
    "parameters": "#6ea8dc", "optimizer": "#9a9fe0", "batch": "#b9a58c", "gradients": "#e9b44c",
    "saved activations": "#5fc0b0", "temporaries": "#e28a7c", "activations and temporaries": "#e28a7c",
    "matmul": "#6ea8dc", "attention kernel": "#5fc0b0", "kernel": "#93c572", "element-wise": "#e9b44c",
    "collective": "#e28a7c", "copy": "#b39ad6", "loop": "#b8b8b8", "waiting": "#b8b8b8",
}  # fmt: skip
ELSE = "#b8b8b8"
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.family": ["DejaVu Sans"], "font.size": 9,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "text.color": INK,
    "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK, "grid.color": GRID,
    "xtick.major.size": 0, "xtick.minor.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.linewidth": 0.6,
}  # fmt: skip
INCH = 72  # a unit of an SVG is a point
WIDE = 10.6  # inches; the page is 1100 units wide
AROUND = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.7, 0.7), (-0.7, 0.7), (0.7, -0.7), (-0.7, -0.7))  # directions
CSS = """
:root { color-scheme: light dark; --ink: #23272e; --soft: #646b75; --rule: #d9dce1; --paper: #fff;
  --panel: #f6f7f9; --bad: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e3e6ea; --soft: #9aa2ad; --rule: #3a404a; --paper: #16191e;
  --panel: #1e2228; --bad: #ff8a80; } }
body { margin: 0 auto; max-width: 1100px; padding: 24px 16px 64px; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; } h1 { font-size: 25px; line-height: 1.3; font-weight: 600; margin: 0 0 16px; }
h2 { font-size: 18px; font-weight: 600; margin: 40px 0 8px; } h3 { font-size: 15px; margin: 20px 0 4px; }
p, figcaption { color: var(--soft); margin: 4px 0; max-width: 85ch; } .bad { color: var(--bad); }
figure { margin: 8px 0 0; padding: 8px 12px; background: var(--panel); border-radius: 6px; overflow-x: auto; }
svg { display: block; width: 100%; height: auto; min-width: 700px; }
svg text { font-family: system-ui, sans-serif !important; } rect { stroke: var(--panel); stroke-width: 0.5; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 20px; margin: 0; } dt { color: var(--soft); }
dd { margin: 0; overflow-wrap: anywhere; } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; } th { text-align: left; font-weight: 600; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.code { font: 12.5px/1.6 ui-monospace, monospace; overflow-wrap: anywhere; min-width: 9em; }
.key { color: var(--soft); margin-right: 16px; white-space: nowrap; }
.key i { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 5px; }
"""


def page(report: dict) -> str:
    """Return the page of a rehearsal, a whole HTML document; the same bytes for the same report.

    Args:
      report: what `rehearse.py --json` writes; where it did not compile it has no times, and the page says so.
    """
    parts = (_verdict, _facts, _remedies, _memory, _time, _operations, _timelines, _collectives, _advice, _basis)
    title = html.escape(f"Rehearsal: {report['recipe']} on {report['topology']}")
    head = '<meta charset="utf-8">\n<meta name="viewport" content="width=device-width, initial-scale=1">\n'
    head += f"<title>{title}</title>\n<style>{CSS}</style>"
    body = "\n".join(part(report) for part in parts)
    return f'<!DOCTYPE html>\n<html lang="en">\n<head>\n{head}\n</head>\n<body>\n{body}\n</body>\n</html>\n'


def _verdict(report: dict) -> str:
    used, capacity, step = report["hbm_gib"]["total"], report["hbm_gib"]["capacity"], report.get("step_seconds")
    memory = "fits" if report["fits"] else "does not fit"
    memory += f", {_short(used - capacity)} GiB missing" if used > capacity else ""
    said = [f"{report['recipe']} on {report['topology']}: {memory}, {_short(used)} of {_short(capacity)} GiB"]
    if step is None:
        said.append("the time of a step is unknown")
    else:
        mfu = "unknown" if report.get("mfu") is None else _percent(report["mfu"])
        said += [f"{_seconds(step)} a step (estimate)", f"MFU {mfu}", f"{report['tokens_per_second']:,.0f} tokens/s"]
    if report.get("cost_per_billion_tokens") is not None:
        said.append(f"${_short(report['cost_per_billion_tokens'])} per billion tokens")
    return f'<h1 class="{"" if report["fits"] else "bad"}">{html.escape(" · ".join(said))}</h1>'


def _facts(report: dict) -> str:
    axes = [f"{axis} {size}" for axis, size in report["mesh"].items() if size > 1] or ["one device"]
    run = report.get("run") or {}
    days, dollars, price = run.get("days"), run.get("dollars"), report.get("price_per_chip_hour")
    source = f" ({report['price_source']})" if report.get("price_source") else ""
    facts = {
        "Mesh": f"{' × '.join(axes)} on {report['chips']} {report['accelerator']} chips, {report['hosts']} hosts",
        "Batch": f"{report['global_batch']:,} sequences of {report['sequence_length']:,} tokens, "
        f"{report['tokens_per_step']:,} tokens a step; microbatches: {report['num_microbatches']}",
        "Parameters": f"{report['num_parameters']:,}",
        "Typed": _keys(report["typed"]) or "nothing; all is the recipe's and the topology's",
        "Run": (f"{run['steps']:,} steps, " if "steps" in run else "")
        + ("time unknown, " if days is None else f"{_short(days)} days, " if days >= 1 else f"{24 * days:.1f} hours, ")
        + ("cost unknown" if dollars is None else f"${_short(dollars)}"),
        "Price": "unknown" if price is None else f"${price:,.2f} a chip-hour{source}",
    }
    return f"<dl>{''.join(f'<dt>{name}</dt><dd>{html.escape(said)}</dd>' for name, said in facts.items())}</dl>"


def _remedies(report: dict) -> str:
    if report["fits"]:
        return ""
    columns = {"change": "code", "what it does": "", "gives, GiB": "number", "then, GiB": "number", "": ""}
    rows = [
        [_keys(r["keys"]), r["what"], _short(r["gives_gib"]), _short(r["total_gib"]),
         ("fits" if r["fits"] else "still too large") + (", verified" if r["verified"] else ", not verified")]
        for r in report.get("remedies") or []
    ]  # fmt: skip
    return f"<h2>What would make it fit</h2>{_table(columns, rows) if rows else '<p>Nothing was found.</p>'}"


def _memory(report: dict) -> str:
    known = report["hbm_gib"]
    if report.get("memory_over_time"):
        said = "What lives when, one chip, one step. The dashed line is the compiler's total: what it needs beyond "
        said += "the buffers that can be told apart counts as temporaries in the table."
    else:
        said = "What lives when is unknown, for want of a compiled program, and so are the largest buffers; the plot "
        said += "shows the highest point alone."
    share = [[name, f"{gib:,.3f}", _percent(gib / (known["total"] or 1.0))] for name, gib in _by_class(report).items()]
    share += [["total", f"{known['total']:,.3f}", ""], ["capacity", f"{known['capacity']:,.3f}", ""]]
    text = f"<h2>Memory</h2><figure>{_figure(_draw_memory, report, 'memory', 3.4)}</figure><p>{said}</p>"
    text += _table({"by class, at the highest point": "", "GiB a chip": "number", "share": "number"}, share)
    columns = {"largest buffers there": "code", "class": "", "GiB": "number", "source": "code"}
    named = report.get("largest_buffers") or []
    rows = [[b["name"], b["class"], f"{b['gib']:,.3f}", b["source"] or "–"] for b in named]
    return text + (f"<h3></h3>{_table(columns, rows)}" if rows else "")


def _by_class(report: dict) -> dict[str, float]:
    """Return GiB of the classes that are known; without a program, what is not state is one of them."""
    names = "gradients saved_activations temporaries" if report["compiled"] else "activations_and_temporaries"
    names = ["parameters", "optimizer", "batch", *names.split()]
    return {name.replace("_", " "): report["hbm_gib"][name] for name in names}


def _draw_memory(report: dict, figure, tips: dict[str, str]) -> None:
    parts, total, capacity = _by_class(report), report["hbm_gib"]["total"], report["hbm_gib"]["capacity"]
    over_time = report.get("memory_over_time") or [{"seconds": 0.0} | parts, {"seconds": 1.0} | parts]
    series = {name: [sample.get(name, 0.0) for sample in over_time] for name in parts}
    series = {name: values for name, values in series.items() if max(values) > 0.002 * total}
    times, colours = [sample["seconds"] for sample in over_time], [COLOURS[name] for name in series]
    axes = figure.add_axes([0.055, 0.15, 0.935, 0.73])
    areas = axes.stackplot(times, *series.values(), labels=series, colors=colours, step="pre")
    for number, ((name, values), area) in enumerate(zip(series.items(), areas, strict=True)):
        area.set(linewidth=0, gid=f"area{number}")
        tips[f"area{number}"] = f"{name}: at most {max(values):.3f} GiB"
    for at, said, dashes, x, side in (
        (capacity, f"capacity {_short(capacity)} GiB", "-", 0.995, "right"),
        (total, f"{_short(total)} GiB in all", "--", 0.005, "left"),
    ):
        axes.axhline(at, color=INK, linewidth=1.2, linestyle=dashes)
        up = 1 if at == max(capacity, total) else -1
        axes.annotate(said, (x, at), (0, 3 * up), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
                      ha=side, va="bottom" if up > 0 else "top")  # fmt: skip
    axes.set(xlim=(0.0, max(times) or 1.0), ylim=(0.0, 1.12 * max(total, capacity)), ylabel="GiB")
    axes.set(xlabel="seconds") if report.get("memory_over_time") else axes.set(xlabel="time unknown", xticks=[])
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=len(series), borderaxespad=0.2)


def _time(report: dict) -> str:
    step = report.get("step_seconds")
    if step is None:
        return "<h2>Time</h2><p>Unknown, and so are the operations: nothing is compiled until it fits.</p>"
    said = f"What the core does in {_seconds(step)}. Collectives and copies count where the core waits for them"
    if report.get("hidden_communication_seconds") is not None:
        waited, hidden = report["exposed_communication_seconds"], report["hidden_communication_seconds"]
        said += f": communication takes {_seconds(waited)} of the step and another {_seconds(hidden)} beside the core"
    spent = report.get("seconds_by_category")
    plot = f"<figure>{_figure(_draw_time, report, 'time', 0.7 + 0.27 * len(spent))}</figure>" if spent else ""
    return f"<h2>Time</h2>{plot}<p>{said}.</p>"


def _draw_time(report: dict, figure, tips: dict[str, str]) -> None:
    step, spent = report["step_seconds"], dict(report["seconds_by_category"])
    if step - sum(spent.values()) > 0.005 * step:
        spent["waiting"] = step - sum(spent.values())
    rows, height = sorted(spent.items(), key=lambda item: item[1]), figure.get_figheight()
    axes = figure.add_axes([0.11, 0.42 / height, 0.87, 1 - 0.47 / height])
    for at, (name, seconds) in enumerate(rows):
        axes.barh(at, seconds, height=0.7, color=COLOURS.get(name, ELSE))[0].set_gid(f"bar{at}")
        said = f"{_seconds(seconds)} · {100 * seconds / step:.1f} %"
        axes.annotate(said, (seconds, at), (5, 0), textcoords="offset points", va="center")
        tips[f"bar{at}"] = f"{name}: {said}"
    axes.set(yticks=range(len(rows)), yticklabels=[name for name, _ in rows])
    axes.set(xlabel="seconds", xlim=(0.0, 1.14 * rows[-1][1] or 1.0))
    axes.grid(axis="x")


def _operations(report: dict) -> str:
    operations = report.get("operations") or []
    if not operations:
        return ""
    undrawn = [str(n) for n, o in enumerate(operations, 1) if not o["flops_per_second"]]
    said = "Each disc is an operation of the table, its area its share of the step. One above the roof reads less "
    said += "from main memory than its operands' sizes tell, for they are on the chip already."
    if undrawn:
        said += f" Not drawn, having no FLOPs: {', '.join(undrawn)}."
    drawn = len(undrawn) < len(operations)
    plot = f"<figure>{_figure(_draw_roofline, report, 'roofline', 4.2)}</figure><p>{said}</p>" if drawn else ""
    columns = {"": "number", "operation": "code", "source": "code", "pass": "", "ms": "number", "share": "number",
               "TFLOP/s": "number", "FLOP/byte": "number", "bound by": ""}  # fmt: skip
    rows = [
        [str(n), o["name"], o["source"] or "–", o["pass"], f"{1e3 * o['seconds']:,.1f}", f"{100 * o['share']:.1f} %",
         f"{o['flops_per_second'] / 1e12:.1f}" if o["flops"] else "–", f"{o['intensity']:,.0f}" if o["flops"] else "–",
         o["bound"]]
        for n, o in enumerate(operations, 1)
    ]  # fmt: skip
    return f"<h2>Heaviest operations, and the roof</h2>{plot}{_table(columns, rows)}"


def _draw_roofline(report: dict, figure, tips: dict[str, str]) -> None:
    peak, bandwidth = report["peak_flops"], report.get("memory_bandwidth") or math.inf
    points = [(number, o) for number, o in enumerate(report["operations"], 1) if o["flops_per_second"]]
    ridge = peak / bandwidth
    met = [o["intensity"] for _, o in points] + ([ridge] if ridge else [])
    x, lowest = (min(met) / 2, max(met) * 2), min(o["flops_per_second"] for _, o in points)
    axes = figure.add_axes([0.06, 0.12, 0.93, 0.86])
    axes.set(xscale="log", yscale="log", xlim=x, ylim=(lowest / 1.5e12, 1.4 * peak / 1e12))
    roof = [x[0], max(x[0], ridge), x[1]]
    axes.plot(roof, [min(peak, at * bandwidth) / 1e12 for at in roof], color=INK, linewidth=1.5)
    said = f"{bandwidth / 1e9:,.0f} GB/s up to {ridge:,.0f} FLOP/byte, then " if ridge else ""
    axes.text(0.99 * x[1], 1.04 * peak / 1e12, f"{said}{peak / 1e12:,.0f} TFLOP/s", ha="right")
    discs, to_points = [], axes.transData + axes.transAxes.inverted()
    size = axes.bbox.width * INCH / figure.dpi, axes.bbox.height * INCH / figure.dpi
    for number, o in points:
        at, area = (o["intensity"], o["flops_per_second"] / 1e12), max(14.0, 2000 * o["share"])
        colour = COLOURS.get(o["category"], ELSE)
        axes.scatter(*at, s=area, color=colour, edgecolors=INK, linewidths=0.6, zorder=3, gid=f"disc{number}")
        tips[f"disc{number}"] = f"{number}: {o['name']}, {o['source']}, {o['pass']}, {_seconds(o['seconds'])}"
        discs.append((str(number), *(to_points.transform(at) * size), math.sqrt(area / math.pi)))
    roof_y = to_points.transform((x[1], peak / 1e12))[1] * size[1]
    for text, place, label, far in _beside(discs, size, (0.0, roof_y - 1, size[0], roof_y + 12)):
        line = {"arrowstyle": "-", "linewidth": 0.5, "color": INK} if far else None
        axes.annotate(text, place, label, xycoords="axes points", textcoords="axes points", ha="center", va="center",
                      zorder=4, arrowprops=line)  # fmt: skip
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter(lambda value, _: f"{value:g}")
        axis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
    axes.set(xlabel="FLOP/byte", ylabel="TFLOP/s a chip")
    axes.grid()


def _beside(discs: list[tuple], size: tuple[float, float], roof: tuple):
    """Yield (text, place of the disc, place of the text, is it far): none upon a disc, the roof or another text."""

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


def _timelines(report: dict) -> str:
    found = [timeline for timeline in (report.get("timelines") or []) if timeline["events"]][:2]
    if not found:
        return ""
    used = {event["category"] for timeline in found for event in timeline["events"]}
    squares = [f'<i style="background:{COLOURS[name]}"></i>{name}' for name in COLOURS if name in used]
    key = "".join(f'<span class="key">{square}</span>' for square in squares)
    text = "<h2>One layer in time</h2><p>One turn of each loop over layers; point at a bar to read "
    text += "what it is. Where the core's lane is empty it waits.</p>"
    for timeline in found:
        what, _, where = timeline["name"].partition(": ")
        text += f"<h3>{html.escape(what)}, {_percent(timeline['share'])} of the step</h3>"
        caption = f"<figcaption>{key} {html.escape(where)}</figcaption>"
        text += f"<figure>{_timeline(timeline['events'])}{caption}</figure>"
    return text


def _timeline(events: list[dict], left: int = 130, width: int = 940, height: int = 26) -> str:
    """Return an SVG of bars: a lane a row, the core first, time to the right in milliseconds."""
    lanes = sorted({event["lane"] for event in events}, key=lambda lane: (lane != "core", lane != "copies", lane))
    end = max(event["start"] + event["seconds"] for event in events) or 1.0
    bottom, drawn = height * len(lanes) + 8, []
    step = 10 ** math.floor(math.log10(1e3 * end / 4))
    step *= next(n for n in (1, 2, 5, 10) if 1e3 * end / (step * n) <= 10)
    for n in range(math.floor(1e3 * end / step) + 1):
        x = left + width * n * step / (1e3 * end)
        drawn.append(f'<path d="M{x:.1f} 4V{bottom}" stroke="var(--rule)"/>')
        drawn.append(f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{n * step:g}</text>')
    for row, lane in enumerate(lanes):
        drawn.append(f'<text x="{left - 8}" y="{height * row + 22}" text-anchor="end">{html.escape(lane)}</text>')
    for event in events:
        x, wide = left + width * event["start"] / end, max(0.7, width * event["seconds"] / end)
        y, name = height * lanes.index(event["lane"]) + 7, event["label"].split("/")[0]
        tip = html.escape(f"{event['label']}: {event['category']}, {_seconds(event['seconds'])}")
        colour = COLOURS.get(event["category"], ELSE)
        rect = f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{height - 5}" fill="{colour}"/>'
        if wide > 48:
            name = name if 5.8 * len(name) < wide else name[: int(wide / 5.8) - 1] + "…"
            rect += f'<text x="{x + 3:.2f}" y="{y + 14}" style="fill:#15181c">{html.escape(name)}</text>'
        drawn.append(f"<g><title>{tip}</title>{rect}</g>")
    drawn.append(f'<text x="{left + width}" y="{bottom + 28}" text-anchor="end">milliseconds</text>')
    box = f"0 0 {left + width + 14} {bottom + 32}"
    start = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="{box}" font-size="10.5" fill="var(--ink)">'
    return start + "".join(drawn) + "</svg>"


def _collectives(report: dict) -> str:
    rows = [
        [c["kind"], c["axes"] or "–", "beside the core" if c["asynchronous"] else "the core waits", f"{c['count']:,}",
         f"{c['gib']:,.3f}", f"{1e3 * c['seconds']:,.1f}", f"{1e3 * c['exposed_seconds']:,.1f}"]
        for c in report.get("collectives") or []
    ]  # fmt: skip
    columns = {"kind": "", "mesh axes": "", "runs": "", "count": "number", "GiB sent": "number", "ms": "number",
               "exposed, ms": "number"}  # fmt: skip
    none = "There are none." if report.get("step_seconds") is not None else "Unknown: it does not compile."
    return f"<h2>Collectives of a step, on one chip</h2>{_table(columns, rows) if rows else f'<p>{none}</p>'}"


def _advice(report: dict) -> str:
    text = ""
    columns = {"change": "code", "why": "", "gain": "number", "a step": "number", "GiB": "number", "": ""}
    for verified, said in ((True, "Verified: compiled and estimated in the same way"), (False, "Not verified")):
        rows = [
            [_keys(a["keys"]), a["why"], "unknown" if a.get("gain") is None else f"{_percent(a['gain'])}",
             "unknown" if a.get("step_seconds") is None else _seconds(a["step_seconds"]),
             "unknown" if a.get("total_gib") is None else _short(a["total_gib"]),
             {True: "fits", False: "does not fit"}.get(a.get("fits"), "")]
            for a in report.get("advice") or [] if a["verified"] == verified
        ]  # fmt: skip
        text += f"<h3>{said}</h3>{_table(columns, rows)}" if rows else ""
    return f"<h2>What would be faster</h2>{text}" if text else ""


def _basis(report: dict) -> str:
    said = f"Times are estimates, not measurements; they are based on: {report['basis']}."
    text = f"<h2>What the estimate rests on</h2><p>{html.escape(said)}</p>"
    return text + _table({"assumed": "", "value": "", "source": ""}, report.get("assumptions") or [])


def _figure(draw, report: dict, name: str, height: float) -> str:
    """Return the SVG of a plot of `height` inches without what changes from day to day; its ids begin with `name`.

    `draw` puts the report into a figure, and into a dictionary {gid of an artist: what the page says at it}.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    tips: dict[str, str] = {}
    with matplotlib.style.context(["default", STYLE | {"svg.hashsalt": name}]):
        figure, file = Figure(figsize=(WIDE, height)), io.StringIO()
        draw(report, figure, tips)
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()[file.getvalue().index("<svg") :].replace(INK, "var(--ink)").replace(GRID, "var(--rule)")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[^"]*pt"', "", re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{name}-", text))
    for gid, tip in tips.items():
        text = text.replace(f'id="{name}-{gid}">', f'id="{name}-{gid}"><title>{html.escape(tip)}</title>')
    return text


def _table(columns: dict[str, str], rows: list) -> str:
    """Return a table, everything in it escaped; columns: {heading: "", "number" or "code"}."""
    kinds = [f' class="{kind}"' if kind else "" for kind in columns.values()]
    aligned = [' class="number"' if kind == "number" else "" for kind in columns.values()]
    head = "".join(f"<th{k}>{html.escape(name)}</th>" for k, name in zip(aligned, columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{html.escape(str(cell))}</td>" for k, cell in zip(kinds, row, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _keys(keys: dict) -> str:
    return " ".join(f"--config.{key}={value}" for key, value in keys.items())


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}".removesuffix(".0")


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _seconds(value: float) -> str:
    unit, times = ("s", 1) if value >= 0.9995 or not value else ("ms", 1e3) if value >= 0.9995e-3 else ("µs", 1e6)
    return f"{times * value:,.0f} {unit}" if times * value >= 99.95 else f"{times * value:#.3g} {unit}"
