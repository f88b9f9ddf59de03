# SPDX-License-Identifier: Apache-2.0
"""The study of the Tiny Recursive Model on Sudoku-Extreme: 14 groups with 67 configurations, and two extra groups.

`fork` has the study's global batch of 6,144, `paper` the published 768, and `mini` Sudokus of 4 x 4 for a laptop.
`smoke` is `mini` with 40 of its 500 steps: it shows that everything runs, and answers nothing.
"""

from configs.group import MINI, Base, Suite

# The study compares precisions, so that the base names its own; "auto" would depend on the machine.
SUITE = Suite(
    bases={
        "fork": Base("configs/trm/sudoku.py", {"model.dtype": "bfloat16"}),
        "paper": Base("configs/trm/sudoku.py", {"model.dtype": "bfloat16", "train.global_batch": 768}),
        "mini": Base("configs/trm/sudoku_mini.py", {"model.dtype": "float32"}, size=MINI),
        "smoke": Base(
            "configs/trm/sudoku_mini.py",
            {"model.dtype": "float32", "train.steps": 40, "train.eval_every": 20, "optimizer.warmup_steps": 8},
            size=MINI,
        ),
    },
    metric="eval_exact_accuracy",
    direction="maximize",
)
