# SPDX-License-Identifier: Apache-2.0
"""The study of the Tiny Recursive Model on Sudoku-Extreme: 14 groups with 67 configurations, and four extra groups.

`fork` has the study's global batch of 6,144, `paper` the published 768, and `mini` Sudokus of 4 x 4 for a laptop.
`mini` has half of its recipe's width and steps: a trial takes 4 minutes on one core, and its baseline solves some three
boards of four, so that a change can help or hurt. `smoke` is `mini` with 40 steps: it shows that everything runs, and
answers nothing.
"""

from configs.group import MINI, Base, Suite

MINI_CHANGES = {
    "model.dtype": "float32", "model.embed_dim": 64, "model.mlp_dim": 256, "train.steps": 250, "train.eval_every": 50,
}  # fmt: skip

# The study compares precisions, so that the base names its own; "auto" would depend on the machine.
SUITE = Suite(
    bases={
        "fork": Base("configs/trm/sudoku.py", {"model.dtype": "bfloat16"}),
        "paper": Base("configs/trm/sudoku.py", {"model.dtype": "bfloat16", "train.global_batch": 768}),
        "mini": Base("configs/trm/sudoku_mini.py", MINI_CHANGES, size=MINI),
        "smoke": Base(
            "configs/trm/sudoku_mini.py",
            MINI_CHANGES | {"train.steps": 40, "train.eval_every": 20, "optimizer.warmup_steps": 8},
            size=MINI,
        ),
    },
    metric="eval_exact_accuracy",
    direction="maximize",
)
