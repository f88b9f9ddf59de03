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
    "verdict", "what a search prefers: verdict of the model, value_head (see train.objective=value_head), likelihood "
    "of the lines, oracle (knows right answers)",
    choices=("verdict", "value_head", "likelihood", "oracle"),
)  # fmt: skip
tot.max_thoughts = Key(5, "partial answers that a search keeps", above=0, most=10_000)
tot.thoughts_per_step = Key(3, "lines that are drawn after each of them", above=0, most=10_000)
tot.temperature = Key(1.0, "temperature of these draws", above=0, most=1000)
tot.memory_efficient = Key(True, "whether the cache has rows for max_thoughts, not for all lines that they draw")
tot.problems = Key(100, "held-out problems of an evaluation", above=0, most=1_000_000)

grpo = Section(KEYS, "grpo")  # reinforcement learning from verifiable rewards, see docs/reasoning.md
grpo.reward = Key(
    "task",
    "task: 1 for a right answer, else 0, or the score of its generator; reference: 1 for the last line of the answer "
    "in the data; random: a control; or the name of a function that the recipe registers",
)
grpo.group_size = Key(16, "answers to each prompt; divides train.global_batch", least=2, most=100_000)
grpo.updates = Key(1, "steps that train on the same answers", above=0, most=1000)
grpo.temperature = Key(1.0, "temperature at which answers are drawn", least=0.01, most=1000)
grpo.advantage = Key(
    "deviation", "reward minus the mean of the group, divided by its deviation or not (mean)",
    choices=("deviation", "mean"),
)  # fmt: skip
grpo.average = Key("token", "whether every token or every answer has the same weight", choices=("token", "sequence"))
grpo.clip = Key(0.2, "the ratio of new to old probabilities is clipped to 1 - clip", above=0, most=1)
grpo.clip_high = Key(0.0, "it is clipped to 1 + clip_high; 0: as much as clip", most=1_000)
grpo.kl = Key(0.0, "weight of the KL divergence to the model that the run starts from; 0: no such model is kept")

error_correction = Section(KEYS, "error_correction")  # finding and repairing wrong tokens, see docs/reasoning.md
error_correction.use_error_correction = Key(
    False, "whether generate.py revises what it drew, by the module of the objective error_correction",
    scope=RESUME | READ | UNCOMPILED,
)  # fmt: skip
error_correction.num_layers = Key(2, "layers of the module, which see both sides of a token", above=0, most=4)
error_correction.use_mixture_density = Key(
    False, "whether the module also predicts a mixture density of the right token"
)
error_correction.memory_efficient = Key(
    False, "whether the backward pass computes the module's layers again instead of keeping what is inside them",
    scope=RESUME | READ,
)  # fmt: skip
error_correction.rate = Key(0.1, "share of the tokens that are replaced to train the module", above=0, most=0.5)
error_correction.joint_weight = Key(
    0.0, "weight of the module's loss, added to the model's own, which is then trained too; 0: the model is frozen",
    most=1_000,
)  # fmt: skip
error_correction.threshold = Key(
    0.7, "least confidence of a revision: its share of repairs among repairs and damages", above=0, most=1,
    scope=RESUME | READ,
)  # fmt: skip
