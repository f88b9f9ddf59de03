# SPDX-License-Identifier: Apache-2.0
"""How positions are encoded. The shipped configurations were a study of learning rates, see extra_learning_rate.py."""

from configs.group import Group


def attention(positions: str) -> dict:
    """Return the keys of a network that mixes cells by attention."""
    return {"model.mixer": "attention", "model.positions": positions}


GROUP = Group(
    question="Which encoding of positions do small boards need?",
    hypothesis="On 81 cells an MLP over positions learns the geometry that attention has to be given.",
    expected="The MLP wins with 87.4 % against 74.7 % of attention with rotary positions.",
    configurations={
        "a-rope": attention("rope"), "b-learned": attention("learned"), "c-sinusoidal": attention("sinusoidal"),
        "d-none": attention("none"), "e-mlp": {"model.mixer": "mlp", "model.positions": "none"},
    },
    mini={"a-rope": attention("rope"), "e-mlp": {}},
)  # fmt: skip
