# SPDX-License-Identifier: Apache-2.0
"""Meta-learning as a share of language modelling: does a model adapt better to a document by one gradient step?

A quarter of the rows are tasks: adapt to the first half of a window by first-order MAML, predict the second half.
Expected: `after_adaptation` below `before_adaptation` on held-out documents. Cost: a few minutes on two CPU cores.
Command: python train.py --config=configs/meta_text.py --workdir=runs/meta_text
"""

from configs import tiny


def get_config():
    config = tiny.get_config()
    config.train.objective = "meta_language_modeling"
    config.meta.method = "first_order_maml"
    config.meta.share = 0.25
    config.meta.eval_steps = 1
    return config
