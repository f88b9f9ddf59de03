# SPDX-License-Identifier: Apache-2.0
"""The optimizer. The shipped configurations had no key for it, so that only the moments' decays differed."""

from configs.group import Group


def adamw(beta2: float) -> dict:
    return {"optimizer.name": "adamw", "optimizer.beta2": beta2}


# Lion's updates are signs: a smaller learning rate with the same product of rate and decay (arXiv:2302.06675).
LION = {
    "optimizer.name": "lion", "optimizer.beta2": 0.99, "optimizer.learning_rate": 3e-5, "optimizer.weight_decay": 3.0,
}  # fmt: skip

GROUP = Group(
    question="Does the optimizer matter?",
    hypothesis="AdamATan2 needs no epsilon and bounds its updates, which helps where gradients are tiny.",
    expected="AdamW with the same decays comes within the spread over seeds.",
    analysis=(
        "Compare AdamATan2 with AdamW at the same decays (a and b) first: this isolates the update rule. The "
        "other AdamW trials change the decay of the second moment. Lion has its own learning rate and weight "
        "decay, so that it is a tuned alternative and no controlled change. No optimizer had its learning rate "
        "searched: a small difference may be one of tuning, see extra-learning-rate."
    ),
    troubleshooting=(
        "The shipped files had no key for the optimizer, so that b equalled a and e equalled c; figures from them "
        "compare nothing. AdamW divides by its epsilon where gradients are tiny: a loss that stands still from "
        "the start points there. If Lion diverges, lower its learning rate and raise its weight decay by the same "
        "factor."
    ),
    configurations={
        "a-adam-atan2": {}, "b-adamw-0.95": adamw(0.95), "c-adamw-0.99": adamw(0.99), "d-adamw-0.999": adamw(0.999),
        "e-lion": LION,
    },
    mini={"a-adam-atan2": {}, "b-adamw-0.95": adamw(0.95)},
)  # fmt: skip
