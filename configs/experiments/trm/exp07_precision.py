# SPDX-License-Identifier: Apache-2.0
"""The compute type. float16 is refused, with what would work; it stays listed so that the group is complete."""

from configs.group import Group

GROUP = Group(
    question="Does bfloat16 cost accuracy against float32?",
    hypothesis="A recursion repeats rounding errors, and supervision corrects them.",
    expected="No difference beyond the spread over seeds.",
    configurations={
        "a-float32": {"model.dtype": "float32"}, "b-bfloat16": {"model.dtype": "bfloat16"},
        "c-float16": {"model.dtype": "float16"},
    },
    mini={"a-float32": {}, "b-bfloat16": {"model.dtype": "bfloat16"}},
)  # fmt: skip
