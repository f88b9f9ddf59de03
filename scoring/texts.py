# SPDX-License-Identifier: Apache-2.0
"""Texts as rows of tokens to score, split and windowed as lm-evaluation-harness does, and greedy continuations."""

from collections.abc import Sequence

from inference.batching import Batch, Request
from inference.choice import Sampling
from inference.engine import Engine
from inference.text_stream import TextStream
from input_pipeline.tokenization import AnyTokenizer
from scoring.likelihood import LanguageModel, Row

ROWS = 16  # prompts that are continued at once, at least


def row_of_pair(model: LanguageModel, context: str, continuation: str) -> Row:
    """Return the row that scores `continuation` after `context`.

    Both are encoded as one text, and the continuation begins where the context, encoded alone, ends. If a token crosses
    that place, the context is still the one that was encoded alone, as in the harness. White space at the end of the
    context belongs to the continuation, since tokens begin with it.
    """
    before, after = split(model.tokenizer, context, continuation)
    return Row([*model.prefix, *before] or [model.start], after)


def split(tokenizer: AnyTokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """Return the tokens of a context and of its continuation, as `row_of_pair` separates them."""
    whole = tokenizer.encode(context + continuation)
    before = tokenizer.encode(context.rstrip())[: len(whole) - 1]  # the last token may lie in both
    return before, whole[len(before) :]


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
    if not prompts:
        return []
    requests = [_request(model, prompt, limit) for prompt, limit in zip(prompts, max_tokens, strict=True)]
    length = model.bucket(max(len(request.prompt) + request.max_tokens for request in requests))
    num_rows = -(-ROWS // model.batch_shards) * model.batch_shards
    engine = Engine(model.graph, model.params, length)
    batch = Batch(engine, num_rows=num_rows, vocab_size=model.tokenizer.vocab_size)
    added = [batch.add(request) for request in requests]
    streams = {
        one: TextStream(model.tokenizer.decode, list(filter(None, strings)))
        for one, strings in zip(added, stops, strict=True)
    }
    texts, num_done = dict.fromkeys(added, ""), 0
    while num_done < len(added):
        model.on_batch("answers", num_done, len(added))
        for one in batch.step():
            if one.reason != "end":
                texts[one] += streams[one].add(one.tokens[-1])
            if streams[one].stopped:
                batch.cancel(one)
            if one.reason:
                texts[one] += streams[one].end()
        num_done = sum(bool(one.reason) for one in added)
    return [texts[one] for one in added]


def _request(model: LanguageModel, prompt: str, max_tokens: int) -> Request:
    """Return the request for the likeliest continuation of a prompt."""
    limit = min(max_tokens, model.max_length // 2)
    tokens = [*model.prefix, *model.tokenizer.encode(prompt)] or [model.start]
    room = model.max_length - limit
    return Request(tokens[-room:], limit, Sampling(temperature=0.0), [model.tokenizer.end_of_document])
