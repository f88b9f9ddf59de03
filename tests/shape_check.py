# SPDX-License-Identifier: Apache-2.0
"""Check the shape suffixes of local variables, such as _BTD, at the end of each function of the checked rooms.

The check is compiled into these modules when tests import them. A tracer (`sys.settrace`) would see the same, but it
would slow down every line of Python, and most of all the tracing of a model by jax.
"""

import ast
import importlib.machinery
import re
import sys

import jax
import numpy as np

ROOMS = ("layers", "models", "objectives")
SUFFIX = re.compile(r"(?:.*_)?([BTSDFNKGMHECVL]+)")
CHECK = "_check_shapes_at_return"


def check(local_variables: dict) -> None:
    """Assert that a local named x_BTD has three dimensions, and that a letter means one size in the whole frame."""
    sizes = {}
    for name, value in local_variables.items():
        letters = SUFFIX.fullmatch(name)
        if not letters or not isinstance(value, (jax.Array, np.ndarray, int)):
            continue
        shape = (value,) if isinstance(value, int) else value.shape
        where = f"{sys._getframe(1).f_code.co_qualname} returns with {name} of shape {shape}"
        assert len(letters[1]) == len(shape), where
        for letter, size in zip(letters[1], shape, strict=True):
            first, known = sizes.setdefault(letter, (name, size))
            assert known == size, f"{where}, but {letter} is {known} in {first}"


class _AtReturn(ast.NodeTransformer):
    """Put `try: ... finally: check(locals())` around the body of each function."""

    def visit_FunctionDef(self, node):
        self.generic_visit(node)
        start = 1 if ast.get_docstring(node, clean=False) is not None else 0
        if body := node.body[start:]:
            seen = ast.Call(ast.Name("locals", ast.Load()), [], [])
            ending = ast.Expr(ast.Call(ast.Name(CHECK, ast.Load()), [seen], []))
            node.body[start:] = [ast.Try(body, handlers=[], orelse=[], finalbody=[ending])]
        return node


def compiled(source: str | bytes, path: str):
    """Return the code of a module whose functions call what the module names CHECK."""
    tree = _AtReturn().visit(ast.parse(source, path))
    return compile(ast.fix_missing_locations(tree), path, "exec", dont_inherit=True)


class _Loader(importlib.machinery.SourceFileLoader):
    def get_code(self, fullname):  # neither from nor into __pycache__, whose files runs use
        return compiled(self.get_data(self.path), self.path)

    def exec_module(self, module):
        setattr(module, CHECK, check)
        super().exec_module(module)


class _Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] in ROOMS:
            spec = importlib.machinery.PathFinder.find_spec(name, path, target)
            if spec and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
                spec.loader = _Loader(spec.loader.name, spec.loader.path)
            return spec


def install() -> None:
    """Check the modules of the rooms that are imported from now on, which has to be all of them."""
    early = [name for name in sys.modules if name.partition(".")[0] in ROOMS]
    assert not early, f"{early} were imported before the check of their shapes was installed"
    sys.meta_path.insert(0, _Finder)
