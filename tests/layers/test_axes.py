# SPDX-License-Identifier: Apache-2.0
"""A parameter without usable axis names is named with what would work, before a step is compiled."""

import jax.numpy as jnp
import pytest
from flax import nnx

from layers.axes import declared_axes
from parallelism.axis_rules import weight_shardings
from tests.support import one_device_mesh


def test_a_parameter_of_plain_flax_is_named():
    state = nnx.state(nnx.Dict(mine=nnx.Param(jnp.zeros((2, 3)))))
    with pytest.raises(ValueError, match=r"the parameter mine of shape \(2, 3\) has no axis names; a model "):
        declared_axes(state)


@pytest.mark.parametrize("names", [("embed",), ("embed", "hidden"), ("embed", None, None)])
def test_names_that_are_no_rules_or_too_few_are_named(names):
    with pytest.raises(ValueError, match=r"the parameter a\.w of shape \(2, 3\) has the axis names"):
        weight_shardings({("a", "w"): ((2, 3), names)}, one_device_mesh())
