# SPDX-License-Identifier: Apache-2.0
"""Does search solve more than the model alone? Arithmetic countdown, by the model of configs/countdown.py.

The model is trained first, which a second call does not repeat: it is in runs/benchmark-countdown. All methods see the
same held-out problems of four numbers, and none sees whether an answer is right. The judge is exact arithmetic.

- `greedy`, `best_of_n`, `self_consistency`, `beam`, `tree_of_thoughts` (breadth-first), `best_first`, `mcts`: share of
  the problems that is solved; `_low` and `_high` are the 95 % interval of Wilson. `_tokens`: that the model drew for a
  problem, for lines and values. All but greedy have the same budget of lines.
- `oracle`: breadth-first search whose value knows what is right, an upper bound.
- `shared`: of the prompt tokens of breadth-first search, the share that other rows had computed.
- `cache_mib_N`: size of the cache of a search with max_thoughts N.

Gate: greedy is between 0.15 and 0.35, `tree_of_thoughts` is at least 2.5 times as large, and above best_of_n.
"""

import math
import subprocess
import sys
import time

import support

import jax

from core.evaluators import engine_of
from inference.batching import Batch
from input_pipeline.countdown import CountdownWindows
from parallelism.mesh import mesh_context
from reasoning.solving import Solver
from reasoning.tasks import Countdown
from reasoning.thoughts import Limits
from reasoning.values import VALUES
from settings import loading
from trained_run import TrainedRun

FOLDER = support.ROOT / "runs" / ("benchmark-countdown-quick" if support.QUICK else "benchmark-countdown")
STEPS, PROBLEMS = (100, 8) if support.QUICK else (0, 300)  # 0: those of the recipe
LIMITS, CONCURRENT = Limits(max_thoughts=5, thoughts_per_step=3, max_depth=3), 8
METHODS = {
    "greedy": ("greedy", "verdict"), "best_of_n": ("best_of_n", "verdict"),
    "self_consistency": ("self_consistency", "verdict"), "beam": ("beam", "verdict"),
    "tree_of_thoughts": ("bfs", "verdict"), "best_first": ("best_first", "verdict"), "mcts": ("mcts", "verdict"),
    "oracle": ("bfs", "oracle"),
}  # fmt: skip


def trained() -> tuple[TrainedRun, float]:
    """Train what is left of the model; return its run, and the minutes that it trained."""
    typed = [f"--config.train.steps={STEPS}"] if STEPS else []
    command = [sys.executable, "train.py", "--config=configs/countdown.py", f"--workdir={FOLDER}", *typed]
    if status := subprocess.run(command, cwd=support.ROOT).returncode:
        sys.exit(f"training ended with status {status}")
    config = loading.load("configs/countdown.py", "", {"train.steps": str(STEPS)} if STEPS else {}).config
    run = TrainedRun(FOLDER, config)
    lines = run.metrics()
    return run, (lines[-1]["time"] - lines[0]["time"]) / 60


def solver(run: TrainedRun, limits: Limits, value: str, num_rows: int) -> Solver:
    """Return a solver with a new cache."""
    batch = Batch(engine_of(run.run, run.params), num_rows=num_rows, vocab_size=run.config.model.vocab_size)
    return Solver(batch, run.tokenizer, Countdown(), VALUES[value](Countdown(), run.tokenizer))


def interval(share: float, count: int) -> tuple[float, float]:
    """Return the 95 % interval of a share of so many trials (Wilson 1927)."""
    z = 1.96
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count)) / (1 + z * z / count)
    return round(middle - half, 3), round(middle + half, 3)


def measured(run: TrainedRun, name: str, problems: list[str]) -> dict[str, float]:
    """Return the figures of a method, and print them."""
    search, value = METHODS[name]
    one, began = solver(run, LIMITS, value, LIMITS.max_thoughts * CONCURRENT), time.perf_counter()
    found = one.solve(problems, search, LIMITS, CONCURRENT)
    share = sum(Countdown().is_correct(each.problem, each.answer) for each in found) / len(found)
    low, high = interval(share, len(found))
    tokens = round(sum(each.num_tokens for each in found) / len(found), 1)
    print(
        f"{name:18} {share:.3f} [{low:.3f}, {high:.3f}]  {tokens} tokens  {time.perf_counter() - began:.0f} s",
        flush=True,
    )
    figures = {name: round(share, 4), f"{name}_low": low, f"{name}_high": high, f"{name}_tokens": tokens}
    if name == "tree_of_thoughts":
        shared, computed = one.batch.num_shared_tokens, one.batch.num_prompt_tokens
        figures["shared"] = round(shared / (shared + computed), 3)
    return figures


def cache_mib(run: TrainedRun, max_thoughts: int) -> float:
    """Return the size of the cache of one search."""
    one = solver(run, Limits(max_thoughts), "verdict", max_thoughts)
    return round(sum(leaf.nbytes for leaf in jax.tree.leaves(one.batch._rows.cache)) / 2**20, 2)


def main() -> None:
    """Train, measure and judge."""
    run, minutes = trained()
    problems = CountdownWindows(0, "heldout").problems(PROBLEMS, num_numbers=4)
    figures = {"problems": len(problems), "training_minutes": round(minutes, 1)}
    with mesh_context(run.run.mesh):
        for name in METHODS:
            figures |= measured(run, name, problems)
        figures |= {f"cache_mib_{count}": cache_mib(run, count) for count in (1, 4, 16)}
    support.finish("countdown", figures)
    greedy, tree = figures["greedy"], figures["tree_of_thoughts"]
    if not support.QUICK and not (0.15 <= greedy <= 0.35 and tree >= 2.5 * greedy and tree > figures["best_of_n"]):
        sys.exit(f"gate missed: greedy {greedy}, tree_of_thoughts {tree}, best_of_n {figures['best_of_n']}")


if __name__ == "__main__":
    main()
