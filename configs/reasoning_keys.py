# SPDX-License-Identifier: Apache-2.0
"""The keys of reasoning with a trained model; configs/base.py adds them to its own."""

from configs.key import READ, RESUME, UNCOMPILED, Key, Section

KEYS: dict[str, Key] = {}  # by dotted name

tot = Section(KEYS, "tot", RESUME | READ | UNCOMPILED)  # Tree of Thoughts, see docs/reasoning.md
tot.use_tot = Key(False, "whether each evaluation also solves held-out problems by search; needs memory for its cache")
tot.search = Key(
    "bfs", "a search of reasoning/searches.py",
    choices=("greedy", "best_of_n", "self_consistency", "bfs", "beam", "dfs", "best_first", "mcts"),
)  # fmt: skip
tot.value = Key(
    "verdict", "what a search prefers: verdict of the model, likelihood of the lines, oracle (knows right answers)",
    choices=("verdict", "likelihood", "oracle"),
)  # fmt: skip
tot.max_thoughts = Key(5, "partial answers that a search keeps", above=0, most=10_000)
tot.thoughts_per_step = Key(3, "lines that are drawn after each of them", above=0, most=10_000)
tot.temperature = Key(1.0, "temperature of these draws", above=0, most=1000)
tot.memory_efficient = Key(True, "whether the cache has rows for max_thoughts, not also for all lines that they draw")
tot.problems = Key(100, "held-out problems of an evaluation", above=0, most=1_000_000)
