# SPDX-License-Identifier: Apache-2.0
"""The user's own tasks: a JSON object per line, whose keys say how it is scored.

    {"question": "2 + 2 =", "choices": ["3", "4"], "answer": 1}
    {"prompt": "Q: What is 2 + 2?\\nA:", "exact": "4", "stop": ["\\n"], "max_tokens": 8}
    {"text": "A text whose perplexity is measured."}

Other keys are allowed and not read.
"""

import pathlib
from collections.abc import Iterable, Sequence
from typing import Annotated, NamedTuple, NotRequired

import pydantic

from configs.errors import ConfigError
from files.json_reader import JsonError, Object, parse_json
from files.paths import expanded

MOST_BYTES = 1 << 30  # of a file of questions
STOP = ("\n",)  # of an answer, unless the item says otherwise
Text = Annotated[str, pydantic.Field(min_length=1)]


class Choice(Object):
    """A multiple-choice question; `answer` is the index of the right choice, from 0."""

    question: str
    choices: Annotated[list[Text], pydantic.Field(min_length=2)]
    answer: Annotated[int, pydantic.Field(ge=0)]


class Exact(Object):
    """A prompt, and the text that the model should continue it with, up to one of the `stop` strings."""

    prompt: Text
    exact: Text
    stop: NotRequired[list[Text]]
    max_tokens: NotRequired[Annotated[int, pydantic.Field(ge=1, le=1_000_000)]]


class Plain(Object):
    """A text whose perplexity is measured."""

    text: Text


KINDS = {"choices": Choice, "exact": Exact, "text": Plain}  # by the key that determines the kind


class Item(NamedTuple):
    """A line of a file: the task it belongs to, its number from 1, its kind (a key of KINDS), and its content."""

    task: str
    line: int
    kind: str
    content: dict


def read_files(paths: Sequence[str], key: str, limit: int = 0) -> list[Item]:
    """Return the items of all files, of each file at most `limit`, 0 for all. A task is named like its file.

    Args:
      key: the flag or configuration key that names the files, for messages.

    Raises:
      ConfigError: a file cannot be read or has no items, or two files have the same name.
      JsonError: a line is not an item; the message has file and line.
    """
    items, named = [], {}
    for text in paths:
        path = expanded(text)
        if path.stem in named:
            raise ConfigError(f"{key}: {named[path.stem]} and {path} would both be the task {path.stem}; rename one")
        named[path.stem] = path
        try:
            with path.open("rb") as file:
                content = file.read(MOST_BYTES + 1)
        except OSError as error:
            raise ConfigError(f"{key}={path}: {error.strerror}; name a file with a JSON object per line") from None
        if len(content) > MOST_BYTES:
            raise ConfigError(f"{key}={path} is larger than {MOST_BYTES:,} bytes; split it")
        of_file = list(_items(path, content.split(b"\n")))
        if not of_file:
            raise ConfigError(f"{key}={path} has no items; give it a JSON object per line")
        items += of_file[: limit or None]
    return items


def _items(path: pathlib.Path, lines: Iterable[bytes]) -> Iterable[Item]:
    for number, line in enumerate(lines, start=1):
        if line.strip():
            source = f"{path}, line {number}"
            kind, content = item_of(line, source)
            yield Item(path.stem, number, kind, content)


def item_of(line: bytes, source: str) -> tuple[str, dict]:
    """Return the kind and the content of a line; JsonError if it is of no known kind."""
    keys = parse_json(line, Object, source)
    kind = next((kind for kind in KINDS if kind in keys), None)
    if kind is None:
        raise JsonError(f"{source}: has no key choices, exact or text; one of them says how an item is scored")
    content = parse_json(line, KINDS[kind], source)
    if kind == "choices" and content["answer"] >= len(content["choices"]):
        raise JsonError(
            f"{source}: answer={content['answer']} is not the index of one of the {len(content['choices'])} choices; "
            "the first has index 0"
        )
    if kind == "exact":
        for stop in content.get("stop", STOP):
            if stop in content["exact"].strip():
                raise JsonError(f"{source}: exact has {stop!r}, at which answers stop, so none is equal; give `stop`")
    return kind, content
