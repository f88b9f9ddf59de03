# SPDX-License-Identifier: Apache-2.0
"""Texts of a model that may be evaluated, and those that may not."""

import pytest

from input_pipeline.tasks.expressions import is_arithmetic, is_formula, is_list


@pytest.mark.parametrize("text", ["[[1, 0], [0, 1]]", "['A', 'B']", "ABCDE", "Q _ _\n_ Q _", "1 2 3", "-4", ""])
def test_lists_of_constants_are_allowed(text):
    assert is_list(text)


@pytest.mark.parametrize("text", ["exit()", "[0] * 10**9", "a.b", "[x for x in y]", "f'{exit()}'", "lambda: 0", "a[0]"])
def test_what_could_do_more_than_build_a_list_is_not(text):
    assert not is_list(text)


@pytest.mark.parametrize("text", [
    "(50 + 3)*4 - 25/5", "2*x**3/3 + sin(2*x) - C", "-x**(-2)", "exp(x)*E**x", "x**y", "x**(1/2)",
    "E**(3*x**2 + 2*x)",
])  # fmt: skip
def test_formulas_are_allowed(text):
    assert is_formula(text)


@pytest.mark.parametrize("text", [
    "9**9**9", "9**99999", "9**x**(9**9)", "x**(E**E**E**E**E**E)",
    "((9**99)**99)**99", "2**(9*9999)", "1 << 99999999", "sin('exit()')", "exit()", "[1]*9",
    "x.args", "sin(x, evaluate=1)", "5!", "x = 3", "", "1 if x else 2",
])  # fmt: skip
def test_other_texts_and_large_powers_are_not(text):
    assert not is_formula(text)


@pytest.mark.parametrize("text", ["(50 + 3)*4 - 25/5", "-2**3 + 4", "7"])
def test_arithmetic_is_whole_numbers(text):
    assert is_arithmetic(text)


@pytest.mark.parametrize("text", ["1e9999999999", "2**(1/1e-12)", "exp(9999999999)", "24.0", "x", "9**9**9", "(", ""])
def test_numbers_that_could_have_any_number_of_digits_are_no_arithmetic(text):
    assert not is_arithmetic(text)
