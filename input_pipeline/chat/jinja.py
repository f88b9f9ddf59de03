# SPDX-License-Identifier: Apache-2.0
"""The Jinja environment in which `transformers` renders chat templates: sandboxed, with its tag and its functions.

Its `strftime_now` is not there: templates that would write today's date take their own instead, so that a corpus is
the same tomorrow.
"""

import json

from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what the assistant says, put between two marks."""

    tags = frozenset({"generation"})

    def parse(self, parser):
        """Return the node of a tag, which `parser` stands before."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller) -> str:
        mark = self.environment.globals["generation_mark"]
        return f"{mark}{caller()}{mark}"


def environment(mark: str) -> ImmutableSandboxedEnvironment:
    """Return the environment; `mark` is put before and after what {% generation %} encloses."""
    made = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    made.filters["tojson"] = _to_json
    made.globals |= {"raise_exception": _raise, "generation_mark": mark}
    return made


def _to_json(value, ensure_ascii: bool = False, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(message: str):
    raise TemplateError(message)
