# SPDX-License-Identifier: Apache-2.0
"""Does reinforcement learning from verifiable rewards teach more than further supervised training? Countdown.

All arms begin with the model that benchmarks/countdown.py trains, which a second call does not repeat.

- `start`: share of the problems that it solves greedily.
- `grpo`, `supervised_longer`, `random_reward`: after configs/countdown_grpo.py; after supervised training for as long;
  and after GRPO whose rewards are drawn by chance. Means of SEEDS seeds; `_error` is the standard error.
- `grpo_minutes`: of an arm, with rollouts and without compiling.

The problems are held out, and the judge is exact arithmetic. Gate: grpo is at least 10 points above start and above
supervised_longer, and random_reward does not gain: it is at most 2 standard errors above start.
"""

import statistics
import subprocess
import sys

import countdown
import support

from input_pipeline.countdown import CountdownWindows
from parallelism.mesh import mesh_context
from reasoning.tasks import Countdown
from reasoning.thoughts import Limits
from settings import loading
from trained_run import TrainedRun

SEEDS, STEPS, PROBLEMS = (1, 4, 16) if support.QUICK else (3, 300, 500)
FOLDER = support.ROOT / "runs" / ("benchmark-grpo-quick" if support.QUICK else "benchmark-grpo")
PLAIN = {"tot.use_tot": "False", "train.eval_every": "0", "train.log_every": "1"}


def solved(run: TrainedRun, problems: list[str]) -> float:
    """Return the share of problems that a model solves greedily."""
    with mesh_context(run.run.mesh):
        found = countdown.solver(run, Limits(), "likelihood", 32).solve(problems, "greedy", Limits(), concurrent=32)
    return statistics.fmean(Countdown().is_correct(one.problem, one.answer) for one in found)


def trained(name: str, recipe: str, **changes: str) -> TrainedRun:
    """Train what is left of an arm from the first model; return its run."""
    keys = PLAIN | {key.replace("__", "."): value for key, value in changes.items()}
    keys |= {"train.init_from": str(countdown.FOLDER)}
    typed = [f"--config.{key}={value}" for key, value in keys.items()]
    command = [sys.executable, "train.py", f"--config={recipe}", f"--workdir={FOLDER / name}", *typed]
    if status := subprocess.run(command, cwd=support.ROOT).returncode:
        sys.exit(f"{name} ended with status {status}")
    return TrainedRun(FOLDER / name, loading.load(recipe, "", keys).config)


def seconds(run: TrainedRun) -> list[float]:
    """Return the seconds of each step, with its rollout, without the first line, whose steps compile."""
    return [line["step_seconds"] for line in run.metrics()][1:]


def main() -> None:
    """Train all arms, measure and judge."""
    first, _ = countdown.trained()
    problems = CountdownWindows(0, "heldout").problems(PROBLEMS, num_numbers=4)
    shares: dict[str, list[float]] = {"grpo": [], "supervised_longer": [], "random_reward": []}
    minutes = []
    for seed in map(str, range(SEEDS)):
        steps = {"train__seed": seed, "train__steps": str(STEPS)}
        grpo = trained(f"grpo-{seed}", "configs/countdown_grpo.py", **steps)
        minutes.append(sum(seconds(grpo)) / 60)
        chance = trained(f"random-{seed}", "configs/countdown_grpo.py", **steps, grpo__reward="random")
        longer = round(60 * minutes[-1] / statistics.median(seconds(first)))
        more = trained(
            f"supervised-{seed}", "configs/countdown.py", train__seed=seed, train__steps=str(longer),
            optimizer__learning_rate="3e-4", optimizer__warmup_steps="10",
        )  # fmt: skip
        for name, run in zip(shares, (grpo, more, chance), strict=True):
            shares[name].append(solved(run, problems))
            print(f"seed {seed}, {name}: {shares[name][-1]:.3f}", flush=True)
    figures = {"problems": len(problems), "start": round(solved(first, problems), 4)}
    errors = {}
    for name, found in shares.items():
        errors[name] = statistics.stdev(found) / len(found) ** 0.5 if len(found) > 1 else 0.0
        figures |= {name: round(statistics.fmean(found), 4), f"{name}_error": round(errors[name], 4)}
    figures["grpo_minutes"] = round(statistics.fmean(minutes), 1)
    support.finish("grpo", figures)
    best = max(figures["start"], figures["supervised_longer"])
    no_gain = figures["random_reward"] <= figures["start"] + 2 * max(errors["random_reward"], 0.02)
    if not support.QUICK and not (
        figures["grpo"] >= figures["start"] + 0.1 and figures["grpo"] > best and no_gain
    ):  # fmt: skip
        sys.exit("gate missed")


if __name__ == "__main__":
    main()
