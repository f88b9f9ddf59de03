# SPDX-License-Identifier: Apache-2.0
"""The page that `sweep.py report` writes for a search: the best configuration first; it needs no network or script."""

import html

from optuna.trial import TrialState

from reporting import html_page, page_parts
from reporting.display import counted
from reporting.page_parts import figure_of, paragraphs, table_of
from studies.report import page, plots
from studies.search import plots as search_plots
from studies.search import searches
from studies.search.searches import Searched


def document(found: Searched) -> str:
    """Return the HTML document of a search; the same trials give the same bytes."""
    about = found.definition
    heading = ("Queued", "Running", "Done", "Pruned", "Failed", "Left out", "Chip-hours", "Cost")
    method = f"Method: {about['method']} with seed {about['seed']}; pruning: {about['prune']}."
    body = [
        paragraphs([f"{about['recipe']} over {about['space']}. {method}"]),
        f'<p class="answer">{html.escape(searches.answer(found))}</p>',
        table_of(heading, [searches.counts(found)]),
    ]
    if found.done:
        body += [*_best(found), *_front(found), *_plots(found)]
    body += _ends(found)
    return html_page.document(f"Search {found.name}", "\n".join(body), page_parts.CSS + page.CSS)


def _best(found: Searched) -> list[str]:
    shown = min(len(found.done), searches.MOST)
    best = "trial" if shown == 1 else f"{shown} trials"
    return [f"<h2>The best {best}</h2>", _table(found)]


def _table(found: Searched, *, front: bool = False) -> str:
    """Return the table of the best trials, or of the Pareto front, with its columns named for the objectives."""
    (trial, _, *_, parameters, folder), *rows = searches.table(found, front=front)
    return table_of((trial, *(name.capitalize() for name in found.objectives), parameters, folder), rows)


def _front(found: Searched) -> list[str]:
    """Return the Pareto front of a search with a second objective."""
    if len(found.objectives) == 1:
        return []
    plot = figure_of(search_plots.draw_front, found, "front", plots.HEIGHT)
    said = f"No trial has both a lower {found.objectives[0]} and a lower {found.objectives[1]} than these."
    return ["<h2>The Pareto front</h2>", plot, paragraphs([said]), _table(found, front=True)]


def _plots(found: Searched) -> list[str]:
    best = figure_of(search_plots.draw_best, found, "best", plots.HEIGHT)
    parameters = figure_of(search_plots.draw_parameters, found, "parameters", search_plots.height_of_parameters(found))
    said = (
        "A filled point is a complete trial, the large one the best. A hollow one was pruned; its value is the last "
        "one before, which does not compare with those of complete trials."
    )
    return [
        "<h2>Best so far</h2>", best, f"<h2>{html.escape(found.objectives[0].capitalize())} "
        f"against each parameter</h2>", parameters, paragraphs([said]),
    ]  # fmt: skip


def _ends(found: Searched) -> list[str]:
    """Return the trials that were pruned or have failed, and the points that were left out, with their reasons."""
    parts = []
    for state, word in ((TrialState.PRUNED, "pruned"), (TrialState.FAIL, "failed")):
        why = searches.reason if state == TrialState.FAIL else lambda one: one.user_attrs["reason"]
        rows = [
            (str(one.number), searches.point(one), one.user_attrs["workdir"], why(one)) for one in found.in_state(state)
        ]  # fmt: skip
        if rows:
            table = table_of(("trial", "parameters", "folder", "reason"), rows)
            parts.append(f"<details><summary>{counted(len(rows), 'trial')} {word}</summary>{table}</details>")
    if found.left_out:
        rows = [(str(count), reason) for reason, count in found.left_out.items()]
        table = table_of(("Points", "reason"), rows)
        parts.append(
            f"<details><summary>{counted(sum(found.left_out.values()), 'point')} left out</summary>{table}</details>"
        )
    return ["<h2>Other ends</h2>", *parts] if parts else []
