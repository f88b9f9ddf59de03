# SPDX-License-Identifier: Apache-2.0
"""The page that `sweep.py report` writes: a section per group, the answer first; it needs no network and no script."""

import html
from collections.abc import Callable

from configs.group import Group, Suite
from reporting import html_page, page_parts
from reporting.display import counted
from reporting.page_parts import figure_of, paragraphs, table_of
from studies.report import costs, guide, plots
from studies.report.answers import Answer, Row, digits, figure, words
from studies.suites import Study

CURVES = "Learning curves: a thin line is one seed."
BREADTH = (
    "Accuracy by depth, as the end of each run measured it: one trajectory (alone), and with several trajectories the "
    "answer of each way of choosing. An oracle is a checker of the rules, which no other way can exceed."
)
CSS = """
.answer { color: var(--ink); font-size: 16px; font-weight: 600; margin: 4px 0 10px; }
.bad { color: #b3261e; } @media (prefers-color-scheme: dark) { .bad { color: #ff8a80; } }
table { min-width: 700px; } td:last-child { min-width: 380px; } th::first-letter { text-transform: uppercase; }
nav a { margin-right: 14px; color: inherit; white-space: nowrap; } .name { color: var(--soft); font-weight: 400; }
dl { margin: 8px 0; color: var(--soft); max-width: 85ch; }
dt { color: var(--ink); font-weight: 600; } dd { margin: 0 0 10px 0; } summary { cursor: pointer; margin: 12px 0 0; }
pre { margin: 4px 0; overflow-x: auto; font-size: 13px; }
"""


def page(study: Study, answers: list[Answer]) -> str:
    """Return the HTML document of a study; the same answers give the same bytes."""
    links = " ".join(f'<a href="#{answer.group}">{answer.group}</a>' for answer in answers)
    done = sum(row.is_done for answer in answers for row in answer.rows)
    rows, groups = sum(len(answer.rows) for answer in answers), counted(len(answers), "group")
    about = f"{done} of {rows} configurations are done, in {groups}. Metric: {words(study.suite.metric)}."
    body = [paragraphs([about, f"Base: {study.base.recipe}."]), f"<nav>{links}</nav>"]
    body += [_section(study, answer) for answer in answers]
    return html_page.document(f"Study {study.name}", "\n".join(body), page_parts.CSS + CSS)


def _section(study: Study, answer: Answer) -> str:
    """Return a group: its question, the answer, the table, the plots, failures, and its guide."""
    group, escape = study.groups[answer.group], html.escape
    return "\n".join([
        f'<h2 id="{answer.group}">{escape(group.question)} <span class="name">{answer.group}</span></h2>',
        f'<p class="answer">{escape(answer.sentence)}</p>',
        _table(answer.rows, words(study.suite.metric)),
        *_plots(answer, group, study.suite),
        "".join(f'<p class="bad">{escape(row.name)}: {escape(why)}</p>' for row in answer.rows
                for why in dict.fromkeys(row.failures)),
        guide.as_html(study, answer.group),
    ])  # fmt: skip


def _table(rows: list[Row], metric: str) -> str:
    columns = ("configuration", metric.capitalize(), "Deviation", "Seeds", "Chip-hours", "Cost", "what differs")
    cells = [
        (
            row.name, figure(row) if row.values else "-",
            "-" if row.deviation is None else digits(row.deviation, row.mean), str(len(row.values)),
            f"{row.chip_hours:.2f}", "not known" if row.cost is None else f"${row.cost:,.2f}", row.changes,
        )
        for row in rows
    ]  # fmt: skip
    return table_of(columns, cells)


def _plots(answer: Answer, group: Group, suite: Suite) -> list[str]:
    """Return the plots of a group with their captions: learning curves, the scaling fit, cost against the metric."""
    metric, name, found = words(suite.metric), answer.group, []
    if any(row.curves for row in answer.rows):
        found.append(_plot(plots.draw_curves, (answer.rows, metric), f"{name}-curves", CURVES))
    if any(plots.depth_curves(row.breadths) for row in answer.rows):
        found.append(_plot(plots.draw_breadth, answer.rows, f"{name}-breadth", BREADTH))
    if answer.fit:
        found.append(_plot(plots.draw_fit, (answer, group.axis, metric), f"{name}-fit", _about_fit(answer)))
    if cost := costs.of_rows(answer.rows, suite.direction):
        about = f"Cost against {metric}, mean and standard error over seeds. {costs.sentence(cost)}"
        found.append(_plot(plots.draw_costs, (cost, metric), f"{name}-costs", about))
    return found


def _plot(draw: Callable, drawn, name: str, caption: str) -> str:
    return figure_of(draw, drawn, name, plots.HEIGHT) + paragraphs([caption])


def _about_fit(answer: Answer) -> str:
    """Return the caption of a scaling fit."""
    slope, low, high = answer.fit.figures
    said = f"Least squares over log2 of the size, all seeds: {slope} for each doubling, 95 % interval {low} to {high}. "
    said += "The band is the 95 % confidence band of the mean. "
    bend = answer.fit.bend
    if bend is None:
        return said + "Without repeated seeds, nothing says whether a line is the right curve."
    if answer.fit.bends:
        return said + f"The points do not follow a line (lack of fit, p = {bend:.2g}), so that the band is not valid."
    return said + f"No lack of fit shows (p = {bend:.2g}). Outside of these sizes the line says nothing."
