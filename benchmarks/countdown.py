# SPDX-License-Identifier: Apache-2.0
"""Does search solve more than the model alone? Arithmetic countdown, by the model of configs/countdown.py.

The model is trained first, which a second call does not repeat: it is in runs/benchmark-countdown. All methods see the
same held-out problems of four numbers, and none sees whether an answer is right. The judge is exact arithmetic.

- `greedy`, `best_of_n`, `self_consistency`, `beam`, `tree_of_thoughts` (breadth-first), `best_first`, `mcts`: share of
  the problems that is solved; `_low` and `_high` are the 95 % interval of Wilson. `_tokens`: that the model drew for a
  problem, for lines and values. All but greedy have the same budget of lines.
- `value_head`: breadth-first search with the trained head of configs/countdown_value_head.py in place of verdicts.
- `oracle`: breadth-first search whose value knows what is right, an upper bound.
- `shared`: of the prompt tokens of breadth-first search, the share that other rows had computed.
- `moves_N`, `verdict_auc_N`: of the lines of level N that breadth-first search draws, the share that are moves, and the
  chance that the verdict of one that can succeed is above that of one that cannot.
- `cache_mib_N`: size of the cache of a search with max_thoughts N.

Gate: greedy is between 0.15 and 0.35, `tree_of_thoughts` is at least 2.5 times as large, and above best_of_n.
"""

import copy
import time

import support
from sklearn.metrics import roc_auc_score

import jax

from core import solving
from core.evaluators import engine_of
from inference.batching import Batch
from input_pipeline.tasks.countdown import CountdownWindows, can_succeed, parse, state_after
from parallelism.mesh import mesh_context
from reasoning.solving import Solved
from settings import loading
from trained_run import TrainedRun

FOLDER = support.folder("countdown")
STEPS = {"train.steps": "100"} if support.QUICK else {}
PROBLEMS = 8 if support.QUICK else 300
METHODS = {
    "greedy": ("greedy", "verdict"), "best_of_n": ("best_of_n", "verdict"),
    "self_consistency": ("self_consistency", "verdict"), "beam": ("beam", "verdict"),
    "tree_of_thoughts": ("bfs", "verdict"), "best_first": ("best_first", "verdict"), "mcts": ("mcts", "verdict"),
    "value_head": ("bfs", "value_head"), "oracle": ("bfs", "oracle"),
}  # fmt: skip


def trained(folder=FOLDER, recipe: str = "configs/countdown.py", **keys: str) -> TrainedRun:
    """Train what is left of a run, with `__` for a dot in the keys; return it."""
    changes = STEPS | {key.replace("__", "."): value for key, value in keys.items()}
    support.train(changes, recipe, workdir=folder)
    return TrainedRun(folder, loading.load(recipe, "", changes).config)


def found_by(run: TrainedRun, problems: list[str], search: str, **keys) -> tuple[list[Solved], Batch]:
    """Return what a search with these keys of `tot` finds, and its batch."""
    config = copy.deepcopy(run.config)
    config.tot.update(search=search, **keys)
    with mesh_context(run.run.mesh):
        return solving.solve(engine_of(run.run, run.params), config, problems)


def share_solved(run: TrainedRun, found: list[Solved]) -> float:
    """Return the share of problems with a right answer, by exact arithmetic."""
    task = solving.task_of(run.config)
    return sum(task.is_correct(one.problem, one.answer) for one in found) / len(found)


def measured(run: TrainedRun, name: str, problems: list[str]) -> dict[str, float]:
    """Return the figures of a method, and print them."""
    search, value = METHODS[name]
    began = time.perf_counter()
    found, batch = found_by(run, problems, search, value=value)
    share, seconds = share_solved(run, found), time.perf_counter() - began
    low, high = support.interval(round(share * len(found)), len(found))
    tokens = round(sum(one.num_tokens for one in found) / len(found), 1)
    print(f"{name:18} {share:.3f} [{low:.3f}, {high:.3f}]  {tokens} tokens  {seconds:.0f} s", flush=True)
    figures = {name: round(share, 4), f"{name}_low": round(low, 3), f"{name}_high": round(high, 3)}
    figures[f"{name}_tokens"] = tokens
    if name == "tree_of_thoughts":
        shared, computed = batch.num_shared_tokens, batch.num_prompt_tokens
        figures |= {"shared": round(shared / (shared + computed), 3)} | levels(found)
    return figures


def levels(found: list[Solved]) -> dict[str, float]:
    """Return how good the lines and the verdicts of trees are, by level."""
    figures = {}
    for depth in range(1, 4):
        lines = [(one.problem, line) for one in found for line in one.root.all() if line.depth == depth]
        legal = [state_after(parse(problem)[0], line.lines) is not None for problem, line in lines]
        good = [can_succeed(problem, line.lines) for problem, line in lines]
        figures[f"moves_{depth}"] = round(sum(legal) / len(legal), 3)
        if len(set(good)) == 2:
            figures[f"verdict_auc_{depth}"] = round(roc_auc_score(good, [line.value for _, line in lines]), 3)
    return figures


def cache_mib(run: TrainedRun, problem: str, max_thoughts: int) -> float:
    """Return the size of the cache of one search."""
    _, batch = found_by(run, [problem], "bfs", max_thoughts=max_thoughts)
    return round(sum(leaf.nbytes for leaf in jax.tree.leaves(batch._rows.cache)) / 2**20, 2)


def main() -> None:
    """Train, measure and judge."""
    run = trained()
    lines = run.metrics()
    problems = CountdownWindows(0, "heldout").problems(PROBLEMS, num_numbers=4)
    figures = {"problems": len(problems), "training_minutes": round((lines[-1]["time"] - lines[0]["time"]) / 60, 1)}
    of_head = trained(
        FOLDER.with_name(f"{FOLDER.name}-value"), "configs/countdown_value_head.py", train__init_from=str(FOLDER),
        tot__use_tot="False", **({"train__steps": "4"} if support.QUICK else {}),
    )  # fmt: skip
    for name in METHODS:
        figures |= measured(of_head if name == "value_head" else run, name, problems)
    figures |= {f"cache_mib_{count}": cache_mib(run, problems[0], count) for count in (1, 4, 16)}
    greedy, tree, best_of_n = (figures[name] for name in ("greedy", "tree_of_thoughts", "best_of_n"))
    holds = 0.15 <= greedy <= 0.35 and tree >= 2.5 * greedy and tree > best_of_n
    missed = "" if holds else f"gate missed: greedy {greedy}, tree_of_thoughts {tree}, best_of_n {best_of_n}"
    support.judge("countdown", figures, missed)


if __name__ == "__main__":
    main()
