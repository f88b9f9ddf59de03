# SPDX-License-Identifier: Apache-2.0
"""The page of one or several runs that `report.py` writes; it needs no other file, network or script."""

import html
import shlex
import time
from collections.abc import Callable, Sequence

import numpy as np

from configs.base import KEYS
from reporting import html_page, page_parts
from reporting.display import duration, listed
from reporting.page_parts import figure_of, paragraphs, short, table_of
from reporting.run_report import plots
from reporting.run_report.reading import Answer, RunRecord

HALF = 5.2  # inches of the width of one of two plots side by side
OF_EVERY_RUN = ("train", "eval")  # kinds of lines with plots of their own; the others are evaluations
NOT_FIGURES = ("step", "time")
MOST_NAMED = 8  # runs in the title
LONGEST_CELL = 600  # characters of a prompt or an answer
ABSENT, NOT_FINITE = "-", "not finite"
CSS = """
nav a { margin-right: 14px; color: inherit; white-space: nowrap; } h3 { font-size: 15px; margin: 20px 0 4px; }
pre { margin: 8px 0; padding: 10px; background: var(--panel); border-radius: 6px; font-size: 13px; overflow-x: auto; }
summary { cursor: pointer; margin: 14px 0 4px; color: var(--soft); }
.pair { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 0 12px; }
@media screen and (max-width: 640px) { .pair { grid-template-columns: minmax(0, 1fr); } }
.pair svg { min-width: 0; } td { overflow-wrap: break-word; }
@media print { nav, details:not([open]) { display: none; } pre { white-space: pre-wrap; } }
"""
THINNED = "A line is the mean of the logged steps around a point, and the band behind it is their range."
MEMORY = "Memory of process 0 and of its devices. Peaks are since the process started."
GOODPUT = "Training that was repeated after a restart counts as lost, not as training."


def page(runs: Sequence[RunRecord]) -> str:
    """Return the HTML document of runs with different names; the same folders give the same bytes."""
    made = [(title, body) for title, make in SECTIONS.items() if (body := make(runs))]
    links = " ".join(f'<a href="#{anchor(title)}">{title}</a>' for title, _ in made)
    body = [paragraphs(introduction(runs)), f"<nav>{links}</nav>"]
    body += [f'<h2 id="{anchor(title)}">{title}</h2>\n{text}' for title, text in made]
    names = listed([run.name for run in runs], MOST_NAMED)
    title = f"Run {names}" if len(runs) == 1 else f"{len(runs)} runs: {names}"
    return html_page.document(title, "\n".join(body), page_parts.CSS + CSS)


def anchor(title: str) -> str:
    """Return the id of a section."""
    return title.lower().replace(" ", "-")


def introduction(runs: Sequence[RunRecord]) -> list[str]:
    """Return a line about each run: its folder, its state, its last line and its command."""
    lines = []
    for run in runs:
        last = max((*run.progress[-1:, 0].tolist(), *(line["time"] for line in run.events[-1:])), default=None)
        written = "" if last is None else f", last line written {utc(last)}"
        state = "finished" if run.summary else "not finished"
        command = f" Command: {shlex.join(run.command)}" if run.command else ""
        lines.append(f"{run.name}: {state}{written}.{command}")
    return lines


def utc(seconds: float) -> str:
    """Return Unix seconds as a date and time."""
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(max(seconds, 0.0), 2.0**37)))


def _overview(runs: Sequence[RunRecord]) -> str:
    rows = [(name, *(text(run) for run in runs)) for name, text in OVERVIEW.items()]
    rows = [row for row in rows if any(cell != ABSENT for cell in row[1:])]
    return table_of(("figure", *(run.name for run in runs)), rows, numbers=False)


def _last(run: RunRecord, kind: str, name: str, form: str) -> str:
    _, values = run.column(kind, name)
    return f"{values[-1]:{form}}" if len(values) else ABSENT


def _last_loss(run: RunRecord, kind: str, name: str) -> str:
    """Return the loss of the last line of a kind. Such a line always has a loss, which may be not finite."""
    if kind not in run.kinds:
        return ABSENT
    losses = run.kinds[kind].get(name)
    return NOT_FINITE if losses is None or not np.isfinite(losses[-1]) else f"{losses[-1]:,.4f}"


def _best_heldout(run: RunRecord) -> str:
    steps, losses = run.column("eval", "eval_loss")
    at = int(np.argmin(losses)) if len(losses) else 0
    return f"{losses[at]:.4f} at step {steps[at]:,.0f}" if len(losses) else ABSENT


def _median(run: RunRecord, name: str, text: Callable[[float], str] = short) -> str:
    _, values = run.column("train", name)
    return text(float(np.median(values))) if len(values) else ABSENT


def _goodput(run: RunRecord) -> str:
    whole = sum(run.seconds.values())
    return f"{run.seconds.get('training', 0.0) / whole:.1%} of {duration(whole)}" if whole > 0 else ABSENT


def _peak(run: RunRecord, name: str) -> str:
    _, values = run.column("train", name)
    return f"{values.max():.2f} GiB" if len(values) else ABSENT


def _events(run: RunRecord) -> str:
    counts = {plots.EVENTS[name]: len(times) for name, times in plots.rows_of(run).items() if name != "start"}
    return ", ".join(f"{word}: {count:,}" for word, count in counts.items()) or "none"


OVERVIEW: dict[str, Callable[[RunRecord], str]] = {
    "last step": lambda run: _last(run, "train", "step", ",.0f"),
    "tokens": lambda run: _last(run, "train", "total_tokens", ",.0f"),
    "training loss, last": lambda run: _last_loss(run, "train", "loss"),
    "held-out loss, last": lambda run: _last_loss(run, "eval", "eval_loss"),
    "held-out loss, lowest": _best_heldout,
    "speed, median": lambda run: _median(run, "tokens_per_second", "{:,.0f} tokens/s".format),
    "MFU, median": lambda run: _median(run, "mfu", "{:.1%}".format),
    "goodput": _goodput,
    "host memory, highest": lambda run: _peak(run, "host_memory_gib"),
    "device memory, highest": lambda run: _peak(run, "device_memory_peak_gib_max"),
    "events": _events,
}


def _pair(name: str, *panels: plots.Panel | None) -> str:
    """Return two plots side by side, without those that have no figures."""
    there = [one for one in panels if one]
    figures = [figure_of(plots.draw_panel, one, f"{name}{at}", plots.HEIGHT, HALF) for at, one in enumerate(there)]
    return f'<div class="pair">{"".join(figures)}</div>' if there else ""


def _loss(runs: Sequence[RunRecord]) -> str:
    figures = (("train", "loss", "training", "-"), ("eval", "eval_loss", "held-out", "--"))
    shown = plots.panel("loss", runs, figures, logarithmic=True)
    return figure_of(plots.draw_panel, shown, "loss", plots.HEIGHT) + paragraphs([THINNED]) if shown else ""


def _speeds(runs: Sequence[RunRecord]) -> str:
    rate = plots.panel("tokens per second", runs, [("train", "tokens_per_second", "", "-")])
    return _pair("speed", rate, plots.panel("MFU", runs, [("train", "mfu", "", "-")]))


def _goodputs(runs: Sequence[RunRecord]) -> str:
    known = [run for run in runs if sum(run.seconds.values()) > 0]
    if not known:
        return ""
    return figure_of(plots.draw_goodput, known, "goodput", plots.goodput_height(known)) + paragraphs([GOODPUT])


def _memory(runs: Sequence[RunRecord]) -> str:
    host = plots.panel("host memory, GiB", runs, [("train", "host_memory_gib", "", "-")])
    of_devices = (
        ("train", "device_memory_peak_gib_max", "highest peak", "-"),
        ("train", "device_memory_peak_gib_min", "lowest peak", "--"), ("train", "device_memory_gib", "device 0", ":"),
    )  # fmt: skip
    shown = _pair("memory", host, plots.panel("device memory, GiB", runs, of_devices))
    return shown + paragraphs([MEMORY]) if shown else ""


def _optimization(runs: Sequence[RunRecord]) -> str:
    rate = plots.panel("learning rate", runs, [("train", "learning_rate", "", "-")])
    norm = plots.panel("gradient norm", runs, [("train", "gradient_norm", "", "-")], logarithmic=True)
    return _pair("optimization", rate, norm)


def _timeline(runs: Sequence[RunRecord]) -> str:
    parts = []
    for number, run in enumerate(runs):
        if plots.rows_of(run):
            parts += [f"<h3>{html.escape(run.name)}</h3>"] if len(runs) > 1 else []
            parts.append(figure_of(plots.draw_timeline, run, f"timeline{number}", plots.timeline_height(run)))
    return "".join(parts)


def _evaluations(runs: Sequence[RunRecord]) -> str:
    """Return a table of what evaluations measured, and curves of the tasks."""
    measured = [(run, kind, name) for run in runs for kind, name in _figures_of(run)]
    rows = [_evaluation_row(*one) for one in measured]
    tasks = sorted({name for _, kind, name in measured if kind == "tasks"})
    columns = ("run", "evaluation", "figure", "First", "Last", "Standard error", "At step")
    drawn = [plots.panel(name, runs, [("tasks", name, "", "-")]) for name in tasks]
    figures = [_pair(f"tasks{at}", *drawn[at : at + 2]) for at in range(0, len(drawn), 2)]
    return "".join([*figures, table_of(columns, rows)]) if rows else ""


def _figures_of(run: RunRecord) -> list[tuple[str, str]]:
    """Return the (kind of evaluation, figure) pairs that a run has in addition to those of every run."""
    return [
        (kind, name) for kind, columns in run.kinds.items() if kind not in OF_EVERY_RUN
        for name in columns if name not in NOT_FIGURES and not name.endswith("_stderr")
    ]  # fmt: skip


def _evaluation_row(run: RunRecord, kind: str, name: str) -> tuple[str, ...]:
    steps, values = run.column(kind, name)
    error_steps, errors = run.column(kind, f"{name}_stderr")
    error = next((f"{value:.4f}" for value in errors[error_steps == steps[-1]]), ABSENT)
    return run.name, kind, name, f"{values[0]:.4g}", f"{values[-1]:.4g}", error, f"{steps[-1]:,.0f}"


def _samples(runs: Sequence[RunRecord]) -> str:
    """Return what a run printed at its end, with its sample, and the last answers that it drew during training."""
    parts = []
    for run in runs:
        parts += [f"<h3>{html.escape(run.name)}</h3>"] if len(runs) > 1 and (run.summary or run.answers) else []
        parts += [f"<pre>{html.escape(run.summary)}</pre>"] if run.summary else []
        parts += [_answers(run.answers)] if run.answers else []
    return "".join(parts)


def _answers(answers: Sequence[Answer]) -> str:
    rows = [
        (
            f"{answer['step']:,}" if "step" in answer else ABSENT, _cell(answer.get("reward")),
            _cut(answer.get("prompt", "")), _cut(answer.get("answer", "")),
        )
        for answer in answers
    ]  # fmt: skip
    return table_of(("Step", "Reward", "prompt", "answer"), rows)


def _cut(text: str) -> str:
    return text if len(text) <= LONGEST_CELL else f"{text[:LONGEST_CELL]}…"


def _cell(value: object) -> str:
    if value is None:
        return ABSENT
    return short(value) if isinstance(value, float) else str(value)


def _profiles(runs: Sequence[RunRecord]) -> str:
    parts = []
    for run in runs:
        if run.profile:
            parts += [f"<h3>{html.escape(run.name)}</h3>"] if len(runs) > 1 else []
            parts.append(paragraphs(run.profile["summary"]))
            for table in run.profile["tables"]:
                rows = [[_cell(value) for value in row] for row in table["rows"]]
                parts += [f"<h3>{html.escape(table['title'])}</h3>", table_of(table["columns"], rows)]
    return "".join(parts)


def _rehearsals(runs: Sequence[RunRecord]) -> str:
    """Return what `rehearse.py` expected, next to what each run measured."""
    rows = []
    for run in runs:
        if run.rehearsal:
            expected, fits = run.rehearsal, run.rehearsal.get("fits")
            where = f"{run.name}, {expected.get('topology', 'unknown slice')}"
            rows += [
                (where, "step, seconds", _cell(expected.get("step_seconds")), _median(run, "step_seconds")),
                (where, "tokens/s", _cell(expected.get("tokens_per_second")), _median(run, "tokens_per_second")),
                (where, "MFU", _cell(expected.get("mfu")), _median(run, "mfu")),
                (
                    where, "memory of a chip, GiB", _cell(expected.get("hbm_gib", {}).get("total")),
                    _median(run, "device_memory_peak_gib_max"),
                ),
                (where, "fits", "not known" if fits is None else "yes" if fits else "no", ABSENT),
            ]  # fmt: skip
    return table_of(("run", "figure", "Rehearsed", "Measured, median"), rows) if rows else ""


def _configuration(runs: Sequence[RunRecord]) -> str:
    """Return the keys in which several runs differ, or what one run changed in its recipe, and all keys."""
    known = [run for run in runs if run.config]
    if not known:
        return ""
    if len(runs) > 1:
        names, columns = [run.name for run in known], [run.config for run in known]
        none = "These runs have the same value of every key."
    else:
        names, columns = ["recipe", "run"], [known[0].recipe, known[0].config]
        none = "The run has the values of its recipe."
    rows = differing(columns)
    table = table_of(("key", *names), rows, numbers=False) if rows else paragraphs([none])
    every = "".join(
        f"<details><summary>all keys of {html.escape(run.name)}</summary>"
        f"{table_of(('key', 'value'), [(key, str(value)) for key, value in sorted(run.config.items())])}</details>"
        for run in known
    )
    return table + every


def differing(columns: Sequence[dict]) -> list[tuple[str, ...]]:
    """Return (key, value of each column) of the keys whose values differ; a key that is missing has its default."""
    rows = []
    for key in sorted(set().union(*columns)):
        default = KEYS[key].default if key in KEYS else ABSENT
        values = [column.get(key, default) for column in columns]
        if any(value != values[0] for value in values):
            rows.append((key, *(str(value) for value in values)))
    return rows


SECTIONS: dict[str, Callable[[Sequence[RunRecord]], str]] = {
    "Overview": _overview,
    "Loss": _loss,
    "Speed": _speeds,
    "Goodput": _goodputs,
    "Memory": _memory,
    "Optimization": _optimization,
    "Time line": _timeline,
    "Evaluations": _evaluations,
    "Samples": _samples,
    "Profile": _profiles,
    "Rehearsal": _rehearsals,
    "Configuration": _configuration,
}
