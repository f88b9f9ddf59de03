# SPDX-License-Identifier: Apache-2.0
"""Does reinforcement learning from verifiable rewards teach more than further supervised training? Countdown.

All arms begin with the model that benchmarks/countdown.py trains, which a second call does not repeat.

- `start`: share of the problems that it solves greedily.
- `grpo`, `supervised_longer`, `random_reward`: after configs/countdown_grpo.py; after supervised training for as long;
  and after GRPO whose rewards are drawn by chance. Means of SEEDS seeds; `_error` is the standard error.
- `grpo_minutes`: of an arm, with rollouts and without compiling.

The problems are held out, and the judge is exact arithmetic. Gate: grpo is at least 10 points above start and above
supervised_longer, and random_reward does not gain: it is at most 2 standard errors (of at least 0.02) above start.
"""

import statistics

import countdown
import support

from input_pipeline.tasks.countdown import CountdownWindows
from trained_run import TrainedRun

SEEDS, STEPS, PROBLEMS = (1, 4, 16) if support.QUICK else (3, 200, 500)
FOLDER = support.folder("grpo")
OF_GRPO = {"tot__use_tot": "False", "optimizer__learning_rate": "3e-4", "optimizer__warmup_steps": "10"}


def solved(run: TrainedRun, problems: list[str]) -> float:
    """Return the share of problems that a model solves greedily."""
    found, _ = countdown.found_by(run, problems, "greedy")
    return countdown.share_solved(run, found)


def trained(name: str, recipe: str, steps: int, **keys: str) -> TrainedRun:
    """Train what is left of an arm from the first model; return its run."""
    keys |= OF_GRPO | {"train__eval_every": "0", "train__log_every": "1", "train__steps": str(steps)}
    return countdown.trained(FOLDER / name, recipe, **keys, train__init_from=str(countdown.FOLDER))


def seconds(run: TrainedRun) -> list[float]:
    """Return the seconds of each logged step, with its rollout, without the first line, whose steps compile."""
    return [line["step_seconds"] for line in run.metrics()][1:]


def main() -> None:
    """Train all arms, measure and judge."""
    first = countdown.trained()
    problems = CountdownWindows(0, "heldout").problems(PROBLEMS, num_numbers=4)
    shares: dict[str, list[float]] = {"grpo": [], "supervised_longer": [], "random_reward": []}
    minutes = []
    for seed in map(str, range(SEEDS)):
        grpo = trained(f"grpo-{seed}", "configs/countdown_grpo.py", STEPS, train__seed=seed)
        minutes.append(sum(seconds(grpo)) / 60)
        longer = round(60 * minutes[-1] / statistics.median(seconds(first) or seconds(grpo)))
        more = trained(f"supervised-{seed}", "configs/countdown.py", longer, train__seed=seed)
        chance = trained(
            f"random-{seed}", "configs/countdown_grpo.py", STEPS, train__seed=seed, grpo__reward="random"
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
    best = max(figures["start"], figures["supervised_longer"]) + 0.1
    no_gain = figures["random_reward"] <= figures["start"] + 2 * max(errors["random_reward"], 0.02)
    support.judge("grpo", figures, "" if figures["grpo"] >= best and no_gain else "gate missed")


if __name__ == "__main__":
    main()
