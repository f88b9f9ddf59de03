# SPDX-License-Identifier: Apache-2.0
"""Reads files of conversations, or of preferences between two answers: a JSON object per line, rendered on reading."""

from collections.abc import Iterator
from pathlib import Path

from input_pipeline.chat.template import NumberedLine, PlainFormat, Template
from input_pipeline.errors import BadDocument
from input_pipeline.reading.documents import PIECE_BYTES
from input_pipeline.reading.formats import JsonLines


class Rendered(JsonLines):
    """A file with lines of a kind of input_pipeline/chat/messages.py; each line becomes a document in a format."""

    def __init__(self, path: Path | str, most_bytes: int, kind: str, form: PlainFormat | Template):
        super().__init__(path, "messages", most_bytes)
        self._kind, self._form = kind, form

    def values(self) -> Iterator[NumberedLine]:
        return self._form.documents(self._kind, super().values())

    def text(self, number: int, value: bytes | BadDocument) -> bytes:
        name = self.name(number)
        if isinstance(value, BadDocument):
            raise BadDocument(name, value.kind, value.details)
        if len(value) > PIECE_BYTES:  # a longer one would be tokenized in parts
            raise BadDocument(name, f"longer than {PIECE_BYTES >> 10} KiB", f" ({len(value):,} bytes)")
        return value
