# SPDX-License-Identifier: Apache-2.0
"""Searches over thoughts: each is a generator that yields what it asks of the model, and returns final thoughts.

A search is a function (root, limits) in SEARCHES. It returns complete answers, the best first, and none if it found
none. It never sees whether an answer is correct. reasoning/solving.py answers what many searches ask in one batch.

Breadth-first and depth-first search over thoughts: Yao et al. 2023, arXiv:2305.10601, algorithms 1 and 2.
"""

import collections
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

from reasoning.thoughts import Judge, Limits, Propose, Search, Thought

EXPLORATION = 1.25  # the factor c of PUCT
PRUNED_BELOW = 0.05  # value up to which depth-first search turns back
BY_VALUE = dict(key=lambda thought: thought.value, reverse=True)
BY_LIKELIHOOD = dict(key=lambda thought: thought.total_log_prob, reverse=True)


def greedy(root: Thought, limits: Limits) -> Search:
    """Return the answer of the likeliest tokens."""
    (found,) = yield Propose([root], 1, temperature=0.0, to_the_end=True)
    return _final(found)


def best_of_n(root: Thought, limits: Limits) -> Search:
    """Draw whole answers, as many as the budget allows; return them by their value."""
    found = yield from _whole_answers(root, limits)
    if found:
        yield Judge(found)
    return sorted(found, **BY_VALUE)


def self_consistency(root: Thought, limits: Limits) -> Search:
    """Draw whole answers; return them by how often their final states occur (arXiv:2203.11171)."""
    found = yield from _whole_answers(root, limits)
    votes = collections.Counter()
    for thought in found:
        votes[thought.state] += thought.num_draws
    return sorted(found, key=lambda thought: votes[thought.state], reverse=True)


def bfs(root: Thought, limits: Limits) -> Search:
    """Keep the thoughts of each level that have the highest values."""
    return (yield from _by_levels(root, limits, judged=True))


def beam(root: Thought, limits: Limits) -> Search:
    """Keep the thoughts of each level that the model finds likeliest; no values are asked for."""
    return (yield from _by_levels(root, limits, judged=False))


def dfs(root: Thought, limits: Limits) -> Search:
    """Follow the most valuable thought; turn back at one that is worth at most PRUNED_BELOW, and at complete answers.

    It ends with the first answer that is worth more than one half, or with the budget.
    """
    stack, complete, num_drawn = [root], [], 0
    while stack and num_drawn < limits.max_drawn and not _has_good(complete):
        num_drawn += limits.num_drawn_after(stack[-1])
        found = yield from _expanded([stack.pop()], limits)
        complete += _final(found)
        stack += [thought for thought in _open(sorted(found, **BY_VALUE)[::-1], limits) if thought.value > PRUNED_BELOW]
        del stack[: -limits.max_thoughts]
    return sorted(complete, **BY_VALUE)


def best_first(root: Thought, limits: Limits) -> Search:
    """Follow the most valuable thoughts of the whole tree: the budget goes where it is promising."""
    order, complete, num_drawn = itertools.count(), [], 0
    heap = [(-1.0, next(order), root)]
    while heap and num_drawn < limits.max_drawn and not _has_good(complete):
        num_drawn += limits.num_drawn_after(heap[0][2])
        found = yield from _expanded([heapq.heappop(heap)[2]], limits)
        complete += _final(found)
        for thought in _open(found, limits):
            heapq.heappush(heap, (-thought.value, next(order), thought))
        heap = heapq.nsmallest(limits.max_thoughts, heap)
    return sorted(complete, **BY_VALUE)


def mcts(root: Thought, limits: Limits) -> Search:
    """Monte-Carlo tree search with PUCT (Rosin 2011): the value of a new thought takes the place of a rollout.

    A child is chosen by its mean value plus EXPLORATION * P * sqrt(N) / (1 + n), with its share P of its siblings'
    probabilities, its visits n and its parent's N.
    """
    sums: dict[Thought, float] = collections.defaultdict(float)
    num_drawn = 0
    for _ in range(limits.max_drawn):
        reached = [leaf := _chosen_leaf(root, sums)]
        if _open(reached, limits):
            if (num_drawn := num_drawn + limits.num_drawn_after(leaf)) > limits.max_drawn:
                break
            reached = (yield from _expanded(reached, limits)) or reached
        for thought in reached:
            for passed in _up(thought):
                passed.visits += 1
                sums[passed] += 0.0 if math.isnan(thought.value) else thought.value
    return sorted(_final(root.all()), **BY_VALUE)


SEARCHES: dict[str, Callable[[Thought, Limits], Search]] = {
    search.__name__: search for search in (greedy, best_of_n, self_consistency, bfs, beam, dfs, best_first, mcts)
}


def _by_levels(root: Thought, limits: Limits, judged: bool) -> Search:
    """Draw all lines of a level in one batch, and keep the best."""
    kept, complete, order = [root], [], BY_VALUE if judged else BY_LIKELIHOOD
    for _ in range(limits.max_depth):
        if not kept:
            break
        found = yield from _expanded(kept, limits, judged)
        complete += _final(found)
        kept = sorted(_open(found, limits), **order)[: limits.max_thoughts]
    return sorted(complete, **order)


def _expanded(parents: Sequence[Thought], limits: Limits, judged: bool = True) -> Search:
    """Return new thoughts after these, with their values."""
    groups = yield Propose(parents, limits.num_drawn_after(parents[0]), limits.temperature)
    found = [thought for group in groups for thought in group]
    if judged and found:
        yield Judge(found)
    return found


def _whole_answers(root: Thought, limits: Limits) -> Search:
    """Return different complete answers."""
    count = limits.max_thoughts * limits.thoughts_per_step
    (found,) = yield Propose([root], count, limits.temperature, to_the_end=True)
    return _final(found)


def _chosen_leaf(root: Thought, sums: dict[Thought, float]) -> Thought:
    """Follow the children with the highest PUCT score to a thought without children."""
    thought = root
    while thought.children:
        priors = [math.exp(child.log_prob) for child in thought.children]
        scores = [
            (sums[child] / child.visits if child.visits else 0.0)
            + EXPLORATION * prior / (sum(priors) or 1.0) * math.sqrt(thought.visits) / (1 + child.visits)
            for child, prior in zip(thought.children, priors, strict=True)
        ]
        thought = thought.children[scores.index(max(scores))]
    return thought


def _has_good(complete: Sequence[Thought]) -> bool:
    """Return whether an answer is more likely right than wrong."""
    return any(thought.value > 0.5 for thought in complete)


def _up(thought: Thought) -> list[Thought]:
    return [thought, *_up(thought.parent)] if thought.parent else [thought]


def _final(thoughts: Sequence[Thought]) -> list[Thought]:
    return [thought for thought in thoughts if thought.is_final]


def _open(thoughts: Sequence[Thought], limits: Limits) -> list[Thought]:
    """Return the thoughts after which more lines may follow."""
    return [thought for thought in thoughts if not thought.is_final and thought.depth < limits.max_depth]
