# SPDX-License-Identifier: Apache-2.0
"""Answers of the API: continuations of a batch as text, in the formats of completions and of chats."""

import dataclasses
import math
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

from inference.prompts import Prompt
from inference.text_stream import REPLACEMENT
from input_pipeline.tokenization import AnyTokenizer
from serving.worker import Job, Update

PART = "token_id:"  # with its number, the text of a token that is a part of a character
LEAST_LOG_PROB = -9999.0  # in place of -inf, which JSON does not have
REASONS = {"end": "stop", "length": "length"}


class Drawn(NamedTuple):
    """A token, its log-probability, those of the likeliest tokens, and the characters of the answer before it."""

    token: int
    log_prob: float
    top: dict[int, float]
    offset: int


class Piece(NamedTuple):
    """The next part of the answer `index`: text, the tokens since the last part, and why it ended, or ""."""

    index: int
    text: str
    drawn: list[Drawn]
    reason: str


class Answer:
    """One answer while it is decoded.

    Attributes:
      num_tokens: drawn so far, with those of a stop string; a token that the prompt ends with does not count.
    """

    def __init__(self, index: int, prompt: Prompt, tokenizer: AnyTokenizer, stops: Sequence[str]):
        self.index, self.num_tokens, self._length = index, 0, 0
        self._text, self._drawn, self._redrawn = prompt.text(tokenizer, stops), [], prompt.redrawn

    def take(self, update: Update) -> Piece:
        """Return what an update adds; without text if a character or a stop string may go on."""
        text = ""
        tops = update.tops or [{}] * len(update.tokens)
        for token, log_prob, top in zip(update.tokens, update.log_probs, tops, strict=True):
            if token != self._redrawn:
                self.num_tokens += 1
                self._drawn.append(Drawn(token, log_prob, top, self._length + len(text) + self._text.num_held))
            self._redrawn = None  # it concerns the first token alone
            text += self._text.add(token)
            if self._text.stopped:
                break
        if update.reason:
            text += self._text.end()
        reason = "stop" if self._text.stopped else REASONS.get(update.reason, "")
        drawn, self._drawn = (self._drawn, []) if text or reason else ([], self._drawn)
        self._length += len(text)
        return Piece(self.index, text, drawn, reason)


async def pieces(job: Job, answers: Sequence[Answer]) -> AsyncIterator[Piece]:
    """Yield the parts of all answers as they come; an answer that met a stop string frees its row."""
    left = len(answers)
    while left:
        update = await job.next()
        piece = answers[update.index].take(update)
        if piece.reason:
            job.cancel(update.index)
            left -= 1
        if piece.text or piece.reason:
            yield piece


async def collected(parts: AsyncIterator[Piece], count: int, *, with_drawn: bool) -> list[Piece]:
    """Return each of `count` answers as one piece, with its tokens only if they are asked for."""
    texts, drawn, reasons = [[] for _ in range(count)], [[] for _ in range(count)], [""] * count
    async for piece in parts:
        texts[piece.index].append(piece.text)
        drawn[piece.index] += piece.drawn if with_drawn else []
        reasons[piece.index] = piece.reason
    return [Piece(index, "".join(texts[index]), drawn[index], reasons[index]) for index in range(count)]


@dataclasses.dataclass(frozen=True, eq=False)
class Format:
    """What completions and chats have in common.

    Attributes:
      model: its name.
      num_top: likeliest tokens to report; None: no log-probabilities at all.
    """

    model: str
    tokenizer: AnyTokenizer
    num_top: int | None
    prefix, whole, part = "", "", ""

    def head(self) -> dict:
        """Return the fields that all parts of an answer share."""
        return {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": self.model}

    def token_text(self, token: int) -> str:
        """Return the text of a token inside a text; of a part of a character, its id."""
        before = self.tokenizer.encode("a")  # some tokenizers drop the space of the first token
        text = self.tokenizer.decode([*before, token])[len(self.tokenizer.decode(before)) :]
        return f"{PART}{token}" if REPLACEMENT in text else text

    def top(self, drawn: Drawn) -> list[tuple[str, float]]:
        """Return (text, log-probability) of the likeliest tokens that are to be reported, and of the drawn one."""
        likeliest = sorted(drawn.top.items(), key=lambda item: -item[1])[: self.num_top or 0]
        if self.num_top and drawn.token not in dict(likeliest):
            likeliest.append((drawn.token, drawn.log_prob))
        return [(self.token_text(token), finite(log_prob)) for token, log_prob in likeliest]


class CompletionFormat(Format):
    """The format of POST /v1/completions."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def choice(self, piece: Piece) -> dict:
        """Return a whole answer."""
        return {
            "index": piece.index, "text": piece.text, "logprobs": self._log_probs(piece),
            "finish_reason": piece.reason or None,
        }  # fmt: skip

    def chunks(self, piece: Piece, is_first: bool) -> list[dict]:
        """Return a part of an answer in a stream."""
        return [self.choice(piece)]

    def _log_probs(self, piece: Piece) -> dict | None:
        if self.num_top is None:
            return None
        return {
            "tokens": [self.token_text(drawn.token) for drawn in piece.drawn],
            "token_logprobs": [finite(drawn.log_prob) for drawn in piece.drawn],
            "top_logprobs": [self._by_text(drawn) for drawn in piece.drawn] if self.num_top else None,
            "text_offset": [drawn.offset for drawn in piece.drawn],
        }

    def _by_text(self, drawn: Drawn) -> dict[str, float]:
        """Return the log-probabilities by text; of tokens with the same text, that of the likeliest."""
        found: dict[str, float] = {}
        for text, log_prob in self.top(drawn):
            found.setdefault(text, log_prob)
        return found


class ChatFormat(Format):
    """The format of POST /v1/chat/completions."""

    prefix, whole, part = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def choice(self, piece: Piece) -> dict:
        """Return a whole answer."""
        return {
            "index": piece.index, "message": {"role": "assistant", "content": piece.text, "refusal": None},
            "logprobs": self._log_probs(piece), "finish_reason": piece.reason or None,
        }  # fmt: skip

    def chunks(self, piece: Piece, is_first: bool) -> list[dict]:
        """Return a part of an answer in a stream: the first names the role, and the last has the reason alone."""
        deltas = [({"role": "assistant", "content": ""}, None, None)] if is_first else []
        if piece.text or piece.drawn:
            deltas.append(({"content": piece.text}, self._log_probs(piece), None))
        if piece.reason:
            deltas.append(({}, None, piece.reason))
        return [
            {"index": piece.index, "delta": delta, "logprobs": log_probs, "finish_reason": reason}
            for delta, log_probs, reason in deltas
        ]

    def _log_probs(self, piece: Piece) -> dict | None:
        if self.num_top is None:
            return None
        content = [
            self._entry(self.token_text(drawn.token), finite(drawn.log_prob))
            | {"top_logprobs": [self._entry(*one) for one in self.top(drawn)]}
            for drawn in piece.drawn
        ]
        return {"content": content, "refusal": None}

    def _entry(self, text: str, log_prob: float) -> dict:
        return {"token": text, "logprob": log_prob, "bytes": None if text.startswith(PART) else list(text.encode())}


def finite(log_prob: float) -> float:
    """Return a log-probability that JSON can have."""
    return log_prob if math.isfinite(log_prob) else LEAST_LOG_PROB


def usage(prompts: Sequence[Prompt], answers: Sequence[Answer]) -> dict:
    """Return the numbers of tokens; a prompt counts once, however many answers it has."""
    asked, said = sum(prompt.num_tokens for prompt in prompts), sum(answer.num_tokens for answer in answers)
    return {"prompt_tokens": asked, "completion_tokens": said, "total_tokens": asked + said}
