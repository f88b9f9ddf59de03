# SPDX-License-Identifier: Apache-2.0
"""What does a save cost? A model of about 100 M parameters with AdamW's moments, 1.54 GB, saved between real steps.

Measures how long save() blocks the loop, compared with a step of 2,048 tokens. The recipe's own step has 128 times as
many tokens, so its share is smaller. Also measures the work in the background, its part for digests, the duration of a
concurrent step, and the times to verify and to restore. All files are in the page cache.
"""

import os
import pathlib
import statistics
import sys
import tempfile
import time

import support

if __name__ == "__main__":
    os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np

import updates
from core import assembly
from configs import base, medium
from parallelism.mesh import mesh_context
from checkpointing.checkpoints import Checkpoints
from checkpointing.retention import Retention

ROUNDS = 3
TOKENS = (4, 512)
SMALL = {"num_layers": 6, "embed_dim": 256, "num_heads": 4, "num_kv_heads": 4, "mlp_dim": 704}  # 9 M parameters
LIMITS = {"blocked_share": 0.05, "digest_share": 0.4}


def make_run() -> assembly.Run:
    """Return the run whose state is saved."""
    config = (base if support.QUICK else medium).get_config()
    config.model.update(SMALL if support.QUICK else {"tie_embeddings": True})
    config.train.global_batch, config.train.sequence_length = TOKENS
    config.mesh.fsdp = 1
    return assembly.assemble(config)


def timed(work):
    """Return (the result of work(), seconds)."""
    start = time.perf_counter()
    result = jax.block_until_ready(work())
    return result, time.perf_counter() - start


def saves(run: assembly.Run, checkpoints: Checkpoints) -> tuple[jax.Array, dict[str, list[float]]]:
    """Train and save after every other step; return the state of the last save, and the seconds of each part."""
    step, batch = run.train_step, updates.random_batch(run.config)
    state, _ = step(run.init(), batch)
    seconds, trouble = {"step": [], "beside": [], "save": []}, []

    def note(text: str, **figures) -> None:
        if figures["event"] != "saved":
            trouble.append(text)  # in a thread, which alone would end by sys.exit
        for name, value in figures.items():
            if name.endswith("_seconds"):
                seconds.setdefault(name.removesuffix("_seconds"), []).append(value)

    checkpoints.report = note
    for number in range(1, ROUNDS + 2):
        (state, _), taken = timed(lambda: step(state, batch))  # noqa: B023
        seconds["step"].append(taken)
        _, taken = timed(lambda: checkpoints.save(number, state, {}))  # noqa: B023
        seconds["save"].append(taken)
        if number <= ROUNDS:
            (state, _), taken = timed(lambda: step(state, batch))  # noqa: B023
            seconds["beside"].append(taken)
        checkpoints.wait()
        if trouble:
            sys.exit(trouble[0])
        print({name: [round(value, 3) for value in values] for name, values in seconds.items()}, flush=True)
    return state, seconds


def main() -> None:
    """Save, verify, restore and compare."""
    run = make_run()
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(pathlib.Path(folder), Retention(newest=1)) as checkpoints,
        mesh_context(run.mesh),
    ):
        state, seconds = saves(run, checkpoints)
        newest, verify = timed(checkpoints.newest)
        restored, restore = timed(lambda: checkpoints.restore(newest, run.abstract_state))
    same = jax.tree.map(lambda one, other: np.array_equal(one, other), state, restored)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {
        "parameters": run.models.num_parameters,
        "state_bytes": sum(leaf.nbytes for leaf in jax.tree.leaves(state)),
        "step_seconds": median["step"], "blocked_seconds": median["save"],
        "blocked_share": median["save"] / median["step"], "step_beside_a_save_seconds": median["beside"],
        "background_seconds": seconds["background"][-1], "write_seconds": seconds["write"][-1],
        "digest_seconds": seconds["digest"][-1], "digest_share": seconds["digest"][-1] / seconds["background"][-1],
        "verify_seconds": verify, "restore_seconds": restore, "arrays_that_differ": jax.tree.leaves(same).count(False),
    }  # fmt: skip
    support.finish("checkpoints", {name: round(value, 4) for name, value in figures.items()})
    over = [f"{name}={figures[name]:.3f}, more than {limit}" for name, limit in LIMITS.items() if figures[name] > limit]
    over = [] if support.QUICK else over  # they are promised of the larger one
    if over or figures["arrays_that_differ"]:
        sys.exit("; ".join(over) or "what was restored is not what was saved")


if __name__ == "__main__":
    main()
