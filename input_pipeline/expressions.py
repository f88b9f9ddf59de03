# SPDX-License-Identifier: Apache-2.0
"""Which texts of a model may be evaluated as Python: those that can only build lists, or compute a number or a formula.

Some generators of reasoning-gym evaluate an answer, which could otherwise call anything.
"""

import ast
import math
from collections.abc import Iterator

LISTS = (ast.Expression, ast.Load, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.UnaryOp, ast.unaryop)
FORMULAS = (*LISTS[:3], *LISTS[5:], ast.BinOp, ast.operator, ast.Call)
FUNCTIONS = "sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh"
EXPONENTIALS = "exp", "sinh", "cosh"  # functions whose argument is an exponent
LARGEST_POWER = 10_000  # the product of all exponents of a formula, each plus 1


def is_list(text: str) -> bool:
    """Return whether evaluating a text can only build lists of constants, read a name, or fail."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # it fails
    return all(isinstance(node, LISTS) for node in ast.walk(tree))


def is_formula(text: str) -> bool:
    """Return whether a text is finite numbers, names and functions of mathematics, with powers of a limited size."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(map(_computes, nodes)) and math.prod(map(_size, _exponents(nodes))) <= LARGEST_POWER


def _computes(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):  # sympy would evaluate a string; int() of its 1e9999999999 takes all memory
        return type(node.value) in (int, float) and node.value < math.inf
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    return isinstance(node, FORMULAS) and not isinstance(node, ast.LShift)


def _exponents(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Yield the exponents of powers and of exponential functions among the nodes of a formula."""
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
            yield node.right
        elif isinstance(node, ast.Call) and node.func.id in EXPONENTIALS:
            yield from node.args


def _size(exponent: ast.expr) -> float:
    """Return a bound of an exponent, at least 1; infinity if it has an exponent itself."""
    nodes = list(ast.walk(exponent))
    if any(_exponents(nodes)):
        return math.inf
    return math.prod(1 + node.value for node in nodes if isinstance(node, ast.Constant))
