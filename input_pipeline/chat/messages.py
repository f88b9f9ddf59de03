# SPDX-License-Identifier: Apache-2.0
"""Converts a line of JSON with a conversation, or with a preference between two answers, to a document.

The document is JSON too: a list of sequences, one for a conversation and two for a preference. Each is a list of pieces
as in input_pipeline/chat/template.py. A `form` converts messages to pieces; it is defined there or in rendering.py.
"""

import json

from input_pipeline.errors import BadDocument
from input_pipeline.reading.json_lines import encoded, record_of, shown, without_field

ASSISTANT = "assistant"
ROLES = ("system", "user", ASSISTANT)
REJECTED = "rejected by the chat template"
SAYS = "a message is {'role': 'user', 'content': '...'}"
SIDES = ("chosen", "rejected")

Message = dict[str, str]  # "role" and "content"
MarkedText = tuple[str | None, bool]  # a text, None for an end of document, and whether it is learned


def document(kind: str, name: str, line: bytes, form) -> bytes:
    """Return the document in a line, `kind` being one of KINDS; BadDocument, with `name`, if the line is invalid."""
    sequences = KINDS[kind](name, record_of(name, line), form)
    if not all(any(text for text, _ in pieces) for pieces in sequences):
        raise BadDocument(name, "without text", " (its chat template leaves nothing of it)")
    return encoded(name, json.dumps(sequences, ensure_ascii=False, separators=(",", ":")))


def _conversation(name: str, record, form) -> list[list[MarkedText]]:
    """Convert {"messages": [{"role": "user", "content": "..."}, ...]}; other keys of a message are ignored."""
    messages = _messages(name, _object(name, record, "messages"), "messages")
    if all(message["role"] != ASSISTANT for message in messages):
        raise BadDocument(name, "without an assistant's turn", " (there is nothing to learn from it)")
    return [_pieces(name, form, messages)]


def _preference(name: str, record, form) -> list[list[MarkedText]]:
    """Convert {"prompt": ..., "chosen": ..., "rejected": ...}, all of them text or all lists of messages.

    Texts become a document of prompt and answer, unchanged. Messages are converted as those of conversations.
    """
    for key in ("prompt", *SIDES):
        _object(name, record, key)
    if record["chosen"] == record["rejected"]:
        raise BadDocument(name, "with the same answer twice", " (chosen and rejected are equal)")
    kinds = {type(record[key]) for key in ("prompt", *SIDES)}
    if kinds == {str}:
        return [_of_text(name, record["prompt"], record[side]) for side in SIDES]
    if kinds != {list}:
        raise BadDocument(name, "neither all text nor all messages", " (the three must be of one kind)")
    prompt = _messages(name, record, "prompt")
    return [_answered(name, form, prompt, _messages(name, record, side)) for side in SIDES]


KINDS = {"chat": _conversation, "preferences": _preference}  # by data.source


def _pieces(name: str, form, messages: list[Message], first: int = 0) -> list[MarkedText]:
    try:
        return form.pieces(messages, first)
    except ValueError as error:
        raise BadDocument(name, REJECTED, f" ({error})") from error


def _of_text(name: str, prompt: str, answer: str) -> list[MarkedText]:
    if not answer:
        raise BadDocument(name, "with an empty answer")
    return [(None, False), (prompt, False), (answer, True), (None, True)]


def _answered(name: str, form, prompt: list[Message], answer: list[Message]) -> list[MarkedText]:
    if answer[0]["role"] != ASSISTANT:
        raise BadDocument(name, "without an assistant's answer", f" (it begins with {answer[0]['role']!r})")
    return _pieces(name, form, [*prompt, *answer], first=len(prompt))


def _object(name: str, record, field: str) -> dict:
    """Return a record if it is an object that has a field."""
    if not isinstance(record, dict):
        raise BadDocument(name, "not an object", f" ({shown(record)}; each line must be an object with {field!r})")
    if field not in record:
        raise without_field(name, field, record, advice="")
    return record


def _messages(name: str, record: dict, field: str) -> list[Message]:
    """Return the messages in a field of a record, with only role and content."""
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
        raise BadDocument(name, "with content that is not text", f" (message {number}: {shown(content)})")
    if not content and message["role"] == ASSISTANT:
        raise BadDocument(name, "with an empty answer", f" (message {number})")
    return {"role": message["role"], "content": content}
