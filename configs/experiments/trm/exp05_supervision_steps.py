# SPDX-License-Identifier: Apache-2.0
"""The most supervision steps on a puzzle, in training and in evaluation."""

from configs.group import Group

GROUP = Group(
    question="How many supervision steps does a puzzle need?",
    hypothesis="More steps correct more errors of earlier ones.",
    expected="Accuracy rises up to 16 steps.",
    axis="supervision.max_steps",
    analysis=(
        "Read the fit over steps, and then `steps` of the training lines in metrics.jsonl: the mean steps of the "
        "puzzles that have ended. Evaluation uses as many steps as training may, so that a trial with 32 steps "
        "also gets more compute at test time. A row of the batch is replaced when its puzzle halts, so that "
        "trials with few steps see more puzzles in the same updates."
    ),
    troubleshooting=(
        "Evaluation takes time in proportion to the steps: 32 steps double that of the baseline, and on a laptop "
        "they may take longer than training. If `steps` of the training lines equals the most steps in a trial, "
        "nearly every puzzle is cut off there, and a larger number is worth a trial."
    ),
    configurations={
        f"{letter}-{steps}": {"supervision.max_steps": steps}
        for letter, steps in zip("abcdef", (4, 8, 12, 16, 24, 32), strict=True)
    },
    mini={"a-2": {"supervision.max_steps": 2}, "b-8": {}},
)
