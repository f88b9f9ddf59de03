# SPDX-License-Identifier: Apache-2.0
"""Which wrong operators would the tests miss? Mutation testing (DeMillo, Lipton and Sayward, 1978) of all rooms.

A mutant is a copy of this working tree in which one operator is wrong, such as `<=` for `<`. It is killed if a test
fails, of those that mirror the changed file or import it, or else of all in its room; slow tests are left out. Some
survivors compute the same, so that no test can kill them, and some are killed by tests of other rooms. If its tests
take more than MOST_SECONDS, a mutant counts apart: it may wait for ever, or the machine is slow.

The mutants are drawn at random, with a fixed seed. The copy has its own cache, because a wrong pipeline would store
wrong results; only compiled programs, whose names are digests of their content, are shared.
"""

import ast
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import support

from input_pipeline.cache import cache_path
from input_pipeline.tensorflow_import import tensorflow
from tests import warm

SEED, NUM_MUTANTS = 0, 3 if support.QUICK else 40
TESTS = support.ROOT / "tests"
# A library that is imported before pytest gives the root logger a handler, which tests would see on stderr.
PYTEST = "import logging, sys, pytest; logging.root.handlers.clear(); sys.exit(pytest.main(sys.argv[1:]))"
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.*?)(?: - .*)?$", re.MULTILINE)
PASSED, NONE_FOUND = 0, 5  # exit status of pytest
PASS, FAIL, TIMEOUT = "pass", "fail", "take too long"
MOST_SECONDS = 240  # of a run of tests
SWAPPED = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


class Mutant(NamedTuple):
    """A wrong operator: the file, the expression, its line from 1, and what takes its place."""

    file: pathlib.Path
    node: ast.expr
    wrong: str

    def __str__(self) -> str:
        return f"{self.file}:{self.node.lineno}: {ast.unparse(self.node)} -> {self.wrong}"


def wrong_version(node: ast.AST) -> str | None:
    """Return an expression with another operator; None if it has none that is known."""
    match node:
        case ast.Compare(left, [operator, *others], [*compared]) if type(operator) in SWAPPED:
            return ast.unparse(ast.Compare(left, [SWAPPED[type(operator)](), *others], compared))
        case ast.BinOp(left, operator, right) if type(operator) in SWAPPED and not is_text(left) and not is_text(right):
            return ast.unparse(ast.BinOp(left, SWAPPED[type(operator)](), right))
        case ast.BoolOp(operator, values):
            return ast.unparse(ast.BoolOp(SWAPPED[type(operator)](), values))
        case ast.UnaryOp(ast.Not(), operand):
            return f"bool({ast.unparse(operand)})"
        case ast.IfExp(test, body, orelse):
            return ast.unparse(ast.IfExp(test, orelse, body))
    return None


def is_text(node: ast.expr) -> bool:
    """Return whether an operand is surely a text, which has only one operator."""
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def expressions(node: ast.AST) -> Iterator[ast.AST]:
    """Yield what the body of a function consists of, without the inside of f-strings, whose positions are unknown."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.JoinedStr):
            yield child
            yield from expressions(child)


def mutants_of(file: pathlib.Path, source: str) -> list[Mutant]:
    """Return all mutants of a file."""
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    found = {  # those of a function in a function once
        (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset): Mutant(file, node, wrong)
        for function in functions for statement in function.body for node in [statement, *expressions(statement)]
        if (wrong := wrong_version(node))
    }  # fmt: skip
    return [*found.values()]


def planted(mutant: Mutant, source: str) -> str:
    """Return the source of a file with a mutant; positions of Python count bytes."""
    lines, node = source.encode().splitlines(keepends=True), mutant.node
    begin, end = (
        sum(map(len, lines[: line - 1])) + column
        for line, column in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
    )
    whole = source.encode()
    return (whole[:begin] + f"({mutant.wrong})".encode() + whole[end:]).decode()


def drawn(tree: pathlib.Path) -> list[Mutant]:
    """Return the mutants to try: of files in folders that have a folder of tests."""
    rooms = sorted(folder.name for folder in TESTS.iterdir() if folder.is_dir() and (tree / folder.name).is_dir())
    files = [path.relative_to(tree) for room in rooms for path in sorted((tree / room).rglob("*.py"))]
    everything = [mutant for file in files for mutant in mutants_of(file, (tree / file).read_text())]
    return random.Random(SEED).sample(everything, NUM_MUTANTS)


def tests_near(file: pathlib.Path) -> list[str]:
    """Return the tests that mirror a file or name its module."""
    package, name = ".".join(file.parts[:-1]), file.stem
    module = re.compile(rf"\b{package}\.{name}\b|\bfrom {package} import [^\n]*\b{name}\b")
    named = (path for path in sorted(TESTS.rglob("test_*.py")) if module.search(path.read_text()))
    mirrors = TESTS.rglob(f"test_{file.stem}.py")
    return [str(path.relative_to(support.ROOT)) for path in dict.fromkeys([*mirrors, *named])]


def copied(tree: pathlib.Path) -> pathlib.Path:
    """Copy the working tree, without ignored files, and make a cache for it; return the cache."""
    subprocess.run(["git", "clone", "--quiet", "--shared", str(support.ROOT), str(tree)], check=True)
    support.copy_tree(tree)
    (tree / ".venv").symlink_to(support.ROOT / ".venv")
    compiled, cache = cache_path("") / "tests" / "compiled", tree.with_name("cache")
    compiled.mkdir(parents=True, exist_ok=True)
    (cache / "torus" / "tests").mkdir(parents=True)
    (cache / "torus" / "tests" / "compiled").symlink_to(compiled)
    return cache


def template_in(tree: pathlib.Path, cache: pathlib.Path) -> warm.Template:
    """Return a template whose processes have imported the libraries and then import the copy's code."""
    os.environ |= {
        "XDG_CACHE_HOME": str(cache), "PYTHONDONTWRITEBYTECODE": "1",  # which would tell a change by time and size
        "JAX_COMPILATION_CACHE_DIR": str(cache / "torus" / "tests" / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }  # fmt: skip
    tensorflow()  # sets the variables by which it says nothing while it is imported
    return warm.template(tree, workspace=())


def judged(tests: Iterable[str], template: warm.Template) -> tuple[str, list[str]]:
    """Return PASS, FAIL or TIMEOUT, and the first test that fails in the copy, if it has a name.

    Slow tests are left out.
    """
    arguments = ["-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", "not slow", *tests]
    process = template.fork(["-c", PYTEST, *arguments], dict(os.environ))
    try:
        said, _ = process.communicate(MOST_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        return TIMEOUT, []
    return (PASS, []) if process.returncode in (PASSED, NONE_FOUND) else (FAIL, FAILED.findall(said))


def killed(mutant: Mutant, tree: pathlib.Path, template: warm.Template) -> tuple[str, list[str]]:
    """Plant a mutant; return which tests kill it, "near", "room", TIMEOUT or "" for none, and the first one's name."""
    path, room = tree / mutant.file, f"tests/{mutant.file.parts[0]}"
    whole = path.read_text()
    path.write_text(planted(mutant, whole))
    try:
        for where, tests in (("near", tests_near(mutant.file)), ("room", [room])):
            verdict, names = judged(tests, template) if tests else (PASS, [])
            if verdict != PASS:
                return TIMEOUT if verdict == TIMEOUT else where, names
        return "", []
    finally:
        path.write_text(whole)


def main() -> None:
    """Plant all mutants in turn; then run the tests that killed them without any mutant."""
    found, killers = {"near": [], "room": [], TIMEOUT: [], "": []}, set()
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder) / "tree"
        template = template_in(tree, copied(tree))
        for number, mutant in enumerate(drawn(tree), start=1):
            where, names = killed(mutant, tree, template)
            killers_named = ", ".join(names) or "an error"
            ending = {TIMEOUT: f"its tests {TIMEOUT}", "": "SURVIVES"}.get(where, f"killed by {killers_named}")
            print(f"{number} of {NUM_MUTANTS}: {mutant}: {ending}", flush=True)
            found[where].append(str(mutant))
            killers |= {*names}
        verdict, names = judged(sorted(killers), template) if killers else (PASS, [])
        if verdict != PASS:
            sys.exit(f"mutants: without any mutant, the tests that killed one {verdict}: {', '.join(names)}")
        template.close()
    figures = {
        "mutants": NUM_MUTANTS, "killed_by_tests_near": len(found["near"]),
        "killed_by_others_of_the_room": len(found["room"]), "timeouts": found[TIMEOUT], "survivors": found[""],
    }  # fmt: skip
    support.finish("mutants", figures)


if __name__ == "__main__":
    main()
