# SPDX-License-Identifier: Apache-2.0
"""Width of the model. The number of heads has no effect here, because an MLP mixes the cells."""

from configs.group import Group


def width(dim: int, heads: int) -> dict:
    """Return the keys of a model of this width; the MLP has 4 * 2/3 of it, in steps of 256."""
    mlp = 256 * -(-round(4 * dim * 2 / 3) // 256)
    return {
        "model.embed_dim": dim, "model.num_heads": heads, "model.num_kv_heads": heads, "model.mlp_dim": mlp,
        "model.puzzle_dim": dim,
    }  # fmt: skip


GROUP = Group(
    question="How does exact accuracy depend on the width of the model?",
    hypothesis="A wider network learns more from the same puzzles until it overfits 1,000 of them.",
    expected="Accuracy rises from 1.48 to 5.03 million parameters and then levels off.",
    axis="parameters",
    analysis=(
        "Read the scaling fit over parameters first. If it bends, the table says where accuracy stops to rise: "
        "compare neighbouring widths with their errors. Compare the learning curves too, because a wide model "
        "that is still rising at its last evaluation has not levelled off. The published sizes of 1.8 to 64 "
        "million are those of attention; with an MLP over cells the models have 1.48 to 38.1 million, which the "
        "fit uses."
    ),
    troubleshooting=(
        "The width of 1,536 has 7.6 times the parameters of the baseline: if it runs out of memory, use a slice "
        "with more chips, or --config.train.gradient_accumulation=4. All widths share one learning rate; a wide "
        "model whose loss jumps after the warm-up needs a smaller one, and then compares learning rates and "
        "widths at once. The number of heads changes nothing here."
    ),
    configurations={
        "a-256": width(256, 4),
        "b-384": width(384, 6),
        "c-512": width(512, 8),
        "d-768": width(768, 8),
        "e-1024": width(1024, 8),
        "f-1536": width(1536, 8),
    },
    mini={"a-64": {}, "b-128": width(128, 4) | {"model.mlp_dim": 512, "model.puzzle_dim": 0}},
)
