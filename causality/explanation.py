# SPDX-License-Identifier: Apache-2.0
"""The causal analysis of two prompts as one result: tables, the figures of a metrics file, and lines for a terminal."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from flax import nnx

from causality.patching import Contrast, Lens, Tables, attribute, contrast, logit_lens, restore
from causality.sites import NAMES
from causality.tracing import Trace, trace
from configs.errors import ConfigError
from layers import taps
from reporting.display import aligned, counted

WORDS = {  # the taps in words
    "block": "residual stream after a block", "attention": "output of attention", "mlp": "output of the MLP",
    "heads": "head, at all positions",
}  # fmt: skip
SHOWN = 5  # sites of each tap in the terminal


class Explanation(NamedTuple):
    """What the analysis found."""

    clean_words: list[str]  # the text of each token of the prompt
    corrupt_words: list[str]  # of the corrupted prompt
    answer: str  # the text of the first of the two compared tokens
    other: str  # of the second
    pair: Contrast  # the prompts, and the differences of logits in the clean and the corrupted run
    restored: Tables  # normalised effects by patching
    attributed: Tables  # by its gradient approximation
    traced: Trace  # probabilities with noise on the tokens in which the prompts differ
    lens: Lens  # what each block of the clean run predicts
    lens_words: list[list[str]]  # the texts of its likeliest tokens, [L][T]


def prompt_tokens(
    tokenizer, prompt: str, corrupt: str, max_length: int, names: tuple[str, str], start: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Return two prompts as int32 [T].

    Args:
      names: of the flags or keys of the two prompts, for messages.
      start: tokens before each prompt, as the model has seen them before texts.

    Raises:
      ConfigError: the prompts are equal, differ in their number of tokens, or are too long.
    """
    clean, other = ([*start, *tokenizer.encode(text)] for text in (prompt, corrupt))
    if clean == other:
        raise ConfigError(f"{names[0]} and {names[1]} are the same tokens; change a word of one of them")
    if len(clean) != len(other):
        parts = ["|".join(tokenizer.decode([token]) for token in tokens[len(start) :]) for tokens in (clean, other)]
        raise ConfigError(
            f"{names[0]} has {counted(len(clean) - len(start), 'token')} ({parts[0]}) and {names[1]} has "
            f"{len(other) - len(start)} ({parts[1]}); choose words with as many tokens"
        )
    if len(clean) > max_length:
        raise ConfigError(f"{names[0]} has {len(clean)} tokens, more than model.max_length={max_length}; shorten it")
    return np.array(clean, np.int32), np.array(other, np.int32)


def explain(
    graph: nnx.GraphDef, params: dict, clean_T: np.ndarray, corrupt_T: np.ndarray, decode: Callable[[list[int]], str]
) -> Explanation:
    """Return the analysis of two prompts; call it with the model's mesh in context.

    Args:
      clean_T, corrupt_T: int32 [T] of different prompts, see `prompt_tokens`.
      decode: tokens to text.

    Raises:
      ConfigError: the model does not name the activations that are compared, as a model of a user may not.
    """
    try:
        return _explained(graph, params, clean_T, corrupt_T, decode)
    except taps.NotComputed as error:
        needed = ", ".join(("embed", *NAMES))
        raise ConfigError(
            f"the model names no activation {error.names}; an explanation needs {needed} of layers/taps.py"
        ) from None


def _explained(
    graph: nnx.GraphDef, params: dict, clean_T: np.ndarray, corrupt_T: np.ndarray, decode: Callable[[list[int]], str]
) -> Explanation:
    """Return the analysis; taps.NotComputed if the model lacks an activation."""

    def word(token: int) -> str:
        return decode([token]) or f"#{token}"

    pair = contrast(graph, params, clean_T, corrupt_T)
    traced = trace(graph, params, clean_T, clean_T != corrupt_T, pair.answer, key=jax.random.key(0))
    lens = logit_lens(graph, params, clean_T, pair.answer)
    return Explanation(
        [word(int(token)) for token in clean_T], [word(int(token)) for token in corrupt_T], word(pair.answer),
        word(pair.other), pair, restore(graph, params, pair), attribute(graph, params, pair), traced, lens,
        [[word(int(token)) for token in of_layer] for of_layer in lens.likeliest_LT],
    )  # fmt: skip


def figures(found: Explanation) -> dict[str, float]:
    """Return the differences of logits, and for each tap the place that restores most, and how much."""
    flat = {"clean": found.pair.clean, "corrupt": found.pair.corrupt}
    for name in NAMES:
        layer, place = strongest(found.restored[name], 1)[0]
        of_place = "head" if name == "heads" else "position"
        flat |= {f"{name}/effect": float(found.restored[name][layer, place]), f"{name}/layer": layer}
        flat[f"{name}/{of_place}"] = place
    return flat


def strongest(table: np.ndarray, count: int) -> list[tuple[int, int]]:
    """Return the (row, column) of the largest entries, the largest first; NaN is the smallest."""
    order = np.argsort(-np.nan_to_num(table, nan=-np.inf).ravel(), kind="stable")[:count]
    return [tuple(map(int, np.unravel_index(at, table.shape))) for at in order]


def headline(found: Explanation) -> list[str]:
    """Return what is compared, in sentences."""
    pair = found.pair
    continued = f"The prompt is continued by {found.answer!r} and the corrupted prompt by {found.other!r}."
    if pair.corrupt > 0:
        continued = f"Both prompts are continued by {found.answer!r}; next after the corrupted one is {found.other!r}."
    return [
        continued,
        f"logit({found.answer!r}) - logit({found.other!r}) is {pair.clean:.3f} after the prompt and {pair.corrupt:.3f} "
        "after the corrupted prompt.",
        f"P({found.answer!r}) is {found.traced.clean:.3f}, and {found.traced.corrupt:.3f} with noise on the tokens in "
        "which the prompts differ.",
    ]


def lines(found: Explanation) -> list[str]:
    """Return the headline, and a table of the strongest sites of each tap."""
    rows = [("activation", "layer", "position or head", "patching", "attribution", "tracing")]
    for name in NAMES:
        for layer, place in strongest(found.restored[name], SHOWN):
            tables = found.restored, found.attributed, found.traced.effects
            numbers = [f"{table[name][layer, place]:+.3f}" for table in tables]
            at = f"head {place}" if name == "heads" else f"{place} {found.clean_words[place]!r}"
            rows.append((WORDS[name], str(layer), at, *numbers))
    return [*headline(found), "", *aligned(rows)]
