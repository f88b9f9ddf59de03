# SPDX-License-Identifier: Apache-2.0
"""Which texts of a model may be evaluated as Python: those that can only build lists, or compute a number or a formula.

Some generators of reasoning-gym evaluate an answer, which could otherwise call anything.
"""

import ast
import math

LISTS = (ast.Expression, ast.Load, ast.Constant, ast.List, ast.Tuple, ast.Name, ast.UnaryOp, ast.unaryop)
FORMULAS = (*LISTS[:3], *LISTS[5:], ast.BinOp, ast.operator, ast.Call)
FUNCTIONS = "sin", "cos", "tan", "exp", "log", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh"
LARGEST_POWER = 10_000  # the product of all exponents of a formula, each plus 1


def is_list(text: str) -> bool:
    """Return whether evaluating a text can only build lists of constants, read a name, or fail."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True  # it fails
    return all(isinstance(node, LISTS) for node in ast.walk(tree))


def is_formula(text: str) -> bool:
    """Return whether a text is numbers, names and functions of mathematics, with powers of a limited size."""
    try:
        nodes = list(ast.walk(ast.parse(text.strip(), mode="eval")))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return all(map(_computes, nodes)) and math.prod(_size(power.right) for power in _powers(nodes)) <= LARGEST_POWER


def is_arithmetic(text: str) -> bool:
    """Return whether a text is a formula of whole numbers, without functions: its value can be written out as digits.

    The float 1e9999999999 and exp(9999999999) are formulas whose digits would take all memory, or not end.
    """
    return is_formula(text) and all(map(_is_whole, ast.walk(ast.parse(text.strip(), mode="eval"))))


def _computes(node: ast.AST) -> bool:
    if isinstance(node, ast.Constant):  # sympy would evaluate a string
        return type(node.value) in (int, float)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in FUNCTIONS and not node.keywords
    return isinstance(node, FORMULAS) and not isinstance(node, ast.LShift)


def _is_whole(node: ast.AST) -> bool:
    return type(node.value) is int if isinstance(node, ast.Constant) else not isinstance(node, ast.Name | ast.Call)


def _powers(nodes: list[ast.AST]) -> list[ast.BinOp]:
    return [node for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow)]


def _size(exponent: ast.expr) -> float:
    """Return a bound on an exponent, at least 1; infinity if it has a power that is not a name to a number.

    A name may mean a number, such as E: x**(E**E**E**E**E**E) would not end.
    """
    nodes = list(ast.walk(exponent))
    if not all(isinstance(power.left, ast.Name) and isinstance(power.right, ast.Constant) for power in _powers(nodes)):
        return math.inf
    return math.prod(1 + abs(node.value) for node in nodes if isinstance(node, ast.Constant))
