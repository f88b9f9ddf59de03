# SPDX-License-Identifier: Apache-2.0
"""Text in, text out."""

from configs.base import ConfigError
from reasoning import decoding


def continue_texts(run, params: dict, tokenizer, prompts: list[str], *, max_tokens: int, **sampling) -> list[str]:
    """Return for each prompt what the model writes after it; `sampling` as in reasoning/decoding.py.

    Raises:
      ConfigError: prompt and continuation are longer than `model.max_length`.
    """
    encoded, limit = [tokenizer.encode(prompt) for prompt in prompts], run.config.model.max_length
    longest = 1 + max(len(prompt) for prompt in encoded)  # a document begins with a token of its own
    if longest + max_tokens > limit:
        raise ConfigError(
            f"a prompt of {longest} tokens and --max_tokens={max_tokens} exceed model.max_length={limit}; "
            + (f"use --max_tokens={limit - longest}" if limit > longest else "shorten the prompt")
        )
    outputs = decoding.generate(
        run.graph, params, encoded, max_tokens=max_tokens,
        end_of_document=tokenizer.end_of_document, vocab_size=tokenizer.vocab_size, **sampling,
    )  # fmt: skip
    return [tokenizer.decode(output) for output in outputs]
