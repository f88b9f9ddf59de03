# SPDX-License-Identifier: Apache-2.0
"""Renders conversations as text, and marks the text of the assistant.

A conversation, or its beginning, becomes a list of pieces (text, whether it is learned); the text None stands for the
token that ends documents. A tokenizer's own template is Jinja, rendered as `transformers` does, in a sandbox that only
computes text. It runs in a separate process with limited time and memory. Without a template the format is plain: an
end of document, then each turn as "ROLE\\nCONTENT" and an end of document. The assistant's CONTENT and its end of
document are learned.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing

from input_pipeline.cache import digest
from input_pipeline.chat import messages as chat_messages
from input_pipeline.chat.messages import ASSISTANT, REJECTED, MarkedText, Message
from input_pipeline.chat.renderer import BAD, MADE, Died, ask
from input_pipeline.errors import BadDocument, DataError
from input_pipeline.reading.records import TOO_LARGE, UNREADABLE
from input_pipeline.threads import in_threads

TOGETHER, TOGETHER_BYTES = 64, 1 << 20  # lines that are rendered by one request
PROCESSES = 2  # that render ahead
MOST_DEATHS = 10  # lines that end the process before the template is rejected

LineContent = bytes | bytearray | BadDocument | object  # a line, its document, the error in its place, or TOO_LARGE
NumberedLine = tuple[int, LineContent]  # the number of a line and its content; a BadDocument here has no name
Batch = list[NumberedLine] | Exception  # or the error with which the file ends


class PlainFormat:
    """The format of tokenizers without a template."""

    def pieces(self, messages: Sequence[Message], first: int = 0) -> list[MarkedText]:
        """Return the pieces of a conversation; what the assistant says is learned from message `first` on."""
        found: list[MarkedText] = [(None, False)]
        for number, message in enumerate(messages):
            learned = message["role"] == ASSISTANT and number >= first
            found += [(f"{message['role']}\n", False), (message["content"], learned), (None, learned)]
        return found

    def prompt(self, messages: Sequence[Message]) -> list[MarkedText]:
        """Return the pieces of a conversation that the assistant is to continue."""
        return [*self.pieces(messages, first=len(messages)), (f"{ASSISTANT}\n", False)]

    def after_answer(self) -> str:
        """Return the text that follows an answer: none, but an end of document."""
        return ""

    def documents(self, kind: str, lines: Iterable[NumberedLine]) -> Iterator[NumberedLine]:
        """Yield the result of each line, of a kind of input_pipeline/chat/messages.py."""
        for number, line in lines:
            yield number, line if line is TOO_LARGE else self._document(kind, line)

    def _document(self, kind: str, line: bytes) -> bytes | BadDocument:
        try:
            return chat_messages.document(kind, "", line, self)
        except BadDocument as error:
            return error


class Template:
    """The format of a Jinja template. Raises ValueError if it is not a valid one, or takes too long to parse.

    Args:
        source: the template.
        tokens: {name of a special token in the template (bos_token, eos_token, ...): its text}.
    """

    def __init__(self, source: str, tokens: dict[str, str]):
        self._request = {"template": source, "tokens": tokens}
        self._deadly: dict[str, BadDocument] = {}  # by the digest of a line that ended the process
        self._ask("check", None)

    def pieces(self, messages: Sequence[Message], first: int = 0) -> list[MarkedText]:
        """Return the pieces as `Rendering.pieces` does. Raises ValueError also if it takes too much time or memory."""
        return [tuple(piece) for piece in self._ask("pieces", [messages, first])]

    def prompt(self, messages: Sequence[Message]) -> list[MarkedText]:
        """Return the pieces of a conversation that the assistant is to continue. Raises ValueError as `pieces`."""
        return [tuple(piece) for piece in self._ask("prompt", messages)]

    def after_answer(self) -> str:
        """Return the text that follows an answer, such as the token that ends a turn. Raises ValueError as `prompt`."""
        turns = [{"role": role, "content": "@"} for role in ("user", ASSISTANT)]
        try:
            text = next((text for text, learned in self.pieces(turns) if learned), "")
        except ValueError:  # it stores a turn in another way than it is generated: without its thoughts, for example
            ((text, _),) = self.prompt(turns)
        return text.rpartition("@")[2]

    def documents(self, kind: str, lines: Iterable[NumberedLine]) -> Iterator[NumberedLine]:
        """Yield the result of each line; later lines are rendered while earlier results are used.

        Raises DataError if the template takes too much time or memory for too many lines.
        """
        known = ((number, self._known(line)) for number, line in lines)
        rendered = in_threads(lambda batch: self._rendered(kind, batch), _batches(known), PROCESSES)
        with closing(rendered):
            for made in rendered:
                if isinstance(made, UNREADABLE):
                    raise made
                yield from made

    def _known(self, line: LineContent) -> LineContent:
        """Return a line, or its known error: a file is read several times."""
        return self._deadly.get(digest(line.rstrip(b"\n")), line) if self._deadly and _is_line(line) else line

    def _rendered(self, kind: str, batch: Batch) -> list[NumberedLine] | Exception:
        """Return the results of the lines of a batch."""
        if isinstance(batch, UNREADABLE):
            return batch
        lines = [line.rstrip(b"\n") for _, line in batch if _is_line(line)]
        try:
            found = [_document(answer) for answer in ask(self._request | {"task": kind}, lines)]
        except Died:  # any of the lines may be the cause
            found = [self._alone(kind, line) for line in lines]
        rest = iter(found)
        return [(number, next(rest) if _is_line(line) else line) for number, line in batch]

    def _alone(self, kind: str, line: bytes) -> bytes | BadDocument:
        try:
            (answer,) = ask(self._request | {"task": kind}, [line])
        except Died as error:
            bad = BadDocument("", REJECTED, f" ({error})")
            self._deadly[digest(line)] = bad
            if len(self._deadly) >= MOST_DEATHS:
                raise DataError(
                    f"the chat template of data.tokenizer: {error}, for {MOST_DEATHS} lines; fix it"
                ) from None
            return bad
        return _document(answer)

    def _ask(self, task: str, value):
        try:
            (answer,) = ask(self._request | {"task": task}, [json.dumps(value).encode()])
        except Died as error:
            raise ValueError(str(error)) from None
        content = json.loads(answer[1:])
        if answer[:1] == MADE:
            return content
        raise ValueError(content)


def _is_line(content: LineContent) -> bool:
    return isinstance(content, bytes | bytearray)


def _document(answer: bytes) -> bytes | BadDocument:
    content = answer[1:]
    if answer[:1] == MADE:
        return content
    kind, details = json.loads(content) if answer[:1] == BAD else (REJECTED, f" ({json.loads(content)})")
    return BadDocument("", kind, details)


def _batches(lines: Iterable[NumberedLine]) -> Iterator[Batch]:
    """Yield lines in batches; an error of the file comes last, after the lines before it."""
    batch, size = [], 0
    try:
        for number, line in lines:
            batch.append((number, line))
            size += len(line) if _is_line(line) else 0
            if len(batch) == TOGETHER or size > TOGETHER_BYTES:
                yield batch
                batch, size = [], 0
        yield batch
    except UNREADABLE as error:
        yield batch
        yield error
