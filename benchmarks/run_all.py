# SPDX-License-Identifier: Apache-2.0
"""Run every benchmark and write benchmarks/RESULTS.md from the JSON lines that they end with."""

import datetime
import json
import pathlib
import subprocess
import sys

FOLDER = pathlib.Path(__file__).resolve().parent
NOT_BENCHMARKS = ("run_all", "support")


def main() -> None:
    """Run one after the other; a benchmark that fails is said so in the table and in the exit status."""
    names = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in NOT_BENCHMARKS)
    lines = ["# Results", "", "Written by `make bench`; a script per section, and nothing by hand.", ""]
    failed = []
    for name in names:
        print(f"== {name}", flush=True)
        result = run(name)
        failed += [] if result else [name]
        lines += section(name, result)
        (FOLDER / "RESULTS.md").write_text("\n".join(lines))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


def run(name: str) -> dict | None:
    """Return the closing JSON line of a benchmark, None where it failed; its output is passed on as it comes."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *sys.argv[1:]]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    last = ""
    for line in process.stdout:
        print(line, end="", flush=True)
        last = line
    return json.loads(last) if process.wait() == 0 else None


def section(name: str, result: dict | None) -> list[str]:
    """Return the Markdown of one benchmark."""
    if result is None:
        return [f"## {name}", "", "failed", ""]
    rows = [f"| {figure} | {value} |" for figure, value in result["figures"].items()]
    versions = ", ".join(f"{library} {version}" for library, version in result["versions"].items())
    today = datetime.date.today().isoformat()
    return [
        f"## {name}", "", f"{today}, {result['machine']}; {versions}", "", "| figure | value |", "|---|---|", *rows, ""
    ]  # fmt: skip


if __name__ == "__main__":
    main()
