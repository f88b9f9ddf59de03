# SPDX-License-Identifier: Apache-2.0
"""A line of JSON as a record, and what is said of one that is none.

It imports little, since input_pipeline/chat/rendering.py does too, whose process is to start at once.
"""

import json

from input_pipeline.errors import BadDocument

ADVICE = ": --config.data.field names it"  # where there is another column or key


def record_of(name: str, line: bytes | bytearray, path: object = ""):
    """Return what a line holds; a bytearray is empty afterwards, since line, text and record are too much to hold.

    Raises BadDocument where it is not JSON; `path` is that of its file.
    """
    try:
        return json.loads(_text(line))
    except UnicodeDecodeError as error:
        raise BadDocument(name, "not valid UTF-8", f" at byte {error.start} of the line") from error
    except json.JSONDecodeError as error:
        is_json = str(path).lower().endswith(".json")
        whole = ", and --config.data.source=text reads the file as it is" if is_json else ""
        raise BadDocument(name, "not JSON", f" at column {error.colno} ({error.msg}{whole})") from error
    except RecursionError as error:
        raise BadDocument(name, "not JSON", " (nested too deeply)") from error
    except ValueError as error:  # a number of thousands of digits
        raise BadDocument(name, "not JSON", f" ({error})") from error


def _text(line: bytes | bytearray) -> str:
    text = line.removesuffix(b"\n").decode("utf-8-sig") if isinstance(line, bytes) else _moved(line)
    return text.rstrip() if text[-1:].isspace() else text


def _moved(line: bytearray) -> str:
    """Return the text of a line, and empty the line."""
    del line[len(line) - line.endswith(b"\n") :]
    text = line.decode("utf-8-sig")
    line.clear()
    return text


def shown(value) -> str:
    """Return a value of JSON that is not what it should be for a message: short, however long or deep it is."""
    if value and isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value)[:40]


def encoded(name: str, text: str) -> bytes:
    """Return text as UTF-8. Raises BadDocument where it cannot be that."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise BadDocument(name, "not valid UTF-8", f" ({error.reason}: half of a \\u pair)") from error


def without_field(name: str, field: str, names, advice: str = ADVICE) -> BadDocument:
    """Return what to say of a record that lacks a field and has others."""
    there = ", ".join(repr(name[:40]) for name in sorted(names)[:8])
    return BadDocument(name, f"without field {field!r}", f" (there is {there}{advice})" if there else " (it has none)")
