# SPDX-License-Identifier: Apache-2.0
"""What each search asks for and keeps, against a small tree whose lines, probabilities and values are known."""

import itertools
import math

import pytest

from reasoning.searches import SEARCHES, _chosen_leaf
from reasoning.thoughts import Judge, Limits, Propose, Thought

LIMITS = Limits(max_thoughts=2, thoughts_per_step=2, max_depth=2)
# By the lines before it: each line that may follow, with its probability and its value. Two lines make an answer.
TREE = {
    (): {"a": (0.6, 0.2), "b": (0.3, 0.9), "c": (0.1, 0.5)},
    ("a",): {"x": (0.9, 0.1), "y": (0.1, 0.3)},
    ("b",): {"x": (0.5, 0.1), "y": (0.5, 0.95)},
    ("c",): {"x": (1.0, 0.4)},
}


def run(name: str, limits: Limits = LIMITS, tree: dict = TREE) -> tuple[list[Thought], list, Thought]:
    """Return (answers, what was asked, root); the likeliest lines are drawn first, and each once."""
    root, asked, result = Thought(), [], None
    search = SEARCHES[name](root, limits)
    while True:
        try:
            work = search.send(result)
        except StopIteration as end:
            return end.value, asked, root
        asked.append(work)
        result = None
        if isinstance(work, Judge):
            for thought in work.thoughts:
                thought.value = tree[tuple(thought.lines[:-1])][thought.text][1]
        else:
            result = [drawn(parent, work, limits, tree) for parent in work.parents]


def drawn(parent: Thought, work: Propose, limits: Limits, tree: dict) -> list[Thought]:
    """Return the likeliest lines after a thought, or the likeliest whole answers."""
    found = [
        Thought(line, parent, math.log(probability), state=line, is_final=parent.depth == 1)
        for line, (probability, _) in tree[tuple(parent.lines)].items()
    ]
    if work.to_the_end and parent.depth == 0:
        found = list(itertools.chain(*(drawn(one, work, limits, tree) for one in found)))
    found = sorted(found, key=lambda thought: -thought.total_log_prob)[: work.count]
    if not work.to_the_end:
        parent.children += found
    return found


@pytest.mark.parametrize("name, best", [
    ("greedy", ["a", "x"]), ("beam", ["a", "x"]), ("bfs", ["b", "y"]), ("dfs", ["b", "y"]), ("best_first", ["b", "y"]),
    ("mcts", ["b", "y"]), ("best_of_n", ["b", "y"]), ("self_consistency", ["a", "x"]),
])  # fmt: skip
def test_a_search_finds_the_answer_that_its_order_prefers(name, best):
    answers, _, _ = run(name)
    assert answers[0].lines == best and all(answer.is_final for answer in answers)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_draws_no_more_than_its_budget_and_keeps_no_more_than_max_thoughts(name):
    for limits in (LIMITS, Limits(1, 1, 2), Limits(3, 2, 2)):
        _, asked, _ = run(name, limits)
        proposed = [work for work in asked if isinstance(work, Propose)]
        lines = sum(len(work.parents) * work.count * (2 if work.to_the_end else 1) for work in proposed)
        assert lines <= limits.max_drawn
        assert all(len(work.parents) <= limits.max_thoughts for work in proposed)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_survives_a_model_that_completes_no_line(name):
    root, search = Thought(), SEARCHES[name](Thought(), LIMITS)
    work = next(search)
    with pytest.raises(StopIteration) as end:
        while True:
            assert isinstance(work, Propose) or work.thoughts, "a value of no thoughts is asked for"
            work = search.send(None if isinstance(work, Judge) else [[] for _ in work.parents])
    assert end.value.value == [] and root.children == []


def test_a_level_is_asked_for_in_one_batch():
    _, asked, _ = run("bfs")
    first, _, second, _ = asked
    assert (len(first.parents), first.count) == (1, 4) and (len(second.parents), second.count) == (2, 2)
    assert [parent.text for parent in second.parents] == ["b", "c"], "the likeliest line has the lowest value"


def test_only_beam_greedy_and_votes_ask_for_no_value():
    without = {name for name in SEARCHES if not any(isinstance(work, Judge) for work in run(name)[1])}
    assert without == {"beam", "greedy", "self_consistency"}


def test_depth_first_search_turns_back_from_a_thought_without_a_chance():
    tree = TREE | {(): {"a": (0.6, 0.9), "b": (0.4, 0.3)}, ("a",): {"x": (1.0, 0.2)}, ("b",): {"y": (1.0, 0.8)}}
    answers, asked, _ = run("dfs", tree=tree)
    assert [work.parents[0].lines for work in asked if isinstance(work, Propose)] == [[], ["a"], ["b"]]
    assert answers[0].lines == ["b", "y"]
    tree[()]["b"] = (0.4, 0.05)
    answers, asked, _ = run("dfs", tree=tree)
    assert [work.parents[0].lines for work in asked if isinstance(work, Propose)] == [[], ["a"]], "b is pruned"


def test_monte_carlo_tree_search_visits_what_is_promising_and_counts_every_visit():
    limits = Limits(max_thoughts=4, thoughts_per_step=2, max_depth=2)
    _, _, root = run("mcts", limits)
    visits = {child.text: child.visits for child in root.children}
    assert visits["b"] == max(visits.values()) and root.visits >= sum(visits.values())
    for thought in root.all():
        if thought.children:
            assert thought.visits >= sum(child.visits for child in thought.children)


def test_an_answer_has_a_vote_for_each_time_it_was_drawn():
    """Equal answers are one thought, which knows how often the model drew it."""
    search = SEARCHES["self_consistency"](Thought(), LIMITS)
    next(search)
    answers = [
        Thought(text, Thought(), state=state, num_draws=count, is_final=True)
        for text, state, count in (("x", "1", 1), ("y", "1", 1), ("z", "2", 3))
    ]  # fmt: skip
    with pytest.raises(StopIteration) as end:
        search.send([answers])
    assert [one.text for one in end.value.value] == ["z", "x", "y"]


def test_monte_carlo_tree_search_tries_a_likely_thought_before_it_visits_a_fair_one_again():
    """By PUCT: 1.25 * 0.5 * sqrt(4) = 1.25 for a thought without a visit; half of it, and its value, after one."""
    root = Thought(visits=4)
    root.children = [Thought(text, root, math.log(0.5), visits=visits) for text, visits in (("a", 1), ("b", 0))]
    for value, chosen in ((0.5, "b"), (0.7, "a")):
        assert _chosen_leaf(root, {root.children[0]: value, root.children[1]: 0.0}).text == chosen
