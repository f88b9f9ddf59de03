# SPDX-License-Identifier: Apache-2.0
"""Prompts: a text, tokens or a conversation as what a model continues, and how its tokens become text."""

import dataclasses
from collections.abc import Collection, Sequence

import numpy as np

from inference.batching import Request
from inference.choice import Sampling
from inference.text_stream import TextStream
from input_pipeline.chat.encoding import ChatTokenizer, format_of_tokenizer
from input_pipeline.chat.messages import KINDS, Message
from input_pipeline.chat.template import PlainFormat, Template
from input_pipeline.tasks import questions
from input_pipeline.tokenization import AnyTokenizer, HuggingFaceTokenizer, Pieces


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """Tokens to continue.

    Attributes:
      tokens: of the prompt, as the model reads it.
      ends: tokens that end the continuation.
      first_V: bool [vocab_size], what the first token of the continuation may be; None: any.
      before: tokens whose text goes before the continuation's, and may depend on it.
      own: the prompt's text; the text of `before` and the continuation begins with it.
      redrawn: the last token of the text, which is drawn again; None: `tokens` has it.
    """

    tokens: Sequence[int]
    ends: Collection[int]
    first_V: np.ndarray | None = None
    before: Sequence[int] = ()
    own: str = ""
    redrawn: int | None = None

    @property
    def num_tokens(self) -> int:
        """The number of the prompt's own tokens."""
        return len(self.tokens) + (self.redrawn is not None)

    def request(self, max_tokens: int, sampling: Sampling, *, wants_top: bool = False) -> Request:
        """Return the request for one continuation; arguments as in `Request`."""
        return Request(self.tokens, max_tokens, sampling, self.ends, self.first_V, wants_top, self.redrawn)

    def text(self, tokenizer: AnyTokenizer, stops: Sequence[str] = ()) -> TextStream:
        """Return the empty text of a continuation, which has no part of the prompt."""
        return TextStream(tokenizer.decode, stops, self.before, self.own)


def text_start(tokenizer: AnyTokenizer, config, *, is_trained: bool) -> list[int]:
    """Return the tokens before a text, as the model of a run has seen them in training; there may be none.

    A published tokenizer puts its own before a text, such as <s>. They are those of imported weights, and of
    conversations by a chat template. Other documents follow the token that ends documents.

    Args:
      config: of the run.
      is_trained: whether the weights were trained here, and are not those of an import.
    """
    by_template = is_of_turns(config) and isinstance(tokenizer, HuggingFaceTokenizer) and tokenizer.chat_template
    if isinstance(tokenizer, Pieces) and (by_template or not is_trained):
        return tokenizer.published_start()
    return [tokenizer.end_of_document]


def text_prompt(
    tokenizer: AnyTokenizer, text: str, start: Sequence[int] | None = None, *, longest: int | None = None
) -> Prompt:
    """Return the prompt of a text that goes on, after the tokens `start`; default: the one that ends documents.

    The end of a prompt is seldom a token boundary of a longer text: "def " is "def" and " ", but in a text " f" may be
    one token. So the prompt's last token is resampled among the tokens that begin with it.

    Args:
      longest: tokens that the model can read. A prompt of more has no continuation, so it is not decoded.
    """
    whole = tokenizer.encode(text)
    kept, allowed = tokenizer.open_end(whole)
    end = tokenizer.end_of_document
    redrawn = whole[-1] if len(kept) < len(whole) else None
    tokens = [*([end] if start is None else start), *kept] or [end]  # the model reads at least one
    return Prompt(tokens, [end], allowed, kept, _decoded(tokenizer, whole, longest), redrawn)


def token_prompt(tokenizer: AnyTokenizer, tokens: Sequence[int], *, longest: int | None = None) -> Prompt:
    """Return the prompt of tokens, which are continued as they are; `longest` as in `text_prompt`."""
    return Prompt(tokens, [tokenizer.end_of_document], None, tokens, _decoded(tokenizer, tokens, longest))


def _decoded(tokenizer: AnyTokenizer, tokens: Sequence[int], longest: int | None) -> str:
    """Return the text of tokens; "" for more than `longest`."""
    return "" if longest is not None and len(tokens) > longest else tokenizer.decode(list(tokens))


def chat_prompt(tokenizer: AnyTokenizer, form: PlainFormat | Template, messages: Sequence[Message]) -> Prompt:
    """Return the prompt of a conversation that the assistant continues; the answer ends where its turn does.

    Raises:
      ValueError: the chat template refuses the conversation.
    """
    tokens = ChatTokenizer(tokenizer).encode(form.prompt(messages))
    return Prompt(tokens, answer_ends(tokenizer, form))


def answer_ends(tokenizer: AnyTokenizer, form: PlainFormat | Template) -> list[int]:
    """Return the tokens that end an assistant's turn.

    A token of white space before the template's mark is not one of them, since answers have it too: Llama 2 writes
    " </s>".
    """
    after = tokenizer.encode(form.after_answer())
    marks = [token for token in after if tokenizer.decode([token]).strip()]
    return [tokenizer.end_of_document, *(marks or after)[:1]]


def can_chat(config, tokenizer: AnyTokenizer) -> bool:
    """Return whether the model of a run was trained on conversations, or its tokenizer has a chat template."""
    return is_of_turns(config) or isinstance(format_of_tokenizer(tokenizer, config.data.tokenizer), Template)


def is_of_turns(config) -> bool:
    """Return whether the model of a run was trained on conversations."""
    return config.data.source in (*KINDS, *questions.SOURCES)
