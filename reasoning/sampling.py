# SPDX-License-Identifier: Apache-2.0
"""Text in, text out."""

import numpy as np

from configs.base import ConfigError
from input_pipeline.chat.encoding import ChatTokenizer, format_of_tokenizer
from reasoning import decoding


def continue_texts(run, params: dict, tokenizer, prompts: list[str], *, max_tokens: int, **sampling) -> list[str]:
    """Return each prompt with what the model writes after it; `sampling` as in reasoning/decoding.py.

    The prompt reads as the tokenizer gives it back: one that normalises may change its spaces and accents.

    A prompt seldom ends where a token of a longer text would: "def " is "def" and " ", but in a text " f" may be one
    token. So the prompt's last token is drawn anew, from those that begin with it.

    Raises:
      ConfigError: prompt and continuation are longer than `model.max_length`.
    """
    encoded, allowed = zip(*(tokenizer.encode_open(prompt) for prompt in prompts), strict=True)
    rows = [[tokenizer.end_of_document, *prompt] for prompt in encoded]  # as documents are in training
    outputs = _continued(
        run, params, tokenizer, rows, max_tokens=max_tokens, ends=[tokenizer.end_of_document],
        first_BV=np.stack(allowed), **sampling,
    )  # fmt: skip
    return [tokenizer.decode([*tokens, *output]) for tokens, output in zip(encoded, outputs, strict=True)]


def answer(run, params: dict, tokenizer, message: str, *, max_tokens: int, **sampling) -> str:
    """Return what the model answers to a user's message, in the format of the conversations that it was trained on.

    Raises:
      ConfigError: message and answer are longer than `model.max_length`, or the chat template refuses the message.
      DataError: the tokenizer's chat template cannot be read.
    """
    form = format_of_tokenizer(tokenizer, run.config.data.tokenizer)
    try:
        prompt = ChatTokenizer(tokenizer).encode(form.prompt([{"role": "user", "content": message}]))
        ends = [tokenizer.end_of_document, *tokenizer.encode(form.after_answer())[:1]]
    except ValueError as error:
        raise ConfigError(f"--message is not what the chat template takes ({error})") from None
    output = _continued(run, params, tokenizer, [prompt], max_tokens=max_tokens, ends=ends, **sampling)[0]
    return tokenizer.decode(output)


def _continued(run, params: dict, tokenizer, rows: list[list[int]], *, max_tokens: int, **how) -> list[list[int]]:
    limit, longest = run.config.model.max_length, max(map(len, rows))
    if longest + max_tokens > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and --max_tokens={max_tokens} exceed model.max_length={limit}; "
            + (f"use --max_tokens={limit - longest}" if limit > longest else "shorten the prompt")
        )
    return decoding.generate(run.graph, params, rows, max_tokens=max_tokens, vocab_size=tokenizer.vocab_size, **how)
