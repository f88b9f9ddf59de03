# SPDX-License-Identifier: Apache-2.0
"""The endpoints of a language model: completions and chats, whole or as a stream."""

import asyncio
import dataclasses
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from inference.prompts import Prompt, chat_prompt, text_prompt, token_prompt
from input_pipeline.chat.template import PlainFormat, Template
from input_pipeline.errors import DataError
from input_pipeline.tokenization import AnyTokenizer
from serving.answers import Answer, ChatFormat, CompletionFormat, Format, Piece, collected, pieces, usage
from serving.bodies import read
from serving.errors import ApiError, gone
from serving.metrics import Metrics
from serving.requests import ChatRequest, CompletionRequest, Decoding
from serving.worker import Job, Worker

RETRY_SECONDS = 1  # for a client that found too many others
COMPLETION_TOKENS = 16  # where a completion names no number, as in the API


@dataclasses.dataclass(eq=False)
class Asked:
    """A request that was accepted: its prompts, and their answers in flight."""

    given: Decoding
    form: Format
    prompts: Sequence[Prompt]
    answers: Sequence[Answer]
    job: Job
    started: float


class TextService:
    """Decodes for clients.

    Attributes:
      abilities: what the model can be asked, for /v1/models.
    """

    def __init__(
        self, name: str, tokenizer: AnyTokenizer, form: PlainFormat | Template | None, start: Sequence[int],
        worker: Worker, max_waiting: int,
    ):  # fmt: skip
        """Serve a model under a name.

        Args:
          form: the format of its conversations, None if it has seen none.
          start: the tokens before a text, see inference/prompts.py.
        """
        self.name, self._tokenizer, self._form, self._start = name, tokenizer, form, start
        self._worker, self._max_waiting = worker, max_waiting
        self.abilities = ["completions", *(["chat"] if self._form else [])]
        self.max_length = worker.batch.length
        self.metrics = Metrics({
            "torus_rows": ("rows of the cache", lambda: worker.batch.num_rows),
            "torus_rows_used": ("rows that decode a request", lambda: len(worker.batch.running)),
            "torus_requests_in_flight": ("answers that decode or wait for a row", lambda: worker.in_flight),
            "torus_prompt_tokens_shared": (
                "tokens of prompts that were taken from another row since the start",
                lambda: worker.batch.num_shared_tokens,
            ),
        })  # fmt: skip

    def routes(self) -> list[Route]:
        """Return the endpoints."""
        return [
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    @property
    def has_failed(self) -> bool:
        """Whether no request can be answered any more."""
        return self._worker.has_failed

    def end_requests(self) -> None:
        """End all requests with an error, because the server ends."""
        self._worker.end_requests()

    def stop(self) -> None:
        """End the thread after its current step; raise the error that it has met."""
        self._worker.stop()

    async def complete(self, request: Request) -> Response:
        """Continue texts."""
        started, given = time.monotonic(), await read(request, CompletionRequest, self.name)
        texts = _several(given.prompt)
        self._check_room(len(texts) * given.num_choices)  # before they are encoded, which takes time
        prompts = await asyncio.to_thread(lambda: [self._text_prompt(text) for text in texts])
        form = CompletionFormat(self.name, self._tokenizer, given.logprobs)
        asked = self._accept(given, form, prompts, given.max_tokens or COMPLETION_TOKENS, "prompt", started)
        return await self._respond(request, asked)

    async def chat(self, request: Request) -> Response:
        """Answer a conversation."""
        started, given = time.monotonic(), await read(request, ChatRequest, self.name)
        if self._form is None:
            raise ApiError(
                400, f"{self.name} was not trained on conversations, and its tokenizer has no chat template; "
                "use /v1/completions", code="model_not_supported",
            )  # fmt: skip
        if given.top_logprobs and not given.logprobs:
            raise ApiError(400, "top_logprobs needs logprobs to be true", param="top_logprobs")
        self._check_room(given.num_choices)
        prompt = await asyncio.to_thread(self._chat_prompt, given)
        form = ChatFormat(self.name, self._tokenizer, (given.top_logprobs or 0) if given.logprobs else None)
        limit = given.max_completion_tokens or given.max_tokens
        return await self._respond(request, self._accept(given, form, [prompt], limit, "messages", started))

    def _text_prompt(self, prompt: str | list[int]) -> Prompt:
        try:
            if isinstance(prompt, str):
                made = text_prompt(self._tokenizer, prompt, self._start, longest=self.max_length)
            else:
                made = token_prompt(self._tokenizer, prompt, longest=self.max_length)
            return self._checked(made, "prompt")
        except DataError as error:
            raise ApiError(400, f"the tokenizer of {self.name} refuses the prompt ({error})", param="prompt") from None

    def _checked(self, prompt: Prompt, param: str) -> Prompt:
        """Return the prompt; ApiError if it has a token that the model does not have."""
        vocab_size = self._worker.batch.vocab_size
        if max(prompt.tokens) >= vocab_size:
            message = f"the prompt has the token {max(prompt.tokens)}; ids are less than {vocab_size}"
            raise ApiError(400, message, param=param)
        return prompt

    def _chat_prompt(self, given: ChatRequest) -> Prompt:
        try:
            messages = [message.plain() for message in given.messages]
            return self._checked(chat_prompt(self._tokenizer, self._form, messages), "messages")
        except DataError as error:
            raise ApiError(400, f"the messages cannot be encoded ({error})", param="messages") from None
        except ValueError as error:
            raise ApiError(
                400, f"the chat template of {self.name} refuses the messages ({error})", param="messages"
            ) from None

    def _accept(
        self, given: Decoding, form: Format, prompts: Sequence[Prompt], limit: int | None, param: str, started: float
    ) -> Asked:
        """Queue the requests of a client; ApiError if they do not fit in a row or in the queue."""
        requests, owners = [], [prompt for prompt in prompts for _ in range(given.num_choices)]
        how = given.sampling()
        self._check_bias(how.logit_bias)
        for index, prompt in enumerate(owners):
            max_tokens = self._max_tokens(prompt, limit, param)
            sampling = dataclasses.replace(how, seed=how.seed + index)
            requests.append(prompt.request(max_tokens, sampling, wants_top=bool(form.num_top)))
        self._check_room(len(requests))
        answers = [Answer(index, prompt, self._tokenizer, given.stops) for index, prompt in enumerate(owners)]
        return Asked(given, form, prompts, answers, Job(self._worker, requests), started)

    def _max_tokens(self, prompt: Prompt, limit: int | None, param: str) -> int:
        """Return the most tokens of an answer: `limit`, or as many as fit."""
        asked, left = prompt.num_tokens, self.max_length - prompt.num_tokens
        if left < (limit or 1):
            total, advice = asked + (limit or 1), f"use max_tokens of at most {left}" if left > 0 else ""
            raise ApiError(
                400, f"the prompt has {asked} tokens and the answer up to {limit or 1}: together {total}, which is "
                f"{total - self.max_length} more than the {self.max_length} tokens that {self.name} is served with; "
                + (advice or "shorten the prompt"), param=param, code="context_length_exceeded",
            )  # fmt: skip
        return limit or left

    def _check_bias(self, bias: dict[int, float]) -> None:
        vocab_size = self._worker.batch.vocab_size
        if unknown := [token for token in bias if not 0 <= token < vocab_size]:
            message = f"logit_bias has the token {unknown[0]}; ids are from 0 to {vocab_size - 1}"
            raise ApiError(400, message, param="logit_bias")

    def _check_room(self, count: int) -> None:
        """Raise ApiError if too many requests would wait for a row."""
        room = self._worker.batch.num_rows + self._max_waiting
        if count > room:
            raise ApiError(400, f"the request asks for {count} answers; at most {room} decode or wait here", param="n")
        if self._worker.in_flight + count > room:
            raise ApiError(
                429, f"{self._worker.in_flight} answers decode or wait already; try again later", code="busy",
                headers={"Retry-After": str(RETRY_SECONDS)},
            )  # fmt: skip

    async def _respond(self, request: Request, asked: Asked) -> Response:
        if asked.given.stream:
            return EventStream(self._events(asked), asked.job)
        try:
            whole = collected(self._pieces(asked), len(asked.answers), with_drawn=asked.form.num_top is not None)
            found = await unless_disconnected(request, whole)
        finally:
            asked.job.close()
        choices = [asked.form.choice(piece) for piece in found]
        content = asked.form.head() | {"object": asked.form.whole, "choices": choices}
        return JSONResponse(content | {"usage": usage(asked.prompts, asked.answers)})

    async def _events(self, asked: Asked) -> AsyncIterator[str]:
        """Yield the answer as server-sent events."""
        head = asked.form.head() | {"object": asked.form.part}
        head |= {"usage": None} if asked.given.wants_usage else {}
        begun = set()
        try:
            async for piece in self._pieces(asked):
                for choice in asked.form.chunks(piece, piece.index not in begun):
                    yield event(head | {"choices": [choice]})
                begun.add(piece.index)
        except ApiError as error:
            yield event(error.content())
            return
        if asked.given.wants_usage:
            yield event(head | {"choices": [], "usage": usage(asked.prompts, asked.answers)})
        yield "data: [DONE]\n\n"

    async def _pieces(self, asked: Asked) -> AsyncIterator[Piece]:
        """Yield the parts of the answers; count tokens and seconds."""
        is_first = True
        async for piece in pieces(asked.job, asked.answers):
            if is_first:
                self.metrics.first_token.observe(time.monotonic() - asked.started)
                is_first = False
            yield piece
        self.metrics.duration.observe(time.monotonic() - asked.started)
        counts = usage(asked.prompts, asked.answers)
        self.metrics.prompt_tokens.inc(counts["prompt_tokens"])
        self.metrics.completion_tokens.inc(counts["completion_tokens"])


class EventStream(StreamingResponse):
    """A stream of events that ends its job with it, also when the client disconnects."""

    def __init__(self, events: AsyncIterator[str], job: Job):
        super().__init__(events, media_type="text/event-stream", headers={"Cache-Control": "no-store"})
        self._job = job

    async def __call__(self, scope, receive, send) -> None:
        try:
            async with aclosing(self.body_iterator):
                await super().__call__(scope, receive, send)
        finally:
            self._job.close()


def _several(prompt: str | list) -> list[str] | list[list[int]]:
    """Return the prompts of a completion as a list; a request may have a single one."""
    return prompt if isinstance(prompt, list) and not isinstance(prompt[0], int) else [prompt]


def event(content: dict) -> str:
    """Return a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"


async def unless_disconnected(request: Request, work):
    """Return what a coroutine returns; cancel it when the client disconnects, and raise ApiError."""
    found, left = asyncio.ensure_future(work), asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({found, left}, return_when=asyncio.FIRST_COMPLETED)
        if not found.done():
            raise gone()
        return found.result()
    finally:
        found.cancel()
        left.cancel()


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
