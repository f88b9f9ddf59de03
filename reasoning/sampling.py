# SPDX-License-Identifier: Apache-2.0
"""Text in, text out."""

import numpy as np

from configs.base import ConfigError
from reasoning import decoding


def continue_texts(run, params: dict, tokenizer, prompts: list[str], *, max_tokens: int, **sampling) -> list[str]:
    """Return for each prompt what the model writes after it; `sampling` as in reasoning/decoding.py.

    A prompt seldom ends where a token of a longer text would: "def " is "def" and " ", but in a text " f" may be one
    token. So the prompt's last token is drawn anew, from those that begin with it.

    Raises:
      ConfigError: prompt and continuation are longer than `model.max_length`.
    """
    encoded, allowed = zip(*(tokenizer.encode_open(prompt) for prompt in prompts), strict=True)
    limit = run.config.model.max_length
    longest = 1 + max(len(prompt) for prompt in encoded)  # a document begins with a token of its own
    if longest + max_tokens > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and --max_tokens={max_tokens} exceed model.max_length={limit}; "
            + (f"use --max_tokens={limit - longest}" if limit > longest else "shorten the prompt")
        )
    outputs = decoding.generate(
        run.graph, params, list(encoded), max_tokens=max_tokens, end_of_document=tokenizer.end_of_document,
        vocab_size=tokenizer.vocab_size, first_BV=np.stack(allowed), **sampling,
    )  # fmt: skip
    whole = [tokenizer.decode([*tokens, *output]) for tokens, output in zip(encoded, outputs, strict=True)]
    return [text[len(prompt) :] for text, prompt in zip(whole, prompts, strict=True)]
