# SPDX-License-Identifier: Apache-2.0
"""Do features that the rules accept together train together, and resume bit for bit?

    python benchmarks/interactions.py                     every accepted pair of tests/features.py
    python benchmarks/interactions.py --quick             the pairs of the first set alone
    python benchmarks/interactions.py --with experts EMA  the pairs with one of these features

A run has as many features as the rules accept together, so that some 50 sets have all pairs. It trains for four steps
on eight simulated devices, and again from the checkpoint in the middle. Steps, evaluations and the last state must be
the same. A set that the rules accept and the start of a run refuses in one line is counted as `refused_later`: a rule
is missing.

What each set showed stays in the folder runs/benchmark-interactions, so that the same command continues after an
interruption; delete it, or the file of a set, to train again.
"""

import contextlib
import hashlib
import io
import itertools
import json
import os
import pathlib
import shutil
import sys
import time
import traceback

import support

from cluster import startup

FOLDER = support.ROOT / "runs" / "benchmark-interactions"
os.environ.setdefault("XLA_FLAGS", support.QUICK_COMPILATION)
startup.choose_platform(None, "cpu", FOLDER)
startup.simulate(8)

import jax

from cluster.interruption import Interrupted
from configs.errors import ConfigError
from files.atomic import write_atomically
from input_pipeline.errors import DataError
from tests import features, pair_runs

TRAINED, REFUSED, FAILED = "trained", "refused_later", "failed"


def main() -> None:
    """Train the sets that were not trained before, and count what all showed."""
    parser = support.Parser(__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--with", dest="names", nargs="+", choices=features.FEATURES, default=(), metavar="FEATURE")
    names, found = parser.parse_args().names, features.verdicts()
    chosen = [pair for pair in found.accepted if not names or set(pair) & set(names)]
    results = trained(list(itertools.islice(features.sets_of(chosen), 1 if support.QUICK else None)))
    pairs = {name: set() for name in (TRAINED, REFUSED, FAILED)}
    for each in results:
        pairs[each["outcome"]] |= set(features.pairs(each["features"]))
    support.finish("interactions", {
        "features": len(features.FEATURES), "pairs": len(features.pairs()),
        "of_one_key": sum(map(len, found.of_one_key.values())), "refused": sum(map(len, found.refused.values())),
        "accepted": len(found.accepted), "runs": len(results), "trained_and_resumed_bit_for_bit": len(pairs[TRAINED]),
        "only_in_runs_that_were_refused_later": len(pairs[REFUSED] - pairs[TRAINED]),
        "only_in_runs_that_failed": len(pairs[FAILED] - pairs[TRAINED]),
    })  # fmt: skip
    if wrong := [f"{each['outcome']}: {shown(each)}" for each in results if each["outcome"] != TRAINED]:
        sys.exit("\n".join(wrong))


def trained(sets: list[tuple[str, ...]]) -> list[dict]:
    """Return the outcome of each set."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    place, results = pair_runs.Place(FOLDER), []
    began, left = time.perf_counter(), [names for names in sets if not file_of(names).exists()]
    for number, names in enumerate(sets, start=1):
        results.append(tried(place, names))
        if names in left:
            done = left.index(names) + 1
            minutes = (time.perf_counter() - began) / done * (len(left) - done) / 60
            print(f"{number}/{len(sets)} {shown(results[-1])}; {minutes:.0f} min left", flush=True)
    return results


def shown(result: dict) -> str:
    """Return a line about a set."""
    return f"{', '.join(result['features'])}: {'; '.join([result['outcome'], *result['lines'][:3]])}"


def file_of(names: tuple[str, ...]) -> pathlib.Path:
    """Return the file with the outcome of a set."""
    return FOLDER / "results" / f"{hashlib.sha256(' '.join(names).encode()).hexdigest()[:16]}.json"


def tried(place: pair_runs.Place, names: tuple[str, ...]) -> dict:
    """Return the outcome of a set, and the lines that tell it; it is trained unless the folder has them."""
    file, workdir = file_of(names), FOLDER / "workdir"
    if not file.exists():
        shutil.rmtree(workdir, ignore_errors=True)
        file.parent.mkdir(exist_ok=True)
        outcome, lines = outcome_of(place, names, workdir)
        content = {"features": names, "outcome": outcome, "lines": lines}
        write_atomically(file, json.dumps(content, indent=1).encode())
        jax.clear_caches()  # else programs of all sets stay in memory
    return json.loads(file.read_text())


def outcome_of(place: pair_runs.Place, names: tuple[str, ...], workdir: pathlib.Path) -> tuple[str, list[str]]:
    """Train a set; an interruption ends the benchmark."""
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            lines = pair_runs.faults(place, names, workdir)
    except Interrupted:
        sys.exit("interrupted; the same command continues")
    except (ConfigError, DataError) as error:
        return REFUSED, [str(error)]
    except Exception as error:  # of any kind: each is what is looked for here
        return FAILED, [f"{type(error).__name__}: {error}", *traceback.format_exc().splitlines()]
    return (FAILED, lines) if lines else (TRAINED, [])


if __name__ == "__main__":
    main()
