# SPDX-License-Identifier: Apache-2.0
"""Texts as rows of tokens to score, split and windowed as lm-evaluation-harness does, and greedy continuations."""

from collections.abc import Sequence

from inference import decoding
from input_pipeline.tokenization import HuggingFaceTokenizer
from scoring.likelihood import LanguageModel, Row

ROWS = 16  # prompts that are continued at once


def published_prefix(tokenizer: HuggingFaceTokenizer) -> tuple[int, ...]:
    """Return the tokens that a tokenizer.json itself puts before a text, such as <s>; often there are none."""
    import tokenizers  # imported here because few runs need it

    raw = tokenizers.Tokenizer.from_buffer(tokenizer.files["tokenizer.json"])
    ids, mark = raw.encode("a").ids, raw.encode("a", add_special_tokens=False).ids
    return tuple(ids[: ids.index(mark[0])])


def row_of_pair(model: LanguageModel, context: str, continuation: str) -> Row:
    """Return the row that scores `continuation` after `context`.

    Both are encoded as one text, and the continuation begins where the context, encoded alone, ends. If a token crosses
    that place, the context is still the one that was encoded alone, as in the harness. White space at the end of the
    context belongs to the continuation, since tokens begin with it.
    """
    stripped = context.rstrip()
    whole = model.tokenizer.encode(context + continuation)
    before = model.tokenizer.encode(stripped)[: len(whole) - 1]  # a last token may take in both
    return Row([*model.prefix, *before] or [model.start], whole[len(before) :])


def rows_of_text(model: LanguageModel, text: str) -> list[Row]:
    """Return rows that score each token of a text once, with as much context as fits.

    The first row begins with the model's `start`. Each later one scores up to `max_length` tokens, the first of them
    after one token of context; the last has a full context.
    """
    tokens, longest = model.tokenizer.encode(text), model.max_length
    rows = [Row([model.start], tokens[:longest])] if tokens else []
    for start in range(longest, len(tokens), longest):
        end = min(start + longest, len(tokens))
        rows.append(Row(tokens[end - longest - 1 : start], tokens[start:end]))
    return rows


def continue_greedily(
    model: LanguageModel, prompts: Sequence[str], *, max_tokens: Sequence[int], stops: Sequence[Sequence[str]]
) -> list[str]:
    """Return the likeliest continuation of each prompt, up to the first of its stop strings or the end of a document.

    At most `max_length` / 2 tokens are generated. A prompt that does not fit before them loses its first tokens.
    """
    encoded, limits = [], []
    for prompt, limit in zip(prompts, max_tokens, strict=True):
        limits.append(min(limit, model.max_length // 2))
        tokens = [*model.prefix, *model.tokenizer.encode(prompt)] or [model.start]
        encoded.append(tokens[-(model.max_length - limits[-1]) :])
    order = sorted(range(len(prompts)), key=lambda number: (-limits[number], -len(encoded[number])))
    texts = [""] * len(prompts)
    for start in range(0, len(order), ROWS):
        model.on_batch("answers", start // ROWS, -(-len(order) // ROWS))
        numbers = order[start : start + ROWS]
        outputs = _decode(model, [encoded[number] for number in numbers], max(limits[number] for number in numbers))
        for number, output in zip(numbers, outputs, strict=True):
            texts[number] = cut(model.tokenizer.decode(output[: limits[number]]), stops[number])
    return texts


def _decode(model: LanguageModel, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
    """Continue each prompt greedily by up to `max_tokens` tokens.

    A row of the length of a bucket is added, and copies of it, so that all batches of a bucket have one shape.
    """
    filler = [model.tokenizer.end_of_document] * model.bucket(max(map(len, prompts)))
    rows = [*prompts, *[filler] * (ROWS + 1 - len(prompts))]
    return decoding.generate(
        model.graph, model.params, rows, max_tokens=max_tokens, ends=[model.tokenizer.end_of_document],
        vocab_size=model.tokenizer.vocab_size, temperature=0.0,
    )[: len(prompts)]  # fmt: skip


def cut(text: str, stops: Sequence[str]) -> str:
    """Return the text before the first of the stop strings."""
    ends = [text.find(stop) for stop in stops if stop and stop in text]
    return text[: min(ends)] if ends else text
