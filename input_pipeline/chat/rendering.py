# SPDX-License-Identifier: Apache-2.0
"""The process that renders chat templates, so that a template that hangs or takes all memory ends nothing else.

input_pipeline/chat/renderer.py starts it without its own environment, and it may not write files. A request is a line
of JSON, {"template", "tokens", "task", "count", "seconds"}, followed by `count` lines. The answer has the same number
of lines: the task's result for each line, or the error. If a line takes more than `seconds` of CPU time, a signal ends
the process. A signal needs no Python code to run, which a long multiplication would block.
"""

import contextlib
import functools
import json
import resource
import signal
import sys
from collections.abc import Sequence

import jinja2

from input_pipeline.chat.jinja import environment
from input_pipeline.chat.messages import ASSISTANT, KINDS, MarkedText, Message, document
from input_pipeline.chat.renderer import BAD, MADE, REFUSED
from input_pipeline.errors import BadDocument

MARK = "\ufdd0"  # a noncharacter code point that marks both ends of {% generation %} blocks
MEMORY_BYTES = 1 << 30
CHARACTERS = 1 << 24  # the limit for a template's output
ERROR_CHARACTERS = 300
RAISED = (  # by templates, and by what compiles them
    jinja2.TemplateError, ValueError, TypeError, ArithmeticError, LookupError, AttributeError, NameError, SyntaxError,
    AssertionError, RuntimeError, OSError, MemoryError,
)  # fmt: skip


class Rendering:
    """The format of a Jinja template, with the methods, arguments and errors of input_pipeline/chat/template.py."""

    def __init__(self, source: str, tokens: dict[str, str]):
        self._tokens = tokens
        try:
            self._template = environment(MARK).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ValueError(f"{_reason(error)} (line {error.lineno})") from None
        except RAISED as error:
            raise ValueError(_reason(error)) from None

    def pieces(self, messages: Sequence[Message], first: int = 0) -> list[MarkedText]:
        """Return the pieces of a conversation; what the assistant says is learned from message `first` on.

        With {% generation %} tags in the template and `first` 0, the text inside the tags is learned. Otherwise it is
        the text that the template adds for a turn after the turn's prompt, which needs a template that only appends.
        Raises ValueError if the template refuses the conversation, or has no tags and changes a turn when others
        follow.
        """
        marked = self._render(messages)
        if MARK in marked and not first:
            return [(text, bool(number % 2)) for number, text in enumerate(marked.split(MARK)) if text]
        whole = marked.replace(MARK, "")
        found, done = [], 0
        for number, message in enumerate(messages):
            if message["role"] != ASSISTANT or number < first:
                continue
            prompt = self._render(messages[:number], add_generation_prompt=True).replace(MARK, "")
            through = self._render(messages[: number + 1]).replace(MARK, "")
            if not (through.startswith(prompt) and whole.startswith(through)):
                raise ValueError(
                    f"it renders the first {number + 1} messages differently if more follow, or if the last one is "
                    "generated; put {% generation %} tags around the assistant's text in it"
                )
            found += [(whole[done : len(prompt)], False), (whole[len(prompt) : len(through)], True)]
            done = len(through)
        return [*found, (whole[done:], False)]

    def prompt(self, messages: Sequence[Message]) -> list[MarkedText]:
        """Return the pieces of a conversation that the assistant is to continue. Raises ValueError as `pieces`."""
        return [(self._render(messages, add_generation_prompt=True).replace(MARK, ""), False)]

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> str:
        if any(MARK in message["content"] for message in messages):
            raise ValueError("a message contains U+FDD0, which is not a character")
        try:
            text = self._template.render(
                messages=messages, add_generation_prompt=add_generation_prompt, tools=None, documents=None,
                **self._tokens,
            )  # fmt: skip
        except RAISED as error:
            raise ValueError(_reason(error)) from None
        if len(text) > CHARACTERS:
            raise ValueError(f"it renders {len(text):,} characters, more than {CHARACTERS:,}")
        return text


def _reason(error: BaseException) -> str:
    if isinstance(error, MemoryError):
        return f"it takes over {MEMORY_BYTES >> 20} MiB of memory"
    return " ".join(str(error)[:ERROR_CHARACTERS].split()) or type(error).__name__


@functools.lru_cache(4)
def _rendering(source: str, tokens: tuple[tuple[str, str], ...]) -> Rendering:
    return Rendering(source, dict(tokens))


def answer(request: dict, line: bytes) -> bytes:
    """Return the answer to one line of a request."""
    try:
        form = _rendering(request["template"], tuple(request["tokens"].items()))
        if request["task"] in KINDS:
            return MADE + document(request["task"], "", line, form)
        value = json.loads(line)
        made = {"check": lambda: None, "pieces": lambda: form.pieces(*value), "prompt": lambda: form.prompt(value)}
        return MADE + json.dumps(made[request["task"]]()).encode()
    except BadDocument as error:
        return BAD + json.dumps([error.kind, error.details]).encode()
    except ValueError as error:
        return REFUSED + json.dumps(str(error)).encode()
    except MemoryError as error:
        return REFUSED + json.dumps(_reason(error)).encode()


def main() -> None:
    """Answer requests until there are no more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is handled by the process that asks
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # it is inherited, and ignored in a process that has loaded libtpu
    for what, most in ((resource.RLIMIT_AS, MEMORY_BYTES), (resource.RLIMIT_FSIZE, 0), (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):  # macOS has no memory limit
            resource.setrlimit(what, (most, most))
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    while header := requests.readline():
        request = json.loads(header)
        lines = [requests.readline() for _ in range(request["count"])]
        for line in lines:
            signal.setitimer(signal.ITIMER_PROF, request["seconds"])
            answers.write(answer(request, line) + b"\n")
        signal.setitimer(signal.ITIMER_PROF, 0)
        answers.flush()


if __name__ == "__main__":
    main()
