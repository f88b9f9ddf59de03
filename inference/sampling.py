# SPDX-License-Identifier: Apache-2.0
"""Text in, text out."""

import numpy as np

from configs.errors import ConfigError
from inference import decoding
from input_pipeline.chat.encoding import ChatTokenizer, format_of_tokenizer
from input_pipeline.chat.messages import KINDS
from input_pipeline.chat.template import Template


def continue_texts(run, params: dict, tokenizer, prompts: list[str], *, max_tokens: int, **sampling) -> list[str]:
    """Return each prompt with its continuation; `sampling` as in inference/decoding.py.

    The prompt is decoded from its tokens: a tokenizer that normalises may change its spaces and accents.

    The end of a prompt is seldom a token boundary of a longer text: "def " is "def" and " ", but in a text " f" may be
    one token. So the prompt's last token is resampled among the tokens that begin with it.

    Raises:
      ConfigError: prompt and continuation are longer than `model.max_length`.
    """
    encoded, allowed = zip(*(tokenizer.encode_open(prompt) for prompt in prompts), strict=True)
    rows = [[tokenizer.end_of_document, *prompt] for prompt in encoded]  # as in training documents
    outputs = _continued(
        run, params, tokenizer, rows, max_tokens=max_tokens, ends=[tokenizer.end_of_document],
        first_BV=np.stack(allowed), **sampling,
    )  # fmt: skip
    return [tokenizer.decode([*tokens, *output]) for tokens, output in zip(encoded, outputs, strict=True)]


def check_answers(config, tokenizer, address) -> None:
    """Raise ConfigError if the model of a run never saw a conversation, so that its answers would mean nothing."""
    has_template = isinstance(format_of_tokenizer(tokenizer, config.data.tokenizer), Template)
    if config.data.source not in KINDS and not has_template:
        raise ConfigError(
            f"--message: {address} was not trained on conversations, and its tokenizer has no chat template; "
            "use --prompt"
        )


def answers(run, params: dict, tokenizer, messages: list[str], *, max_tokens: int, **sampling) -> list[str]:
    """Return the model's answer to each user message, in the format of its training conversations.

    Raises:
      ConfigError: a message and its answer are longer than `model.max_length`, or the chat template refuses a message.
      DataError: the tokenizer's chat template cannot be read.
    """
    form = format_of_tokenizer(tokenizer, run.config.data.tokenizer)
    try:
        said = [form.prompt([{"role": "user", "content": message}]) for message in messages]
        prompts = [ChatTokenizer(tokenizer).encode(pieces) for pieces in said]
        ends = [tokenizer.end_of_document, *tokenizer.encode(form.after_answer())[:1]]
    except ValueError as error:
        raise ConfigError(f"--message is not what the chat template takes ({error})") from None
    outputs = _continued(run, params, tokenizer, prompts, max_tokens=max_tokens, ends=ends, **sampling)
    return [tokenizer.decode(output) for output in outputs]


def _continued(run, params: dict, tokenizer, rows: list[list[int]], *, max_tokens: int, **how) -> list[list[int]]:
    limit, longest = run.config.model.max_length, max(map(len, rows))
    if longest + max_tokens > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and --max_tokens={max_tokens} exceed model.max_length={limit}; "
            + (f"use --max_tokens={limit - longest}" if limit > longest else "shorten the prompt")
        )
    return decoding.generate(
        run.graph, params, rows, max_tokens=max_tokens, vocab_size=tokenizer.vocab_size,
        cache_dtype=run.config.inference.cache_dtype, **how,
    )  # fmt: skip
