# SPDX-License-Identifier: Apache-2.0
"""Learning rates: what was shipped as the group of position encodings; it is not counted among the 67."""

from configs.group import Group


def rate(peak: float, final_fraction: float) -> dict:
    """Return the keys of a learning rate that ends at a fraction of its peak."""
    return {"optimizer.learning_rate": peak, "optimizer.final_fraction": final_fraction}


GROUP = Group(
    question="Which learning rate is best, and does it help to lower it?",
    hypothesis="A constant 1e-4 is near the best; a cosine helps the last updates.",
    expected="No difference beyond the spread over seeds within a factor of three.",
    analysis=(
        "Compare the three constant rates first, and then the two cosines with the constant 1e-4. A low rate "
        "needs longer: if its learning curve still rises at the end, the comparison is one of length and not of "
        "rates."
    ),
    troubleshooting=(
        "A loss that is not finite at 3e-4 is an answer of this group; the trial has failed with that reason and "
        "`retry` would only repeat it. The rate of the puzzle embedding does not change here."
    ),
    configurations={
        "a-3e-5": rate(3e-5, 1.0), "b-1e-4": rate(1e-4, 1.0), "c-3e-4": rate(3e-4, 1.0),
        "d-cosine-0.1": rate(1e-4, 0.1), "e-cosine-0.01": rate(1e-4, 0.01),
    },
    counted=False,
)  # fmt: skip
