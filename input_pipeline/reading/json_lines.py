# SPDX-License-Identifier: Apache-2.0
"""Parses a line of JSON to a record, and describes invalid records.

This file imports little, because the process of input_pipeline/chat/rendering.py imports it and must start fast.
"""

import json

from input_pipeline.errors import BadDocument

ADVICE = "; choose one with --config.data.field"  # if there are other columns or keys


def record_of(name: str, line: bytes | bytearray, path: object = ""):
    """Return the value of a line; a bytearray is emptied, because line, text and record together take too much memory.

    Raises BadDocument if the line is not JSON; `path` is that of its file.
    """
    try:
        return json.loads(_text(line))
    except UnicodeDecodeError as error:
        raise BadDocument(name, "not valid UTF-8", f" at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        is_json = str(path).lower().endswith(".json")
        whole = (
            "; each line must be an object; --config.data.source=text reads the whole file as text" if is_json else ""
        )
        raise BadDocument(name, "not JSON", f" at column {error.colno} ({error.msg}{whole})") from error
    except RecursionError as error:
        raise BadDocument(name, "not JSON", " (nested too deeply)") from error
    except ValueError as error:  # a number of thousands of digits
        raise BadDocument(name, "not JSON", f" ({error})") from error


def _text(line: bytes | bytearray) -> str:
    text = line.removesuffix(b"\n").decode("utf-8-sig") if isinstance(line, bytes) else _text_and_clear(line)
    return text.rstrip()


def _text_and_clear(line: bytearray) -> str:
    """Return the text of a line, and empty the line."""
    del line[len(line) - line.endswith(b"\n") :]
    text = line.decode("utf-8-sig")
    line.clear()
    return text


def shown(value) -> str:
    """Return a short text for a JSON value of the wrong kind, for a message."""
    if value and isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value)[:40]


def encoded(name: str, text: str) -> bytes:
    """Return text as UTF-8; BadDocument if it has an unpaired surrogate."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadDocument(name, "not valid UTF-8", f" ({error.reason}: an unpaired surrogate)") from error


def without_field(name: str, field: str, names, advice: str = ADVICE) -> BadDocument:
    """Return the error for a record without a field; it names the fields that exist."""
    there = ", ".join(repr(name[:40]) for name in sorted(names)[:8])
    found = f"it has {there}{advice}" if there else "it has no fields"
    return BadDocument(name, f"without field {field!r}", f" ({found})")
