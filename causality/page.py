# SPDX-License-Identifier: Apache-2.0
"""Heat maps of a causal analysis as an HTML page that needs no other file, network or script."""

import html
from collections.abc import Sequence

import numpy as np

from causality.explanation import WORDS, Explanation, headline
from causality.sites import NAMES, STREAMS
from reporting import html_page, page_parts

CSS = """
:root { --for: 37, 99, 175; --against: 194, 87, 26; }
@media (prefers-color-scheme: dark) { :root { --for: 92, 160, 240; --against: 240, 140, 70; } }
.maps { display: flex; flex-wrap: wrap; gap: 0 32px; } .maps section { max-width: 100%; }
.heat { overflow-x: auto; margin: 8px 0 24px; } .heat table { width: auto; font-size: 12px; border-collapse: separate;
  border-spacing: 1px; font-variant-numeric: tabular-nums; }
.heat th { font-weight: 500; color: var(--soft); padding: 2px 8px 2px 0; white-space: pre; border: 0; }
.heat thead th { text-align: center; padding: 2px 4px; }
.heat tbody th { position: sticky; left: 0; background: var(--paper); color: var(--ink);
  font-family: ui-monospace, monospace; }
.heat td { min-width: 40px; padding: 3px 4px; text-align: center; border: 0; white-space: pre;
  background: var(--panel); }
h3 { font-size: 15px; font-weight: 600; margin: 16px 0 4px; } .heat b { color: rgb(var(--against)); font-weight: 600; }
"""
LEGEND = """Each cell is one activation of the clean run that is put into the corrupted run. 1 restores the clean answer
completely, 0 changes nothing, and a negative figure moves away from it. Blue restores, orange opposes."""
ATTRIBUTION = """The same, estimated from one gradient: (clean - corrupted activation) times the gradient of the
corrupted run. It is exact for small changes. Where it differs from patching, trust patching."""
TRACING = """What an activation adds to the probability of the answer, if it is restored in a run with noise on the
embeddings of the tokens in which the prompts differ. Mean of the draws of the noise."""
LENS = """The likeliest next token if the model ended after this block, with its probability. Color: the probability of
the answer."""
METHODS = (("Patching", LEGEND), ("Attribution", ATTRIBUTION), ("Tracing", TRACING))


def page(found: Explanation, title: str) -> str:
    """Return an HTML document with a heat map for each method and tap; the same result gives the same bytes."""
    sections = [page_parts.paragraphs(headline(found))]
    for (name, text), tables in zip(METHODS, (found.restored, found.attributed, found.traced.effects), strict=True):
        largest = 1.0 if name != "Tracing" else max(float(np.nanmax(np.abs(table))) for table in tables.values()) or 1.0
        sections.append(f"<h2>{name}</h2>{page_parts.paragraphs([text])}")
        maps = "".join(_map_of(found, tables[tap], tap, largest) for tap in NAMES)
        sections.append(f'<div class="maps">{maps}</div>')
    sections.append(f"<h2>Logit lens</h2>{page_parts.paragraphs([LENS])}{_lens(found)}")
    return html_page.document(title, "\n".join(sections), page_parts.CSS + CSS)


def _map_of(found: Explanation, table: np.ndarray, tap: str, largest: float) -> str:
    """Return the heat map of one table [L, T] or [L, N], with layers as columns."""
    labels = _positions(found) if tap in STREAMS else [f"head {head}" for head in range(table.shape[1])]
    shown = np.round(table.T, 2) + 0.0  # not -0.00
    cells = [
        [(f"{text:.2f}", value / largest) for text, value in zip(*rows, strict=True)]
        for rows in zip(shown.tolist(), table.T.tolist(), strict=True)
    ]
    return f"<section><h3>{WORDS[tap][0].upper()}{WORDS[tap][1:]}</h3>{_heat_map(labels, cells)}</section>"


def _lens(found: Explanation) -> str:
    lens, layers = found.lens, range(len(found.lens_words))
    texts = [
        [f"{found.lens_words[n][at]!r} {lens.probability_LT[n, at]:.2f}" for n in layers]
        for at in range(len(found.clean_words))
    ]
    cells = [list(zip(row, lens.answer_LT[:, at].tolist(), strict=True)) for at, row in enumerate(texts)]
    return _heat_map(_positions(found), cells)


def _positions(found: Explanation) -> list[str]:
    """Return the HTML label of each position: its token, and the corrupted one if it differs."""
    return [
        html.escape(f"{at} {clean!r}") + (f" <b>{html.escape(repr(other))}</b>" if clean != other else "")
        for at, (clean, other) in enumerate(zip(found.clean_words, found.corrupt_words, strict=True))
    ]


def _heat_map(labels: Sequence[str], cells: Sequence[Sequence[tuple[str, float]]]) -> str:
    """Return a table whose cells are (text, strength from -1 to 1); labels are HTML."""
    head = "".join(f'<th scope="col">{layer}</th>' for layer in range(len(cells[0])))
    rows = [f"<thead><tr><th>layer</th>{head}</tr></thead>"]
    for label, row in zip(labels, cells, strict=True):
        parts = "".join(f"<td{_color(strength)}>{html.escape(text)}</td>" for text, strength in row)
        rows.append(f'<tr><th scope="row">{label}</th>{parts}</tr>')
    return f'<div class="heat" tabindex="0"><table>{"".join(rows)}</table></div>'


def _color(strength: float) -> str:
    opacity = 0.0 if np.isnan(strength) else min(1.0, abs(strength))
    side = "for" if strength > 0 else "against"
    return f' style="background:rgba(var(--{side}),{0.6 * opacity:.2f})"' if opacity >= 0.01 else ""
