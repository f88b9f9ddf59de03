# SPDX-License-Identifier: Apache-2.0
"""Text in, text out."""

from reasoning import decoding


def continue_texts(run, params: dict, tokenizer, prompts: list[str], *, max_tokens: int, **sampling) -> list[str]:
    """Return for each prompt what the model writes after it; `sampling` as in reasoning/decoding.py."""
    outputs = decoding.generate(
        run.graph, params, [tokenizer.encode(prompt) for prompt in prompts], max_tokens=max_tokens,
        end_of_document=tokenizer.end_of_document, vocab_size=tokenizer.vocab_size, **sampling,
    )  # fmt: skip
    return [tokenizer.decode(output) for output in outputs]
