# SPDX-License-Identifier: Apache-2.0
"""Run all benchmarks, or the named ones, and write benchmarks/RESULTS.md from the JSON lines that they print last."""

import datetime
import json
import pathlib
import subprocess
import sys

import support

from files.atomic import write_atomically

FOLDER = pathlib.Path(__file__).resolve().parent
RESULTS = FOLDER / "RESULTS.md"
HEADING = """# Results

Written by `make bench`; a script per section. Recipes that `record` compiled alone are put into its section by
hand, and a line above its table says so.

"""
NOT_BENCHMARKS = (
    "pages", "rehearsed", "run_all", "same_programs", "search_grid", "slow_recipe", "support", "tiny_studies",
    "trm_reference_torch", "updates",
)  # fmt: skip


def main() -> None:
    """Run the benchmarks in turn; a failure appears in the table and in the exit status."""
    chosen = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    if not (len(chosen) == 1 and chosen[0] in support.PARSES_ITS_OWN):
        support.check_options([word for word in sys.argv[1:] if word.startswith("-")])
    unknown = [name for name in chosen if name not in names]
    if unknown:
        support.usage_error(f"{unknown[0]} is not a benchmark; the benchmarks are {', '.join(names)}")
    if (special := [word for word in sys.argv[1:] if word.startswith(support.OF_ONE)]) and len(chosen) != 1:
        support.usage_error(f"{special[0]} is not read by every benchmark; name one that reads it")
    sections, failed = earlier_sections(), []
    for name in chosen or names:
        print(f"== {name}", flush=True)
        status, result = run(name)
        if status == 2 or "--help" in sys.argv:  # nothing was measured; the benchmark has said why
            sys.exit(status)
        failed += [name] if status or result is None else []
        sections[name] = section(name, status, result)
        text = HEADING + "".join(sections[known] for known in names if known in sections)
        write_atomically(RESULTS, text.encode())
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def earlier_sections() -> dict[str, str]:
    """Return the sections of RESULTS.md, by benchmark."""
    text = RESULTS.read_text() if RESULTS.exists() else ""
    return {part.partition("\n")[0]: f"## {part}" for part in text.split("## ")[1:]}


def run(name: str) -> tuple[int, dict | None]:
    """Return the status and the closing JSON line of a benchmark, None without one; its output is shown as it comes."""
    flags = [argument for argument in sys.argv[1:] if argument.startswith("-")]
    command = [sys.executable, str(FOLDER / f"{name}.py"), *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    closing = None
    for line in process.stdout:
        print(line, end="", flush=True)
        closing = json.loads(line) if line.startswith(support.CLOSING) else closing
    return process.wait(), closing


def section(name: str, status: int, result: dict | None) -> str:
    """Return the Markdown of one benchmark."""
    if result is None:
        return f"## {name}\n\nfailed\n\n"
    missed = f"A goal is missed: the benchmark ended with status {status}.\n\n" if status else ""
    rows = "".join(f"| {figure} | {value} |\n" for figure, value in result["figures"].items())
    versions = ", ".join(f"{library} {version}" for library, version in result["versions"].items())
    when = datetime.date.today().isoformat() + (", with --quick, cut short" if result["quick"] else "")
    return f"## {name}\n\n{when}, {result['machine']}; {versions}\n\n{missed}| figure | value |\n|---|---|\n{rows}\n"


if __name__ == "__main__":
    main()
