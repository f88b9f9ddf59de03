# SPDX-License-Identifier: Apache-2.0
"""Files of conversations, and of answers of which one is preferred: a JSON object per line, rendered as it is read.

What a line becomes, as a document, is JSON again: its sequences, one of a conversation and two of a preference, each
a list of pieces as input_pipeline/chat/template.py has them.
"""

import json
from pathlib import Path

from input_pipeline.chat.template import ASSISTANT, Message, Piece, PlainFormat, Template
from input_pipeline.documents import PIECE_BYTES
from input_pipeline.errors import BadDocument
from input_pipeline.formats import JsonLines, encoded, shown, without_field

ROLES = ("system", "user", ASSISTANT)
SAYS = "a message is {'role': 'user', 'content': '...'}"
SIDES = ("chosen", "rejected")


class Conversations(JsonLines):
    """{"messages": [{"role": "user", "content": "..."}, ...]} a line; of a message nothing else is read."""

    def __init__(self, path: Path | str, most_bytes: int, form: PlainFormat | Template):
        super().__init__(path, "messages", most_bytes)
        self._form = form

    def text(self, number: int, value: bytes) -> bytes:
        name, record = self.name(number), self.record(number, value)
        sequences = self._sequences(name, _object(name, record, self.field))
        document = encoded(name, json.dumps(sequences, ensure_ascii=False, separators=(",", ":")))
        if len(document) > PIECE_BYTES:  # a longer one would be tokenized in parts
            raise BadDocument(name, f"longer than {PIECE_BYTES >> 10} KiB", f" ({len(document):,} bytes)")
        return document

    def _sequences(self, name: str, record: dict) -> list[list[Piece]]:
        messages = _messages(name, record, "messages")
        if all(message["role"] != ASSISTANT for message in messages):
            raise BadDocument(name, "without an assistant's turn", " (there is nothing to learn in it)")
        return [self._pieces(name, messages)]

    def _pieces(self, name: str, messages: list[Message], first: int = 0) -> list[Piece]:
        try:
            return self._form.pieces(messages, first)
        except ValueError as error:
            raise BadDocument(name, "not what the chat template takes", f" ({error})") from error


class Preferences(Conversations):
    """{"prompt": ..., "chosen": ..., "rejected": ...} a line, all of them text or all lists of messages.

    Text goes as it is, a document of prompt and answer; messages go through the format of conversations.
    """

    def __init__(self, path: Path | str, most_bytes: int, form: PlainFormat | Template):
        super().__init__(path, most_bytes, form)
        self.field = "prompt"

    def _sequences(self, name: str, record: dict) -> list[list[Piece]]:
        for side in SIDES:
            _object(name, record, side)
        if record["chosen"] == record["rejected"]:
            raise BadDocument(name, "with one answer twice", " (what is chosen is what is rejected)")
        kinds = {type(record[key]) for key in ("prompt", *SIDES)}
        if kinds == {str}:
            return [self._of_text(name, record["prompt"], record[side]) for side in SIDES]
        if kinds != {list}:
            raise BadDocument(name, "neither text nor messages", " (prompt, chosen and rejected are all of one kind)")
        prompt = _messages(name, record, "prompt")
        return [self._answered(name, prompt, _messages(name, record, side)) for side in SIDES]

    def _of_text(self, name: str, prompt: str, answer: str) -> list[Piece]:
        if not answer:
            raise BadDocument(name, "with an empty answer")
        return [(None, False), (prompt, False), (answer, True), (None, True)]

    def _answered(self, name: str, prompt: list[Message], answer: list[Message]) -> list[Piece]:
        if answer[0]["role"] != ASSISTANT:
            raise BadDocument(name, "without an assistant's answer", f" (it begins with {answer[0]['role']!r})")
        return self._pieces(name, [*prompt, *answer], first=len(prompt))


def _object(name: str, record, field: str) -> dict:
    """Return a record if it is an object that has a field."""
    if not isinstance(record, dict) or field not in record:
        raise without_field(name, field, record if isinstance(record, dict) else (), advice="")
    return record


def _messages(name: str, record: dict, field: str) -> list[Message]:
    """Return the messages in a field of a record, role and content alone."""
    found = record[field]
    if not isinstance(found, list) or not found:
        raise BadDocument(name, f"without messages in {field!r}", f" ({shown(found)}; {SAYS})")
    return [_message(name, number, message) for number, message in enumerate(found, start=1)]


def _message(name: str, number: int, message) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        said = shown(message.get("role") if isinstance(message, dict) else message)
        raise BadDocument(name, "with an unknown role", f" (message {number}: {said}; roles are {', '.join(ROLES)})")
    content = message.get("content")
    if not isinstance(content, str):
        raise BadDocument(name, "with content that is no text", f" (message {number}: {shown(content)})")
    if not content and message["role"] == ASSISTANT:
        raise BadDocument(name, "with an empty answer", f" (message {number})")
    return {"role": message["role"], "content": content}
