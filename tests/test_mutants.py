# SPDX-License-Identifier: Apache-2.0
"""The mutants of benchmarks/mutants.py: each is a program in which one operator is wrong."""

import ast
import pathlib
import subprocess
import types

import pytest

from tests.support import ROOT

SOURCE = '''
def function(a: int | None, b="ä" + "ö"):
    """a < b"""
    c = "ä" if a < b and not a else a // 2
    return f"{a + b}" + c if a in (c or [])[1:] else None
'''
WRONG = {
    "a <= b", "a < b or not a", "bool(a)", "a // 2 if a < b and (not a) else 'ä'", "a * 2", "a not in (c or [])[1:]",
    "c and []", "None if a in (c or [])[1:] else f'{a + b}' + c",
}  # fmt: skip


def test_every_operator_of_a_function_has_a_mutant_and_nothing_else_changes(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mutants as benchmark

    found = benchmark.mutants_of(pathlib.Path("file.py"), SOURCE)
    assert {mutant.wrong for mutant in found} == WRONG
    programs = {mutant.wrong: benchmark.planted(mutant, SOURCE) for mutant in found}
    assert programs["a * 2"] == SOURCE.replace("a // 2", "(a * 2)")
    assert programs["bool(a)"] == SOURCE.replace("not a", "(bool(a))")
    for program in programs.values():
        compile(program, "file.py", "exec")


def test_the_tests_of_a_file_are_its_mirror_and_those_that_import_it(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mutants as benchmark

    near = benchmark.tests_near(pathlib.Path("training/step.py"))
    assert near[0] == "tests/training/test_step.py" and "tests/training/test_noise_scale.py" in near
    assert "tests/test_readme.py" not in near


@pytest.mark.parametrize(
    ("status", "verdict"), [(0, ("", [])), (1, ("near", ["tests/test_a.py::test_b"])), (None, ("take too long", []))]
)
def test_a_mutant_whose_tests_do_not_end_is_not_killed(status, verdict, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import mutants as benchmark

    def communicate(seconds):
        if status is None:
            raise subprocess.TimeoutExpired("pytest", seconds)
        return "FAILED tests/test_a.py::test_b - assert 0\n", ""

    process = types.SimpleNamespace(communicate=communicate, returncode=status, kill=lambda: None)
    template = types.SimpleNamespace(fork=lambda command, environment: process)
    monkeypatch.setattr(benchmark, "tests_near", lambda file: ["tests/test_a.py"])
    (tmp_path / "file.py").write_text("a < b\n")
    mutant = benchmark.Mutant(pathlib.Path("file.py"), ast.parse("a < b").body[0].value, "a <= b")
    assert benchmark.killed(mutant, tmp_path, template) == verdict
    assert (tmp_path / "file.py").read_text() == "a < b\n"
