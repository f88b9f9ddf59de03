# SPDX-License-Identifier: Apache-2.0
"""Requests of the API: which parameters they have, with their types, ranges and defaults."""

import secrets
from typing import Annotated, Any, Literal

import pydantic
from pydantic import Field
from pydantic_core import PydanticCustomError

from inference.choice import NUM_TOP, Sampling
from serving.errors import NOT_SUPPORTED

MOST_ENTRIES = 1024  # of logit_bias, and of metadata
# Parameters of the API that this server does not have, with values that ask for nothing.
WITHOUT_EFFECT = {
    "presence_penalty": (0, None), "frequency_penalty": (0, None), "best_of": (1, None), "echo": (False, None),
    "suffix": ("", None), "tools": ([], None), "tool_choice": ("none", "auto", None), "store": (False, None),
    "response_format": ({"type": "text"}, None), "service_tier": ("auto", "default", None),
    "parallel_tool_calls": (True, False, None),
}  # fmt: skip
Stop = Annotated[str, Field(min_length=1, max_length=1024)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Positive = Annotated[int, Field(ge=1, lt=1 << 31)]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, fail_fast=True)]
Prompts = Annotated[list[str], Field(min_length=1, max_length=128)]
TokenPrompts = Annotated[list[TokenIds], Field(min_length=1, max_length=128)]
TokenId = Annotated[int, Field(strict=False)]  # a key of JSON, which is a string
Bias = Annotated[float, Field(ge=-100, le=100)]


def _few(given: Any) -> Any:
    """Refuse an object with too many entries before its values are read: each value might be an error."""
    if isinstance(given, dict) and len(given) > MOST_ENTRIES:
        raise PydanticCustomError("too_long", "should have at most {most} entries", {"most": MOST_ENTRIES})
    return given


Few = pydantic.BeforeValidator(_few)


class Parameters(pydantic.BaseModel):
    """An object whose keys are all known."""

    model_config = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    @pydantic.model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, given: Any) -> Any:
        """Keep only the first unknown key, since each is an error."""
        if not isinstance(given, dict):
            return given
        unknown = next((name for name in given if name not in cls.model_fields), None)
        return {name: value for name, value in given.items() if name in cls.model_fields or name == unknown}


class StreamOptions(Parameters):
    """What a stream has in addition to the answer."""

    include_usage: bool = False
    include_obfuscation: Literal[False] | None = None


class Decoding(Parameters):
    """The parameters that completions and chats have in common."""

    model: str | None = None
    max_tokens: Positive | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Fraction | None = None
    top_k: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    min_p: Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    logit_bias: Annotated[dict[TokenId, Bias] | None, Few] = None
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None  # who asks, which this server does not need to know
    metadata: Annotated[dict[str, str] | None, Few] = None  # as `user`

    @pydantic.model_validator(mode="before")
    @classmethod
    def _without_effect(cls, given: Any) -> Any:
        """Drop parameters that ask for nothing; refuse those that ask for what is missing here."""
        if not isinstance(given, dict):
            return given
        for name in given.keys() & WITHOUT_EFFECT.keys():
            if given[name] not in WITHOUT_EFFECT[name]:
                raise PydanticCustomError(
                    NOT_SUPPORTED, "{name} is not supported by this server; leave it out", {"name": name}
                )
        return {name: value for name, value in given.items() if name not in WITHOUT_EFFECT}

    @property
    def stops(self) -> list[str]:
        """The stop strings."""
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def num_choices(self) -> int:
        """Answers to each prompt."""
        return self.n or 1

    @property
    def wants_usage(self) -> bool:
        """Whether a stream ends with the numbers of tokens."""
        return bool(self.stream_options and self.stream_options.include_usage)

    def sampling(self) -> Sampling:
        """Return how the first answer is drawn; without a seed, by a random one."""
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "logit_bias")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        return Sampling(**given, seed=secrets.randbits(31) if self.seed is None else self.seed)


class CompletionRequest(Decoding):
    """POST /v1/completions."""

    prompt: str | Prompts | TokenIds | TokenPrompts
    logprobs: Annotated[int, Field(ge=0, le=NUM_TOP)] | None = None


class TextPart(pydantic.BaseModel):
    """A part of a message."""

    model_config = pydantic.ConfigDict(strict=True)
    type: Literal["text"]
    text: str


class Message(pydantic.BaseModel):
    """A turn of a conversation; clients send other keys of earlier answers too, which are ignored."""

    model_config = pydantic.ConfigDict(strict=True)
    role: Literal["system", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(fail_fast=True)]

    def plain(self) -> dict[str, str]:
        """Return the message as chat templates have it."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        return {"role": self.role, "content": text}


class ChatRequest(Decoding):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Positive | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=NUM_TOP)] | None = None


class PuzzleRequest(Parameters):
    """POST /v1/puzzles."""

    model: str | None = None
    puzzle: Annotated[str, Field(max_length=100_000)]
    supervision_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None


FIELDS = {
    name
    for schema in (CompletionRequest, ChatRequest, PuzzleRequest, Message, TextPart, StreamOptions)
    for name in schema.model_fields
}
