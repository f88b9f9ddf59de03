# SPDX-License-Identifier: Apache-2.0
"""How long does a rehearsal take, how exact is the predicted memory, and does the search find the best layout?

With --exhaustive it compiles every layout of llama2_7b on v4-32 that may fit, which takes hours, and records them in
this folder. The search is compared with the recipe's own layout, and with that record if it has today's remat policies;
it misses its goal if it is more than SLOWER slower than the best of them.
"""

import json
import pathlib
import sys
import tempfile

import support

import rehearsed
from configs.base import KEYS
from rehearsal import record
from rehearsal.layouts import search, sizing
from rehearsal.estimate import estimate

RECIPE, TOPOLOGY = "llama2_7b", "v4-32"
RECORD = pathlib.Path(__file__).with_name("exhaustive_llama2_7b_v4-32.json")
OWN = record.Case(f"{RECIPE}_{TOPOLOGY}", RECIPE, TOPOLOGY)
SLOWER = 0.01  # times the best known speed
WIDEST = 4  # mesh.model up to which every layout is compiled
REPORTS = (("llama2_7b", "v4-32"), ("llama2_7b", "v4-64"), ("large", "v4-8"))
CONFIGURATIONS = (  # of the arithmetic of memory: recipe, topology, what is changed
    ("small", "v5e-8", {}),
    ("medium", "v4-8", {}),
    ("large", "v4-8", {}),
    ("large", "v4-8", {"model.remat": "full", "train.gradient_accumulation": 4}),
    ("llama_1b", "v4-32", {}),
    ("llama_1b", "v4-8", {"train.global_batch": 8, "model.remat": "none"}),
    ("llama_1b", "v4-8", {"train.global_batch": 16, "mesh.fsdp": 2, "mesh.model": 2, "model.remat": "dots"}),
    ("llama2_7b", "v4-32", {}),
    ("llama2_7b", "v4-32", {"mesh.data": 2, "mesh.fsdp": 8, "model.remat": "full"}),
    ("llama2_7b", "v5p-32", {"model.remat": "dots"}),
    ("llama2_13b", "v4-64", {}),
    ("llama3_8b", "v4-64", {"train.sequence_length": 4096}),
)


def rehearse(cache: str, *arguments: str) -> tuple[float, str]:
    """Run rehearse.py with a cache; return (seconds, its output)."""
    return support.run("rehearse.py", *arguments, f"--config.data.cache_dir={cache}", captured=True)


def reports(wanted) -> dict[str, float]:
    """Return the seconds of a full report, and of the same report from the cache."""
    figures = {}
    for recipe, topology in wanted:
        with tempfile.TemporaryDirectory() as cache:
            arguments = (f"--config=configs/{recipe}.py", f"--topology={topology}", f"--html={cache}/r.html")
            first, text = rehearse(cache, *arguments)
            again, _ = rehearse(cache, *arguments)
        print(text)
        name = f"{recipe}_{topology.replace('-', '_')}"
        figures |= {f"{name}_seconds": round(first, 1), f"{name}_cached_seconds": round(again, 2)}
        print(f"{recipe} on {topology}: {first:.0f} s, again {again:.2f} s", flush=True)
    return figures


def memory(wanted) -> dict[str, float]:
    """Return the relative error of the prediction against the compiler's total."""
    errors = []
    for case, compiled in rehearsed.compiled([record.Case(str(one), *one) for one in wanted]):
        predicted = sizing.predict(case.load().config)
        errors.append(predicted / compiled.total_bytes - 1)
        print(f"{case.name}: {compiled.total_bytes / 2**30:.2f} GiB, by arithmetic {errors[-1]:+.1%}", flush=True)
    return {
        "configurations": len(errors),
        "largest_error": round(max(map(abs, errors)), 3),
        "mean_error": round(sum(map(abs, errors)) / len(errors), 3),
    }


def searched() -> dict:
    """Return the seconds of the search, and how its layout compares with the best recorded one."""
    recorded = json.loads(RECORD.read_text())
    with tempfile.TemporaryDirectory() as cache:
        arguments = (f"--config=configs/{RECIPE}.py", f"--topology={TOPOLOGY}", "--search", f"--json={cache}/r.json")
        seconds, text = rehearse(cache, *arguments)
        found = json.loads((pathlib.Path(cache) / "r.json").read_text())
    print(text)
    config, own = OWN.load().config.train, json.loads(OWN.path.read_text())["figures"]
    recipe = config.global_batch * config.sequence_length / own["step_seconds"]
    known = [row["tokens_per_second"] for row in recorded["layouts"] if row["fits"]]
    is_current = recorded["remat"] == list(KEYS["model.remat"].choices)
    found_best = max(row["Tokens/s"] or 0 for row in found["tried"])
    return {
        "search_minutes": round(seconds / 60, 1),
        "search_compilations": len(found["tried"]),
        "exhaustive_compilations": len(recorded["layouts"]),
        "exhaustive_is_current": is_current,
        "slower_than_the_best": round(max([recipe, *(known if is_current else [])]) / found_best - 1, 4),
    }


def exhaustive() -> None:
    """Compile every layout that may fit, the most promising first, and record the results.

    Layouts that shard a layer over 8 or 16 chips cannot hide that communication; of each, only the most promising one
    is compiled.
    """
    loaded = OWN.load()
    capacity = loaded.topology.capacity_gib * 2**30 * search.MEMORY_MARGIN
    layouts = [c for c in search.layouts(loaded, loaded.topology, any_batch=False) if c.predicted_bytes <= capacity]
    layouts.sort(key=lambda candidate: candidate.predicted_seconds)
    several = [c for c in layouts if c.config.mesh.model <= WIDEST]
    layouts = several + [next(c for c in layouts if c.config.mesh.model == n) for n in (2 * WIDEST, 4 * WIDEST)]
    rows = {}
    for index, compiled in rehearsed.compiler().compile_all([(one.config, loaded.topology) for one in layouts]):
        if isinstance(compiled, Exception):
            sys.exit(f"{layouts[index].keys}: {compiled}")
        found = estimate(compiled)
        kept = ("fits", "step_seconds", "tokens_per_second", "mfu", "exposed_communication_seconds")
        rows[index] = {"keys": layouts[index].keys, "gib": found["hbm_gib"]["total"]} | {k: found[k] for k in kept}
        print(f"{len(rows)} of {len(layouts)}: {rows[index]}", flush=True)
    about = {"recipe": RECIPE, "topology": TOPOLOGY, "remat": list(KEYS["model.remat"].choices)}
    recorded = about | {"layouts": [rows[index] for index in sorted(rows)]}
    RECORD.write_text(json.dumps(recorded, indent=1) + "\n")


def main() -> None:
    """Measure, compare and report."""
    if "--exhaustive" in sys.argv:
        return exhaustive()
    if support.QUICK:
        figures = reports([("tiny", "v4-8")]) | memory(CONFIGURATIONS[:1])
    else:
        figures = reports(REPORTS) | memory(CONFIGURATIONS) | searched()
    missed = figures.get("slower_than_the_best", 0) > SLOWER
    return support.judge("rehearsals", figures, "the search missed a faster layout" if missed else "")


if __name__ == "__main__":
    main()
