# SPDX-License-Identifier: Apache-2.0
"""The sandboxed Jinja environment for chat templates, with the tag and the functions that `transformers` defines.

`strftime_now` is left out. Templates that would write today's date then use their fixed date, so that a corpus is the
same tomorrow.
"""

import json

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """The tag {% generation %} ... {% endgeneration %}, which puts the assistant's text between two marks."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        """Return the node of the tag at the parser's position."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
        mark = self.environment.globals["generation_mark"]
        return f"{mark}{caller()}{mark}"


def environment(mark: str) -> ImmutableSandboxedEnvironment:
    """Return the environment; `mark` is put before and after the text in {% generation %} tags."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "generation_mark": mark}
    return made


def _to_json(value, ensure_ascii: bool = False, indent=None, separators=None, sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str):
    raise TemplateError(message)
