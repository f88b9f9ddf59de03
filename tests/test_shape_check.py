# SPDX-License-Identifier: Apache-2.0
"""The check of shape suffixes, on functions compiled as those of layers/ are."""

import importlib
import inspect
import types

import jax
import jax.numpy as jnp
import pytest

from models import decoder_lm
from tests import shape_check, support


def planted(body: str):
    """Return a function of x_BTD, compiled as if it stood in a file of layers."""
    names = {"jnp": jnp, shape_check.CHECK: shape_check.check}
    exec(shape_check.compiled(f"def planted(x_BTD):\n    {body}\n    return x_BTD", "layers/planted.py"), names)
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


def test_right_suffixes_pass():
    x = jnp.ones((2, 3, 5))
    planted("B, T, D = x_BTD.shape; y_DB = x_BTD[:, 0].T; last_BT = x_BTD[..., 0]")(x)


def test_every_function_of_the_rooms_is_checked_nested_ones_too_and_no_other():
    def codes(code):
        return [code, *(inner for c in code.co_consts if isinstance(c, types.CodeType) for inner in codes(c))]

    def of(function):
        return [shape_check.CHECK in code.co_names for code in codes(function.__code__) if code.co_name.isidentifier()]

    for room in shape_check.ROOMS:
        for path in (support.ROOT / room).rglob("*.py"):
            module = importlib.import_module(".".join(path.relative_to(support.ROOT).with_suffix("").parts))
            own = [value for value in vars(module).values() if inspect.getmodule(value) is module]
            methods = [method for cls in own if inspect.isclass(cls) for method in vars(cls).values()]
            functions = [f for f in own + methods if inspect.isfunction(f) and f.__code__.co_filename == str(path)]
            assert all(all(of(function)) for function in functions), path
    assert of(decoder_lm.windows) and all(of(decoder_lm.windows))
    assert of(support.make_model) and not any(of(support.make_model))


def test_a_docstring_and_the_lines_of_an_error_stay_where_they_were():
    assert decoder_lm.windows.__doc__.startswith("Return the sliding window of each")
    with pytest.raises(ZeroDivisionError) as caught:
        planted("1 / 0")(jnp.ones((1, 1, 1)))
    assert caught.traceback[-1].lineno == 1
