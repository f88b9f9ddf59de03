# SPDX-License-Identifier: Apache-2.0
"""What shortens training or helps its result, each alone; not counted among the 67."""

from configs.group import Group

MUON = {"optimizer.name": "muon", "optimizer.learning_rate": 2.5e-3}
LEVERS = {
    "baseline": {},
    "random-start": {"supervision.random_start": 1.0},
    "path-noise": {"supervision.random_start": 1.0, "supervision.path_noise": 0.01, "model.update_rate": 0.95},
    "parallel-4": {"supervision.random_start": 1.0, "supervision.parallel": 4},
    "convolution": {"model.convolution": 2},
    "two-cycles": {"model.gradient_cycles": 2},
    "smoothing": {"supervision.label_smoothing": 0.2, "supervision.loss": "softmax"},
    "muon": MUON,
}

GROUP = Group(
    question="Which of the newer ways of training help, at this batch?",
    hypothesis="Latents in parallel and Muon help most, as in arXiv:2601.19085; noise pays only with breadth.",
    expected="Published for the whole recipes: 96.9 % in one pass (fast), 99.8 % with depth and breadth (equilibrium).",
    analysis=(
        "Compare at equal FLOPs and not at equal steps: parallel-4 costs four times as much a step and two-cycles more "
        "than the baseline. The curriculum has a group of its own, contrib01. random-start and path-noise change what "
        "breadth can reach, so compare the tables of accuracy by depth and breadth too."
    ),
    troubleshooting=(
        "Muon's rate is on another scale than that of AdamATan2; an accuracy of 0 points at it. With random starts the "
        "answer depends on the draw, so that one pass is less accurate than a vote."
    ),
    configurations=LEVERS,
    mini=LEVERS | {"muon": MUON | {"optimizer.learning_rate": 1e-2}},
    counted=False,
)
