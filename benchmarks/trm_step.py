# SPDX-License-Identifier: Apache-2.0
"""How fast is a step of the Tiny Recursive Model on this CPU, relative to plain PyTorch?

Times one supervision step with its update, of the Sudoku recipe (width 512, 3 cycles of 6, a batch of 64), in both
forms, in float32 and, if the processor supports it, in bfloat16. If torch is installed (pip install torch==2.13.0), the
step of benchmarks/trm_reference_torch.py is timed too, eager and compiled. Rounds alternate, and medians are reported.
A speedup is over the faster variant of torch in the same type.
"""

import functools
import itertools
from collections.abc import Callable

import jax
import numpy as np
import support

from core import assembly
import trm_reference_torch
import updates
from configs.trm import sudoku
from reporting.throughput import has_native_bfloat16

ROUNDS, BATCH = (1, 4) if support.QUICK else (5, 64)
FORMS = {"attention": "rope", "mlp": "none"}  # what mixes positions, and how it knows them


def ours(mixer: str, dtype: str) -> Callable[[int], None]:
    """Return a function that makes this number of updates on one device."""
    config = sudoku.get_config()
    config.model.update(mixer=mixer, positions=FORMS[mixer], dtype=dtype)
    config.mesh.data = 1
    config.train.update(global_batch=BATCH, steps=1000)
    run = assembly.assemble(config, devices=jax.devices()[:1])
    rng = np.random.default_rng(0)
    shapes = {name: spec.shape for name, spec in run.abstract_batch.items()}
    batch = {name: rng.integers(1, config.model.vocab_size, shape, np.int32) for name, shape in shapes.items()}
    batch["puzzle_identifiers"][:] = 0
    return updates.updating(run, batch)


def measures() -> dict[str, Callable[[int], None]]:
    """Return the timed functions: of Torus, and of torch by variant."""
    found = {}
    for mixer, dtype in itertools.product(FORMS, ("float32", "bfloat16") if has_native_bfloat16() else ("float32",)):
        found[f"{mixer}_{dtype}_ours"] = ours(mixer, dtype)
        if trm_reference_torch.TORCH:
            for way in ("eager", "compiled"):
                found[f"{mixer}_{dtype}_torch_{way}"] = trm_reference_torch.sudoku_step(
                    batch=BATCH, mlp_t=mixer == "mlp", dtype=dtype, compiled=way == "compiled"
                )
        print(f"{mixer} in {dtype} is ready", flush=True)
    return found


def main() -> None:
    """Time everything and print."""
    once = functools.partial(updates.rate, steps=1, amount=1)
    steps_a_second = {name: functools.partial(once, update) for name, update in measures().items()}
    of_name = updates.medians(steps_a_second, ROUNDS)
    figures = {"batch": BATCH} | {f"{name}_steps_per_second": rate for name, rate in of_name.items()}
    for name in [name for name in of_name if name.endswith("_ours")]:
        kind = name.removesuffix("_ours")
        torch = [rate for other, rate in of_name.items() if other.startswith(f"{kind}_torch_")]
        figures |= {f"{kind}_speedup": of_name[name] / max(torch)} if torch else {}
    support.finish("trm_step", {name: float(f"{value:.3g}") for name, value in figures.items()})


if __name__ == "__main__":
    main()
