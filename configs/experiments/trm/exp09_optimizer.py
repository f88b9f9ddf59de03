# SPDX-License-Identifier: Apache-2.0
"""The optimizer. The shipped configurations had no key for it, so that only the moments' decays differed."""

from configs.group import Group


def adamw(beta2: float) -> dict:
    """Return the keys of AdamW."""
    return {"optimizer.name": "adamw", "optimizer.beta2": beta2}


# Lion's updates are signs: a smaller learning rate with the same product of rate and decay (arXiv:2302.06675).
LION = {
    "optimizer.name": "lion", "optimizer.beta2": 0.99, "optimizer.learning_rate": 3e-5, "optimizer.weight_decay": 3.0,
}  # fmt: skip

GROUP = Group(
    question="Does the optimizer matter?",
    hypothesis="AdamATan2 needs no epsilon and bounds its updates, which helps where gradients are tiny.",
    expected="AdamW with the same decays comes within the spread over seeds.",
    configurations={
        "a-adam-atan2": {}, "b-adamw-0.95": adamw(0.95), "c-adamw-0.99": adamw(0.99), "d-adamw-0.999": adamw(0.999),
        "e-lion": LION,
    },
    mini={"a-adam-atan2": {}, "b-adamw-0.95": adamw(0.95)},
)  # fmt: skip
