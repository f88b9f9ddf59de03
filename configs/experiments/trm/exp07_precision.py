# SPDX-License-Identifier: Apache-2.0
"""The compute type. float16 is refused, with what would work; it stays listed so that the group is complete."""

from configs.group import Group

GROUP = Group(
    question="Does bfloat16 cost accuracy against float32?",
    hypothesis="A recursion repeats rounding errors, and supervision corrects them.",
    expected="No difference beyond the spread over seeds.",
    analysis=(
        "Compare the two means with their errors: the question is whether a difference exists, so at least three "
        "seeds are needed, and an answer of no difference holds only to the size of the error. Compare chip-hours "
        "too: what bfloat16 saves is time and memory."
    ),
    troubleshooting=(
        "Do not set JAX_DEFAULT_MATMUL_PRECISION on a TPU: with default, the factors of products of a-float32 are "
        "rounded to bfloat16, and the two configurations hardly differ. "
        "float16 is refused and stays in the list with its reason: it needs loss scaling, and TPUs do not compute "
        "in it. It counts as refused, not as failed, and `retry` does not change that. A CPU computes bfloat16 "
        "slowly, so that hours from a laptop say nothing about a TPU."
    ),
    configurations={
        "a-float32": {"model.dtype": "float32"}, "b-bfloat16": {"model.dtype": "bfloat16"},
        "c-float16": {"model.dtype": "float16"},
    },
    mini={"a-float32": {}, "b-bfloat16": {"model.dtype": "bfloat16"}},
)  # fmt: skip
