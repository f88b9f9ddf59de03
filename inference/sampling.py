# SPDX-License-Identifier: Apache-2.0
"""Text in, text out."""

import dataclasses
from collections.abc import Iterator, Sequence

from configs.errors import ConfigError
from inference import decoding, revision
from inference.choice import Sampling
from inference.prompts import Prompt, can_chat, chat_prompt, text_prompt
from inference.text_stream import TextStream
from input_pipeline.chat.encoding import format_of_tokenizer

USUAL_TOKENS = 64  # of a continuation, if there is room


def continue_texts(
    run, params: dict, tokenizer, prompts: list[str], *, max_tokens: int | None, start: Sequence[int] | None = None,
    **sampling,
) -> list[str]:  # fmt: skip
    """Return each prompt with its continuation; `start` as in `text_prompt`, `sampling` as in inference/choice.py.

    If `max_tokens` is None, as many tokens are drawn as fit after each prompt, at most USUAL_TOKENS.
    The prompt is decoded from its tokens: a tokenizer that normalises may change its spaces and accents.

    Raises:
      ConfigError: prompt and continuation are longer than `model.max_length`.
    """
    asked = [text_prompt(tokenizer, prompt, start) for prompt in prompts]
    return _continued(run, params, tokenizer, asked, max_tokens, Sampling(**sampling))


def check_answers(config, tokenizer, address) -> None:
    """Raise ConfigError if the model of a run never saw a conversation, so that its answers would mean nothing."""
    if not can_chat(config, tokenizer):
        raise ConfigError(
            f"--message: {address} was not trained on conversations, and its tokenizer has no chat template; "
            "use --prompt"
        )


def answers(run, params: dict, tokenizer, messages: list[str], *, max_tokens: int | None, **sampling) -> list[str]:
    """Return the model's answer to each user message, in the format of its training conversations.

    Raises:
      ConfigError: a message and its answer are longer than `model.max_length`, or the chat template refuses a message.
      DataError: the tokenizer's chat template cannot be read.
    """
    asked = [message_prompt(tokenizer, run.config, message) for message in messages]
    return _continued(run, params, tokenizer, asked, max_tokens, Sampling(**sampling))


def message_prompt(tokenizer, config, message: str) -> Prompt:
    """Return the prompt of a user's message; ConfigError if the chat template refuses it."""
    form = format_of_tokenizer(tokenizer, config.data.tokenizer)
    try:
        return chat_prompt(tokenizer, form, [{"role": "user", "content": message}])
    except ValueError as error:
        raise ConfigError(f"--message is not what the chat template takes ({error})") from None


def stream(run, params: dict, tokenizer, prompt: Prompt, *, max_tokens: int | None, **sampling) -> Iterator[str]:
    """Yield parts of the text that `continue_texts` or `answers` returns for a prompt, while it is decoded.

    Raises:
      ConfigError: prompt and continuation are longer than `model.max_length`, or would be revised.
    """
    max_tokens = _fitting(run, prompt.num_tokens, max_tokens)
    if run.config.error_correction.use_error_correction:
        raise ConfigError(
            "a text that is streamed cannot be revised; leave out --stream, or give "
            "--config.error_correction.use_error_correction=false"
        )
    text = TextStream(tokenizer.decode, before=prompt.before)
    tokens = decoding.stream(
        run.graph, params, prompt.request(max_tokens, Sampling(**sampling)), vocab_size=tokenizer.vocab_size,
        cache_dtype=run.config.inference.cache_dtype,
    )  # fmt: skip
    yield from map(text.add, tokens)
    yield text.end()


def _continued(
    run, params: dict, tokenizer, asked: list[Prompt], max_tokens: int | None, sampling: Sampling
) -> list[str]:
    """Return the text of each prompt's `before` and its continuation, revised if the run's configuration says so.

    The first prompt is continued with the seed of `sampling`, the next one with the next seed.
    """
    if not asked:
        return []
    _fitting(run, max(prompt.num_tokens for prompt in asked), max_tokens)  # so that its advice suits all prompts
    requests = [
        prompt.request(
            _fitting(run, prompt.num_tokens, max_tokens), dataclasses.replace(sampling, seed=sampling.seed + index)
        )
        for index, prompt in enumerate(asked)
    ]
    keys = run.config.error_correction
    drafts = decoding.generate(
        run.graph, params, requests, vocab_size=tokenizer.vocab_size, cache_dtype=run.config.inference.cache_dtype,
        with_ends=keys.use_error_correction,
    )  # fmt: skip
    if keys.use_error_correction:
        drafts = revision.revise(
            run.graph, params, [prompt.tokens for prompt in asked], drafts, threshold=keys.threshold,
            vocab_size=tokenizer.vocab_size, ends=asked[0].ends,
        )  # fmt: skip
    return [tokenizer.decode([*prompt.before, *draft]) for prompt, draft in zip(asked, drafts, strict=True)]


def _fitting(run, length: int, max_tokens: int | None) -> int:
    """Return how many tokens may follow a prompt of `length`; ConfigError if `max_tokens`, or one, are too many."""
    limit = run.config.model.max_length
    if length + (max_tokens or 1) > limit:
        more = f"--max_tokens={max_tokens}" if max_tokens else "one more"
        instead = f"use --max_tokens={limit - length}" if limit > length else "shorten it: an answer has no room"
        raise ConfigError(f"a prompt of {length} tokens and {more} exceed model.max_length={limit}; {instead}")
    return max_tokens or min(USUAL_TOKENS, limit - length)
