# SPDX-License-Identifier: Apache-2.0
"""The keys of meta-learning and of learning for long on changing data; configs/base.py adds them to its own."""

from configs.key import READ, RESUME, Key, Section

KEYS: dict[str, Key] = {}  # by dotted name

meta = Section(KEYS, "meta")  # of the objectives "meta_learning" and "meta_language_modeling"
meta.method = Key(
    "maml", "how a model learns a task: by gradient steps (the first three), by class means, by reading its examples",
    choices=("maml", "first_order_maml", "reptile", "prototypical", "in_context"),
)  # fmt: skip
meta.inner_steps = Key(
    1, "gradient steps on a task in training; 0: none, which is plain training; reptile needs one", most=1_000
)
meta.eval_steps = Key(5, "gradient steps on a held-out task in evaluation", most=1_000, scope=RESUME | READ)
meta.inner_rate = Key(0.01, "step size of these gradient steps", above=0)
meta.learn_rates = Key(False, "whether each entry of a weight has a learned factor on inner_rate (Meta-SGD)")
meta.support = Key(10, "first examples of a task, to learn from; the others are its query", above=0, most=1_000_000)
meta.loss = Key("squared_error", "loss of an example", choices=("squared_error", "cross_entropy"))
meta.share = Key(
    0.25, "share of the rows of a batch of text that are tasks, rounded to whole rows of a device's microbatch, at "
    "least one; the others are language modelling", above=0, most=1,
)  # fmt: skip

plasticity = Section(KEYS, "plasticity")  # so that a network that is trained for long, on changing data, still learns
plasticity.method = Key(
    "none", "what keeps the network able to learn, see docs/plasticity.md",
    choices=("none", "continual_backprop", "redo", "l2_init", "shrink_perturb", "redraw"),
)  # fmt: skip
plasticity.rate = Key(
    1e-4, "share of the mature hidden units that continual_backprop and redraw replace in a step", most=1
)
plasticity.maturity = Key(100, "steps after which a new hidden unit may be replaced")
plasticity.decay = Key(0.99, "decay of the running means of activations and utilities", below=1)
plasticity.dormant_below = Key(0.025, "a hidden unit is dormant up to this fraction of its layer's mean |activation|")
plasticity.every = Key(1000, "steps between two applications of redo or shrink_perturb", above=0)
plasticity.strength = Key(1e-3, "weight of |theta - theta_0|^2 in the loss, of l2_init")
plasticity.shrink = Key(0.1, "fraction by which shrink_perturb shrinks the weights", most=1)
plasticity.perturb = Key(0.01, "factor of newly drawn initial weights that shrink_perturb adds")
plasticity.measure = Key(
    0, "steps between measurements of the effective rank of hidden units; above 0, each step also reports "
    "dormant_share and weight_norm; 0: off",
)  # fmt: skip
