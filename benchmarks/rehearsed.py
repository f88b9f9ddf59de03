# SPDX-License-Identifier: Apache-2.0
"""Steps that are compiled for a slice on a machine without one; for the benchmarks that rehearse."""

import sys
from collections.abc import Iterator, Sequence

import support

from input_pipeline.cache import cache_folder
from rehearsal import record
from rehearsal.compiler import Compiled, Compiler
from rehearsal.estimate import estimate


def compiler(program: str = "", precision: str = "") -> Compiler:
    """Return the compiler with the cache of all rehearsals."""
    return Compiler(cache_folder("") / "rehearsals", program=program, precision=precision)


def estimated(case: record.Case, precision: str = "") -> dict:
    """Return the estimate of a step; `precision` is that of a Compiler."""
    loaded = case.load()
    return estimate(compiler(precision=precision).compile(loaded.config, loaded.topology))


def compiled(cases: Sequence[record.Case]) -> Iterator[tuple[record.Case, Compiled]]:
    """Yield each step with its program as soon as it is ready; one that does not compile ends the benchmark."""
    loaded = [case.load() for case in cases]
    for index, found in compiler().compile_all([(one.config, one.topology) for one in loaded]):
        if isinstance(found, Exception):
            sys.exit(f"{cases[index].name}: {found}")
        yield cases[index], found


def recorded(names: Sequence[str]) -> list[record.Case]:
    """Return the recorded steps with these names, by default all; an unknown name ends the benchmark."""
    cases = {case.name: case for case in record.cases()}
    if unknown := [name for name in names if name not in cases]:
        support.usage_error(f"{unknown[0]} is not recorded; there are {', '.join(cases)}")
    return [case for case in cases.values() if not names or case.name in names]
