# SPDX-License-Identifier: Apache-2.0
"""How fast would a server of llama2_7b decode on v4-8 and v4-32, and how far is that from the memory's bandwidth?

Rehearses prefill and decode of 64 rows of 2,048 tokens with bfloat16 weights, as `rehearse.py --decode` does. Ends with
an error if a decoded token takes more than 1.5 times the time in which memory reads weights and cache once.
"""

import support

import rehearsed
from rehearsal import decoding
from rehearsal.report import Display
from settings import loading
from settings.decoding import for_decoding

SLICES = ("v4-8", "v4-32")
MOST_TIMES_THE_BOUND = 1.5
RECIPE, ROWS, LENGTH = ("small", 64, 128) if support.QUICK else ("llama2_7b", 64, 2048)


def figures_of(slice_: str) -> dict:
    """Print the report of a slice; return its figures."""
    loaded = loading.load(f"configs/{RECIPE}.py", slice_, {})
    config = for_decoding(loaded.config, loaded.topology.chips)
    config.train.global_batch, config.train.gradient_accumulation = ROWS, 1
    display = Display(rehearsed.compiler())
    report = decoding.rehearse(loaded, config, loaded.topology, ROWS, LENGTH, display)
    display.sections(decoding.sections(report))
    decode, prefill = report["decode"], report["prefill"]
    figures = {
        "gib_a_chip": round(report["hbm_gib"]["total"], 1),
        "prefill_tokens_per_second": round(prefill["tokens_per_second"]),
        "decode_step_ms": round(1e3 * decode["step_seconds"], 2),
        "decode_bound_ms": round(1e3 * decode["bound_seconds"], 2),
        "times_the_bound": round(decode["times_the_bound"], 2),
        "decode_tokens_per_second": round(decode["tokens_per_second"]),
    } | {f"{name}_compile_seconds": round(took) for name, took in report["compile_seconds"].items()}
    return {f"{slice_}_{name}": figure for name, figure in figures.items()}


def main() -> None:
    """Rehearse all slices, and check them against the bound."""
    found = {name: figure for one in SLICES for name, figure in figures_of(one).items()}
    slow = [one for one in SLICES if found[f"{one}_times_the_bound"] > MOST_TIMES_THE_BOUND]
    missed = slow and f"decoding takes more than {MOST_TIMES_THE_BOUND} times the bound on {' and '.join(slow)}"
    support.judge("decode_rehearsal", found, missed)


if __name__ == "__main__":
    main()
