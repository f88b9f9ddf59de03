# SPDX-License-Identifier: Apache-2.0
"""Classification: its figures are sums over rows with a label, and its loss counts a row as its tokens."""

import jax
import jax.numpy as jnp
import numpy as np

from objectives.classification import Classification
from tests.support import assert_close

OBJECTIVE = Classification(rows=4, length=3, num_classes=3, levels=5)
LOGITS = jnp.array([[2.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.0, 0.0, 3.0], [9.0, 0.0, 0.0]])
BATCH = {"inputs": jnp.zeros((4, 3), jnp.int32), "labels": jnp.array([0, 2, 2, -1])}  # the last row is padding


def test_loss_and_accuracy_are_sums_over_the_rows_that_have_a_label():
    found = OBJECTIVE.evaluate(lambda inputs: LOGITS, BATCH)
    log_shares = np.asarray(jax.nn.log_softmax(LOGITS))
    expected = {"loss": (-(log_shares[0, 0] + log_shares[1, 2] + log_shares[2, 2]), 3.0), "accuracy": (2.0, 3.0)}
    assert_close(found, expected)


def test_a_row_has_the_weight_of_its_tokens():
    (total, weight), (carry, scalars) = OBJECTIVE.loss(lambda inputs: LOGITS, {}, BATCH, None)
    assert_close((total, weight), tuple(3 * part for part in scalars["loss"]))
    assert carry == {} and weight == 9
