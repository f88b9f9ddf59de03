# SPDX-License-Identifier: Apache-2.0
"""The page that `sweep.py report` writes: a section per group, the answer first; it needs no network and no script."""

import html

from reporting import html_page, page_parts
from reporting.page_parts import figure_of, paragraphs, table_of
from studies.answers import Answer, Row, figure, words
from studies.suites import Study

COLOURS = ("#6ea8dc", "#e28a7c", "#5fc0b0", "#e9b44c", "#9a9fe0", "#93c572", "#b39ad6", "#b9a58c")
HEIGHT = 3.2  # inches of a plot
CSS = """
.answer { color: var(--ink); font-size: 16px; font-weight: 600; margin: 4px 0 10px; }
.bad { color: #b3261e; } @media (prefers-color-scheme: dark) { .bad { color: #ff8a80; } }
nav a { margin-right: 14px; color: inherit; } dl { margin: 8px 0; color: var(--soft); } dd { margin: 0 0 6px 0; }
"""


def page(study: Study, answers: list[Answer]) -> str:
    """Return the HTML document of a study; the same answers give the same bytes."""
    links = " ".join(f'<a href="#{answer.group}">{answer.group}</a>' for answer in answers)
    done = sum(bool(row.values) for answer in answers for row in answer.rows)
    rows = sum(len(answer.rows) for answer in answers)
    about = f"{done} of {rows} configurations are done, in {len(answers)} groups. Metric: {words(study.suite.metric)}."
    body = [paragraphs([about, f"Base: {study.base.recipe}."]), f"<nav>{links}</nav>"]
    body += [_section(study, answer) for answer in answers]
    return html_page.document(f"Study {study.name}", "\n".join(body), page_parts.CSS + CSS)


def _section(study: Study, answer: Answer) -> str:
    """Return a group: its question, the answer, the table, the learning curves, failures, and what was thought."""
    group, escape = study.groups[answer.group], html.escape
    return "\n".join([
        f'<h2 id="{answer.group}">{escape(group.question)}</h2>',
        f'<p class="answer">{escape(answer.sentence)}</p>',
        _table(answer.rows, words(study.suite.metric)),
        _curves(answer, words(study.suite.metric)),
        "".join(f'<p class="bad">{escape(row.name)}: {escape(why)}</p>' for row in answer.rows for why in row.failures),
        f"<dl><dt>Hypothesis</dt><dd>{escape(group.hypothesis)}</dd>"
        f"<dt>Expected</dt><dd>{escape(group.expected)}</dd></dl>",
        paragraphs([f"Group {answer.group}; to run it: python sweep.py run {answer.group}"]),
    ])  # fmt: skip


def _table(rows: list[Row], metric: str) -> str:
    columns = ("configuration", "what differs", "Seeds", metric.capitalize(), "Deviation", "Chip-hours", "Cost")
    cells = [
        (
            row.name, row.changes, str(len(row.values)), figure(row) if row.values else "-",
            "-" if row.deviation is None else f"{row.deviation:.4f}", f"{row.chip_hours:.2f}",
            "not known" if row.cost is None else f"${row.cost:,.2f}",
        )
        for row in rows
    ]  # fmt: skip
    return table_of(columns, cells)


def _curves(answer: Answer, metric: str) -> str:
    if not any(row.curves for row in answer.rows):
        return ""
    plot = figure_of(_draw_curves, (answer.rows, metric), answer.group, HEIGHT)
    return f"<figure>{plot}</figure>{paragraphs(['Learning curves: a thin line is one seed.'])}"


def _draw_curves(drawn: tuple[list[Row], str], figure, tips: dict[str, str]) -> None:
    rows, metric = drawn
    axes = figure.add_axes([0.06, 0.15, 0.93, 0.72])
    for number, row in enumerate(rows):
        for seed, curve in enumerate(row.curves):
            steps = sorted(curve)
            line = axes.plot(
                steps, [curve[step] for step in steps], color=COLOURS[number % len(COLOURS)], linewidth=1.3,
                marker="." if len(steps) < 3 else "", label="_" if seed else row.name, gid=f"line{number}-{seed}",
            )  # fmt: skip
            tips[line[0].get_gid()] = f"{row.name}, seed {seed}: {curve[steps[-1]]:.4f}" if steps else row.name
    axes.set(xlabel="step", ylabel=metric)
    axes.grid(axis="y")
    axes.legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=8, borderaxespad=0.2)
