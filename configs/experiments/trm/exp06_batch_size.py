# SPDX-License-Identifier: Apache-2.0
"""The global batch, with learning rates that grow by its square root. The number of puzzles seen does not change."""

import math

from configs.group import Group


def batch(size: int, **more: int) -> dict:
    """Return the keys of a global batch and its learning rates; 6,144 has 1e-4."""
    rate = float(f"{1e-4 * math.sqrt(size / 6144):.4g}")
    keys = {"train.global_batch": size, "optimizer.learning_rate": rate, "optimizer.table_learning_rate": rate}
    return keys | {f"optimizer.{name}": value for name, value in more.items()}


GROUP = Group(
    question="How large may a batch be before fewer updates cost accuracy?",
    hypothesis="The square-root rule holds until too few updates are left.",
    expected="Up to 6,144 there is little loss; 49,152 has 1,017 updates, which are too few.",
    axis="train.global_batch",
    analysis=(
        "Compare the table at equal puzzles seen: the updates fall from 32,552 to 1,017. The slope of the fit is "
        "that of batch and updates together. Curves over steps mislead here, because a step of 49,152 sees 32 "
        "times the puzzles of a step of 1,536; compare their ends. The two largest batches have a shorter warm- "
        "up, so that they are a change of two keys."
    ),
    troubleshooting=(
        "49,152 rows need 8 times the activations of 6,144: on a small slice set "
        "--config.train.gradient_accumulation=8, which computes the same update up to rounding. The shipped files "
        "of the two largest batches had been cut to copies of 12,288; figures from them are those of 12,288. If a "
        "trial diverges in its first updates, the square-root rule gave too large a rate."
    ),
    # 24,576 has 2,034 updates and 49,152 has 1,017, so that their warm-up is a tenth of these and not 2,000.
    configurations={
        "a-1536": batch(1536), "b-3072": batch(3072), "c-6144": batch(6144), "d-12288": batch(12288),
        "e-24576": batch(24576, warmup_steps=203), "f-49152": batch(49152, warmup_steps=101),
    },
    mini={"a-32": {"train.global_batch": 32, "optimizer.learning_rate": 5e-4}, "b-128": {}},
)  # fmt: skip
