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
    analysis=(
        "Compare the MLP with the best of the four encodings, then the encodings among each other. Attention has "
        "6.8 million parameters and the MLP 5.0, so that a win of the MLP is not one of size. On boards of 4 x 4 "
        "all encodings may reach the same accuracy, and the group answers nothing there."
    ),
    troubleshooting=(
        "The shipped files of this group varied the learning rate and not the encoding; that study is extra- "
        "learning-rate. Without positions (d-none) attention cannot tell cells apart, and an accuracy of 0 is the "
        "expected result. Attention takes more memory for each board than the MLP; reduce nothing for one "
        "configuration alone, or they do not compare."
    ),
    configurations={
        "a-rope": attention("rope"), "b-learned": attention("learned"), "c-sinusoidal": attention("sinusoidal"),
        "d-none": attention("none"), "e-mlp": {"model.mixer": "mlp", "model.positions": "none"},
    },
    mini={"a-rope": attention("rope"), "e-mlp": {}},
)  # fmt: skip
