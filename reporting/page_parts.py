# SPDX-License-Identifier: Apache-2.0
"""Parts of a page of reporting/html_page.py: paragraphs, tables, and plots that follow its light or dark colours.

Only functions that draw import matplotlib, so that a command without a page starts without it.
"""

import html
import io
import re
import warnings
from collections.abc import Callable, Sequence

INK, GRID = "#010203", "#040506"  # placeholders for matplotlib; the page replaces them by its light or dark colours
STYLE = {
    "svg.fonttype": "none", "text.parse_math": False, "font.family": ["DejaVu Sans"], "font.size": 9,
    "figure.facecolor": "none", "axes.facecolor": "none", "savefig.facecolor": "none", "text.color": INK,
    "axes.labelcolor": INK, "axes.edgecolor": GRID, "xtick.color": INK, "ytick.color": INK, "grid.color": GRID,
    "xtick.major.size": 0, "xtick.minor.size": 0, "ytick.major.size": 0, "ytick.minor.size": 0, "legend.frameon": False,
    "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True, "grid.linewidth": 0.6,
    "axes.formatter.useoffset": False,
}  # fmt: skip
COLOURS = ("#6ea8dc", "#e28a7c", "#5fc0b0", "#e9b44c", "#9a9fe0", "#93c572", "#b39ad6", "#b9a58c")  # of series
WIDE = 10.6  # inches; the page is 1100 units wide
FINE = 300  # pixels of an inch; with fewer, sizes of texts are rounded up, and a legend seems to need more room
MOST_COLUMNS = 8  # of a legend
LINE, LETTER = 0.6, 0.08  # inches of a legend's line with its gaps, and of a letter
CSS = """
figure { margin: 8px 0 0; overflow-x: auto; } svg { width: 100%; min-width: 700px; }
svg text { font-family: system-ui, sans-serif !important; } .wide { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13.5px; } th { text-align: left; font-weight: 600; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid var(--rule); vertical-align: top; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; }
@media print { svg { min-width: 0; } figure, .wide { overflow: visible; } figure, tr { break-inside: avoid; } }
"""


def paragraphs(lines: list[str]) -> str:
    """Return a paragraph for each line of text."""
    return "".join(f"<p>{html.escape(line)}</p>" for line in lines)


def figure_of(draw: Callable, report, name: str, height: float, width: float = WIDE) -> str:
    """Return an HTML figure, a plot of `height` and `width` inches without dates or comments; ids begin with `name`.

    `draw` draws the report into a figure and fills a dictionary {gid of an artist: its tooltip}.
    """
    import matplotlib.style
    from matplotlib.figure import Figure

    tips: dict[str, str] = {}
    with matplotlib.style.context(["default", STYLE | {"svg.hashsalt": name}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph .* missing from font")  # the browser has fonts of all scripts
        figure, file = Figure(figsize=(width, height), dpi=FINE), io.StringIO()
        draw(report, figure, tips)
        figure.savefig(file, format="svg", metadata={"Date": None})
    text = file.getvalue()[file.getvalue().index("<svg") :].replace(INK, "var(--ink)").replace(GRID, "var(--rule)")
    text = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r' (width|height)="[^"]*pt"', "", re.sub(r'(\sid="|url\(#|href="#)', rf"\g<1>{name}-", text))
    for gid, tip in tips.items():
        text = text.replace(f'id="{name}-{gid}">', f'id="{name}-{gid}"><title>{html.escape(tip)}</title>')
    return f"<figure>{text}</figure>"


def add_legend(axes, handles: Sequence, labels: Sequence[str]) -> float:
    """Draw a legend above axes with as many columns as fit; the figure grows by its height.

    Returns the height in inches.

    Args:
      handles, labels: artists, and their words; a label that is longer than a row loses its middle.
    """
    figure, most = axes.figure, int((axes.bbox.width / axes.figure.dpi - LINE) / LETTER)
    words = [shortened(label, most) for label in labels]
    for columns in range(max(1, min(MOST_COLUMNS, len(words))), 0, -1):
        legend = axes.legend(
            handles, words, loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=columns, borderaxespad=0.2, fontsize=8.5
        )  # fmt: skip
        if legend.get_window_extent().width <= axes.bbox.width:
            break
    added = (legend.get_window_extent().y1 - axes.bbox.y1) / figure.dpi
    left, bottom, width, height = axes.get_position().bounds
    kept = figure.get_figheight() / (figure.get_figheight() + added)
    figure.set_figheight(figure.get_figheight() + added)
    axes.set_position((left, bottom * kept, width, height * kept))
    return added


def shortened(name: str, most: int = 18) -> str:
    """Return a name that fits next to a plot, its middle left out: names of runs differ at either end."""
    return name if len(name) <= most else f"{name[: most // 2]}…{name[len(name) - (most - 1) // 2 :]}"


def table_of(columns: Sequence[str], rows: Sequence[Sequence[str]], *, numbers: bool = True) -> str:
    """Return an HTML table with escaped cells; a column whose name begins with a capital holds numbers.

    Args:
      numbers: False if no column holds numbers, as where columns have the names of runs.
    """
    kinds = [' class="number"' if numbers and name[:1].isupper() else "" for name in columns]
    lines = [
        "".join(f"<{cell}{kind}>{html.escape(text)}</{cell}>" for kind, text in zip(kinds, row, strict=True))
        for cell, row in (("th", columns), *(("td", row) for row in rows))
    ]
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in lines)}</table></div>'


def short(number: float) -> str:
    """Return a number of a table or a logarithmic tick: 0.002, 6,144, 5.03M, 2e+17."""
    if 1e6 <= abs(number) < 999.5e6:
        return f"{number / 1e6:.3g}M"
    return f"{number:,.0f}" if 100 <= abs(number) < 1e6 else f"{number:.3g}"


def format_ticks(axis) -> None:
    """Label an axis by plain numbers; a logarithmic one at each decade, or if it has few of them at 2 and 5 too."""
    if axis.get_scale() != "log":
        axis.set_major_formatter(lambda value, _: _exact(value))
        return
    axis.set_major_formatter(lambda value, _: short(value))
    low, high = axis.get_view_interval()
    labelled = "125" if high < 1e3 * low else "1"
    axis.set_minor_formatter(lambda value, _: short(value) if f"{value:e}"[0] in labelled else "")


def _exact(number: float) -> str:
    """Return a number as a linear tick, whose neighbours may differ in its last digits: 0.00012525, 6,144, 1.2345M."""
    return f"{number / 1e6:,.7g}M" if 1e6 <= abs(number) < 1e9 else f"{number:,.7g}"
