# SPDX-License-Identifier: Apache-2.0
"""The guide of a group: hypothesis, how to run it, what to expect, how to analyse it, what goes wrong, where it is."""

import html
from typing import NamedTuple

from configs.group import FULL, Group
from reporting.display import counted
from studies.suites import Study


class Section(NamedTuple):
    """A part of a guide: a heading, sentences, and commands or paths."""

    heading: str
    text: str
    commands: tuple[str, ...] = ()


def sections(study: Study, name: str) -> list[Section]:
    """Return the sections of a group's guide; a text that its file does not declare is left out."""
    group = study.groups[name]
    count = counted(len(group.of_size(study.base.size)), "configuration")
    found = [
        Section("Hypothesis", group.hypothesis),
        Section(
            "How to run", f"{count}, as changes of {study.base.recipe}; --workers=N runs N at a time.",
            _commands(study, name),
        ),
        Section("Expected", group.expected),
        Section("How to analyse", _analysis(group)),
        Section(
            "Troubleshooting",
            f"{group.troubleshooting} `sweep.py status` has the reason of each failed trial, and output.txt in its "
            "folder what it printed. `sweep.py retry` queues failed trials again.".strip(),
        ),
        Section(
            "Where results are",
            f"ROOT is --root, by default runs/{study.name}. The database of --storage has the metric and the hours of "
            "each trial.",
            (f"ROOT/{name}/CONFIGURATION/metrics.jsonl", f"ROOT/{name}/CONFIGURATION/checkpoints/"),
        ),
    ]  # fmt: skip
    return [section for section in found if section.text]


def markdown(study: Study, name: str) -> str:
    """Return the guide of a group as text in Markdown."""
    lines = [f"# {name}: {study.groups[name].question}"]
    for section in sections(study, name):
        lines += ["", f"## {section.heading}", "", section.text]
        lines += ["", *(f"    {command}" for command in section.commands)] if section.commands else []
    return "\n".join(lines)


def as_html(study: Study, name: str) -> str:
    """Return the guide of a group as a part of a page that opens by a click."""
    escape, parts = html.escape, []
    for section in sections(study, name):
        commands = escape("\n".join(section.commands))
        parts.append(f"<dt>{section.heading}</dt><dd>{escape(section.text)}")
        parts.append(f"<pre>{commands}</pre></dd>" if commands else "</dd>")
    return f"<details><summary>Guide to {name}</summary><dl>{''.join(parts)}</dl></details>"


def _commands(study: Study, name: str) -> tuple[str, ...]:
    slice_ = " --topology=v4-64" if study.base.size == FULL else ""
    words = f"plan {name}{slice_}", *(f"{verb} {name} --seeds=3" for verb in ("run", "status", "report"))
    return tuple(f"python sweep.py {word}{_base_flag(study)}" for word in words)


def _base_flag(study: Study) -> str:
    base = next(name for name, base in study.suite.bases.items() if base is study.base)
    return "" if base == next(iter(study.suite.bases)) else f" --base={base}"


def _analysis(group: Group) -> str:
    fit = f" The report fits a line over log2 of {group.axis}." if group.axis else ""
    return f"{group.analysis}{fit}".strip()
