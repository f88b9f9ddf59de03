# SPDX-License-Identifier: Apache-2.0
"""Does every recipe still cost the same, on each topology that its docstring names?

Compiles and estimates all of them, and compares with rehearsal/recorded/. If a figure has changed by more than 2 %, it
ends with status 1 until `python benchmarks/record.py --renew="why"` records the new figures. Names select cases.
"""

import json
import sys

import support

import rehearsed
from rehearsal import record
from rehearsal.compiler import versions
from rehearsal.estimate import estimate


def main() -> None:
    """Compile and compare, then report or record."""
    parser = support.Parser(__doc__)
    parser.add_argument("--renew", metavar="WHY", help="write the new figures down, for this reason")
    parser.add_argument("--quick", action="store_true", help="the fastest one alone")
    parser.add_argument("names", nargs="*", metavar="NAME")
    given = parser.parse_args()
    cases = rehearsed.recorded(["tiny_v4-8"] if given.quick else given.names)
    table, changed = {}, 0
    for case, compiled in rehearsed.compiled(cases):
        found = estimate(compiled)
        path, now = case.path, record.figures(found)
        name = case.name.replace("-", "_")
        table |= {f"{name}_step_seconds": round(found["step_seconds"], 4), f"{name}_mfu": round(found["mfu"], 3),
                  f"{name}_gib": round(found["hbm_gib"]["total"], 2),
                  f"{name}_exposed_seconds": round(found["exposed_communication_seconds"], 3)}  # fmt: skip
        before = json.loads(path.read_text()) if path.exists() else {"figures": {}, "versions": {}}
        lines = record.changes(before["figures"], now)
        lines += record.other_versions(before, versions()) if lines else []
        changed += bool(lines)
        print("\n  ".join([f"{name}: {'changed' if lines else 'as recorded'}", *lines]), flush=True)
        if given.renew and (now != before["figures"] or "not_compared" not in before):
            record.write(path, given.renew if lines else before["reason"], found, versions())
    support.finish("record", table | {"steps": len(cases), "changed": changed})
    if changed and not given.renew:
        sys.exit('figures have changed: fix the cause, or record it: python benchmarks/record.py --renew="why"')


if __name__ == "__main__":
    main()
