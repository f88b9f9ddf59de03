# SPDX-License-Identifier: Apache-2.0
"""The check of shape suffixes, on functions that pretend to stand in layers/."""

import jax
import jax.numpy as jnp
import pytest

from tests.support import ROOT


def planted(body: str, folder: str = "layers"):
    """Return a function of x_BTD, compiled as if it stood in a file of `folder`."""
    names = {"jnp": jnp}
    exec(compile(f"def planted(x_BTD):\n    {body}\n    return x_BTD", ROOT / folder / "planted.py", "exec"), names)
    return names["planted"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        ("y_BT = x_BTD", "y_BT of shape"),
        ("y_BDT = x_BTD", "but [DT] is"),
        ("N = x_BTD.shape[0]; y_NTD = x_BTD[1:]", "but N is 2"),
        ("y_BTD = jnp.concatenate([x_BTD, x_BTD])", "but B is 2"),
    ],
    ids=["wrong rank", "swapped dims", "wrong size", "batch grown"],
)
def test_a_wrong_suffix_fails_eagerly_and_under_jit(body, complaint):
    x = jnp.ones((2, 3, 5))
    with pytest.raises(AssertionError, match=complaint):
        jax.jit(planted(body))(x)


def test_right_suffixes_and_other_folders_pass():
    x = jnp.ones((2, 3, 5))
    planted("B, T, D = x_BTD.shape; y_DB = x_BTD[:, 0].T; last_BT = x_BTD[..., 0]")(x)
    planted("y_BT = x_BTD", "reasoning")(x)
