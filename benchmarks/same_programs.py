# SPDX-License-Identifier: Apache-2.0
"""Does a change of the code keep the compiled step of every recorded recipe?

    python benchmarks/same_programs.py --keep=FOLDER     in the tree before the change
    python benchmarks/same_programs.py --against=FOLDER  in the tree after it

Both compile the cases of rehearsal/record.py. The second compares the scheduled programs, the total memory and the
replayed time. Programs are compared without source locations, names of instructions, and the order of the parameters
and results of the entry. Status 1: a program, memory or time differs. Names select cases.
"""

import argparse
import base64
import gzip
import json
import pathlib
import re
import sys

import support
from jax._src.lib import tpu
from jaxlib.mlir import ir

from input_pipeline.cache import cache_folder
from rehearsal import record
from rehearsal.compiler import Compiler
from rehearsal.estimate import estimate

NAME = re.compile(r"%[\w.\-]+")
KERNEL = re.compile(r'"body":"([A-Za-z0-9+/=]+)"')
LOCATIONS = re.compile(r",? ?metadata=\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|, ?stack_frame_id=\d+")


def normalized(program: str) -> str:
    """Return the computations of a program without the parts that a move of the code changes.

    Instructions are numbered in the order of the schedule. A parameter of the entry is numbered at its first use.
    """
    before, _, body = program.partition("\nENTRY ")
    text = before[before.index("\n\n") if "\n\n" in before else 0 :]
    lines = [line for line in text.splitlines() if line.startswith(("%", " ", "}"))]
    own, results = [], ""
    for line in body.splitlines()[1:]:
        if line.startswith("}"):
            break
        if re.search(r" parameter\(\d+\)", line):
            continue
        if line.lstrip().startswith("ROOT ") and " tuple(" in line:
            results = line
        else:
            own.append(line)
    numbers: dict[str, str] = {}

    def number(match: re.Match) -> str:
        return numbers.setdefault(match.group(), f"%{len(numbers)}")

    lines = [KERNEL.sub(without_locations, LOCATIONS.sub("", line)) for line in [*lines, "ENTRY", *own]]
    lines = [NAME.sub(number, line) for line in lines]
    of_results = sorted(NAME.sub(number, name) for name in NAME.findall(results.partition(" tuple(")[2]))
    return "\n".join([*lines, *of_results])


def without_locations(kernel: re.Match) -> str:
    """Return the text of a Mosaic kernel, given as MLIR bytecode in base64."""
    with ir.Context() as context:
        tpu.register_dialect(context)
        context.allow_unregistered_dialects = True
        return str(ir.Module.parse(base64.b64decode(kernel.group(1)))).replace("\n", " ").replace("%", "$")


def main() -> None:
    """Compile, and keep or compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--against", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    if (given.keep is None) == (given.against is None):
        support.usage_error("give one of --keep=FOLDER and --against=FOLDER")
    folder = given.keep or given.against
    cases = [case for case in record.cases() if not given.names or case.name in given.names]
    if given.against:
        cases = [case for case in cases if (folder / f"{case.name}.json").exists()]
    folder.mkdir(parents=True, exist_ok=True)
    loaded = [case.load() for case in cases]
    same = different = 0
    for index, compiled in Compiler(cache_folder("") / "rehearsals").compile_all(
        [(one.config, one.topology) for one in loaded]
    ):
        if isinstance(compiled, Exception):
            sys.exit(f"{cases[index].name}: {compiled}")
        found = estimate(compiled)
        figures = {"bytes": compiled.total_bytes, "step_seconds": found["step_seconds"]}
        text, name = normalized(compiled.program()), cases[index].name
        if given.keep:
            (folder / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
            (folder / f"{name}.json").write_text(json.dumps(figures))
            print(f"{name}: kept", flush=True)
            continue
        before = gzip.decompress((folder / f"{name}.txt.gz").read_bytes()).decode()
        kept = json.loads((folder / f"{name}.json").read_text())
        lines = [f"{key}: {kept[key]!r} -> {value!r}" for key, value in figures.items() if value != kept[key]]
        if text != before:
            pairs = zip(before.splitlines(), text.splitlines(), strict=False)
            changed = sum(one != other for one, other in pairs)
            lines.append(f"program: {changed} of {before.count(chr(10)) + 1} lines differ")
        same, different = same + (not lines), different + bool(lines)
        print("\n  ".join([f"{name}: {'differs' if lines else 'the same'}", *lines]), flush=True)
    support.finish("same_programs", {"cases": len(cases), "same": same, "different": different})
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
