# SPDX-License-Identifier: Apache-2.0
"""The faults of benchmarks/planted_faults.py are still faults of the code as it is."""

import ast

import pytest

from tests.support import ROOT


def test_every_fault_can_be_planted_and_has_tests_to_notice_it(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import planted_faults as benchmark

    for fault in benchmark.FAULTS:
        whole = (ROOT / fault.file).read_text()
        planted = benchmark.planted_in(whole, fault)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(whole)), fault.what  # a program, and another one
        for file, _, test in (name.partition("::") for name in fault.tests):
            assert f"def {test}" in (ROOT / file).read_text(), fault.what
    with pytest.raises(ValueError, match=r"has .* 0 times, not once; mend the table"):
        benchmark.planted_in("", benchmark.FAULTS[0])
