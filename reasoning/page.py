# SPDX-License-Identifier: Apache-2.0
"""A tree of thoughts as an HTML page that needs no other file, network or script."""

import html
import math

from reasoning.solving import Solved
from reasoning.thoughts import Thought
from reporting import html_page

CSS = """
ul { list-style: none; margin: 0; padding-left: 20px; border-left: 1px solid var(--rule); }
li { margin: 2px 0; overflow-wrap: anywhere; } .tree { padding: 0; border: 0; }
code { font: 14px/1.6 ui-monospace, monospace; padding: 1px 6px; border-radius: 4px; background: var(--panel); }
.chosen > code { outline: 2px solid #2563af; } small { color: var(--soft); padding-left: 6px; white-space: nowrap; }
h2 code { font-size: 16px; }
"""
LEGEND = (
    "Each line is a thought: a step that the model drew, with its value for the search, and its probability. The steps "
    "of the best answer have a frame."
)


def page(found: list[Solved], title: str) -> str:
    """Return an HTML document with the tree of each problem; the same searches give the same bytes."""
    sections = [f"<p>{html.escape(LEGEND)}</p>"]
    for one in found:
        chosen = _path(one.answers[0]) if one.answers else set()
        answer = "The best answer is framed." if one.answers else "The search found no complete answer."
        facts = f"{len(one.root.all()) - 1} thoughts, {one.num_tokens} tokens drawn. {answer}"
        sections.append(
            f"<h2><code>{html.escape(one.problem)}</code></h2><p>{facts}</p>{_list(one.root, chosen, True)}"
        )
    return html_page.document(title, "\n".join(sections), CSS)


def _list(thought: Thought, chosen: set[Thought], is_root: bool = False) -> str:
    """Return the children of a thought as a list, the most valuable first."""
    if not thought.children:
        return ""
    children = sorted(thought.children, key=lambda one: (-_known(one.value), -one.log_prob))
    marks = (' class="chosen"' if one in chosen else "" for one in children)
    items = "".join(
        f"<li{mark}>{_item(one)}{_list(one, chosen)}</li>" for mark, one in zip(marks, children, strict=True)
    )
    return f'<ul class="tree">{items}</ul>' if is_root else f"<ul>{items}</ul>"


def _item(thought: Thought) -> str:
    facts = [] if math.isnan(thought.value) else [f"value {thought.value:.2f}"]
    facts.append(f"p {math.exp(thought.log_prob):.2g}")
    facts += [f"{thought.visits} visits"] if thought.visits else []
    facts += [f"drawn {thought.num_draws} times"] if thought.num_draws > 1 else []
    return f"<code>{html.escape(thought.text)}</code><small>{', '.join(facts)}</small>"


def _known(value: float) -> float:
    return -math.inf if math.isnan(value) else value


def _path(thought: Thought) -> set[Thought]:
    return {thought} | (_path(thought.parent) if thought.parent else set())
