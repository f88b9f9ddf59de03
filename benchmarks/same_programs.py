# SPDX-License-Identifier: Apache-2.0
"""Does a change of the code keep the compiled step of every recorded recipe?

    python benchmarks/same_programs.py --keep=FOLDER     in the tree before the change
    python benchmarks/same_programs.py --against=FOLDER  in the tree after it

Both compile the cases of rehearsal/record.py. The second compares the scheduled programs, the total memory and the
replayed time. Programs are compared without source locations, names of instructions, and the order of the parameters
and results of the entry. An instruction is compared with all that it is computed from. That a program has the same
instructions in another order is printed: the order of the results can change the order of their copies.
Status 1: an instruction, memory or time differs. Names select cases.
"""

import base64
import collections
import gzip
import hashlib
import json
import pathlib
import re
import sys

import support
from jax._src.lib import tpu
from jaxlib.mlir import ir

import rehearsed
from rehearsal.estimate import estimate

NAME = re.compile(r"%[\w.\-]+")
KERNEL = re.compile(r'"body":"([A-Za-z0-9+/=]+)"')
PARAMETER = re.compile(r"([(, ])[\w.\-]+(?=: )")
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


def digests(program: str) -> list[str]:
    """Return a digest per instruction and result of the entry of a normalized program, in the order of the schedule.

    A digest covers the operation, its operands' digests, and the computations that it calls.
    """
    known: dict[str, str] = {}
    own: list[str] = []
    computation = ""

    def digest(text: str) -> str:
        described = NAME.sub(lambda name: known.get(name.group(), "parameter"), text)
        return hashlib.sha256(described.encode()).hexdigest()

    for line in program.splitlines():
        if line == "ENTRY":
            own = []
        elif line.startswith("%") and line.endswith("{"):
            computation = NAME.match(line).group()
            own = [digest(PARAMETER.sub(r"\1", line[len(computation) :]))]
        elif line.startswith("}"):
            known[computation] = digest(" ".join(own))
        else:
            name, assigned, operation = line.partition(" = ")
            own.append(digest(operation if assigned else line))
            if assigned:
                known[NAME.search(name).group()] = own[-1]
    return own


def difference(before: str, after: str) -> str:
    """Return how two normalized programs differ: nothing, "order" or the number of instructions in one alone."""
    ones, others = digests(before), digests(after)
    if ones == others:
        return ""
    alone = (collections.Counter(ones) - collections.Counter(others)).total()
    alone += (collections.Counter(others) - collections.Counter(ones)).total()
    return f"{alone} instructions are in one program alone" if alone else "order"


def main() -> None:
    """Compile, and keep or compare."""
    parser = support.Parser(__doc__)
    parser.add_argument("--keep", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--against", type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    if (given.keep is None) == (given.against is None):
        support.usage_error("give one of --keep=FOLDER and --against=FOLDER")
    folder = given.keep or given.against
    cases = rehearsed.recorded(given.names)
    if given.against:
        cases = [case for case in cases if (folder / f"{case.name}.json").exists()]
        if not cases:
            support.usage_error(f"{folder} has no program to compare with; keep some there with --keep")
    folder.mkdir(parents=True, exist_ok=True)
    same = reordered = different = 0
    for case, compiled in rehearsed.compiled(cases):
        figures = {"bytes": compiled.total_bytes, "step_seconds": estimate(compiled)["step_seconds"]}
        text, name = normalized(compiled.program()), case.name
        if given.keep:
            (folder / f"{name}.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
            (folder / f"{name}.json").write_text(json.dumps(figures))
            print(f"{name}: kept", flush=True)
            continue
        before = gzip.decompress((folder / f"{name}.txt.gz").read_bytes()).decode()
        kept = json.loads((folder / f"{name}.json").read_text())
        lines = [f"{key}: {kept[key]!r} -> {value!r}" for key, value in figures.items() if value != kept[key]]
        found_difference = difference(before, text)
        if found_difference not in ("", "order"):
            lines.append(f"program: {found_difference}")
        same, different = same + (not lines), different + bool(lines)
        reordered += found_difference == "order"
        verdict = "differs" if lines else "the same, in another order" if found_difference else "the same"
        print("\n  ".join([f"{name}: {verdict}", *lines]), flush=True)
    support.finish(
        "same_programs", {"cases": len(cases), "same": same, "in another order": reordered, "different": different}
    )
    sys.exit(different > 0)


if __name__ == "__main__":
    main()
