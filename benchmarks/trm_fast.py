# SPDX-License-Identifier: Apache-2.0
"""Which ways of training a recursive model help, at equal training FLOPs? Each lever alone, and the best together.

The base is the study trm-mini's, half the width of configs/trm/sudoku_mini.py, on Sudokus of 4 x 4. Every arm has the
FLOPs of STEPS steps of the base, so an expensive lever has fewer steps. SEEDS seeds each; the metric is the share of
held-out boards with every cell right. `together` joins the levers whose mean is above the base's.

Arms and seeds are runs in runs/benchmark-trm_fast. What has ended there is not run again, so that the same command
continues after an interruption; a folder of another configuration is refused. `--mechanism=ARM` runs one arm alone.
"""

import statistics
import sys

import support

from configs.experiments.trm.extra_levers import LEVERS as OF_STUDY
from configs.experiments.trm.suite import MINI_CHANGES
from files.json_reader import JsonError
from reporting.metrics import read_steps
from settings import loading, validation
from settings.resolving import Loaded

RECIPE = "configs/trm/sudoku_mini.py"
STEPS, SEEDS = (12, 1) if support.QUICK else (250, 3)
FOLDER = support.folder("trm_fast")
BASE, METRIC = "baseline", "eval_exact_accuracy"
EVALUATIONS = 1 if support.QUICK else 10  # of an arm
WARMUP = 0.4  # of the steps, as the base has
POINTS, SHARE = 0.05, 0.6  # the best arm is so much better, or as good as the base with that share of its FLOPs
LEVERS = OF_STUDY | {
    "muon": {"optimizer.name": "muon", "optimizer.learning_rate": 1e-2},
    "curriculum": {
        "supervision.first_high_cycles": 1, "supervision.first_low_cycles": 1, "supervision.growth_fraction": 0.5,
    },
}  # fmt: skip


def configured(changes: dict) -> Loaded:
    """Return the validated configuration of an arm."""
    typed = {key: str(value) for key, value in (MINI_CHANGES | changes).items()}
    loaded = loading.load(RECIPE, "", typed)
    validation.validate(loaded.config, 1, loaded)
    return loaded


def flops_of_step(changes: dict) -> float:
    """Return the FLOPs of a cell in a step, of the complete cycles; of a curriculum the mean over its stages."""
    from models import trm
    from settings import cycles

    config = configured(changes).config
    ends, total, before = cycles.stage_end(config, 0), 0.0, 0
    while before < config.train.steps:
        of_stage = cycles.of_pair(config, cycles.after(config, before))
        total += (ends - before) * trm.flops_per_token(of_stage.model, config.train.sequence_length)
        before, ends = ends, cycles.stage_end(config, ends)
    return config.supervision.parallel * total / config.train.steps


def steps_of(changes: dict) -> int:
    """Return the steps with which an arm has the FLOPs of the base."""
    return max(EVALUATIONS, round(STEPS * flops_of_step({}) / flops_of_step(changes)))


def curve(arm: str, changes: dict, seed: int) -> dict[int, float]:
    """Return the accuracy by step of an arm with a seed; train it if it has not ended."""
    steps, workdir = steps_of(changes), FOLDER / f"{arm}-seed{seed}"
    keys = MINI_CHANGES | changes | {
        "train.steps": steps, "train.eval_every": max(1, steps // EVALUATIONS), "train.seed": seed,
        "optimizer.warmup_steps": int(WARMUP * steps), "inference.puzzles": 0, "checkpoint.keep": 1,
        "data.puzzle_heldout": 20 if support.QUICK else 500,
    }  # fmt: skip
    support.check_unchanged(workdir, RECIPE, keys)
    if steps not in recorded(workdir):
        support.train(keys, RECIPE, workdir=workdir)
    return recorded(workdir)


def recorded(workdir) -> dict[int, float]:
    """Return the accuracies that a folder has; {} without a run."""
    try:
        return {line["step"]: line[METRIC] for line in read_steps(workdir / "metrics.jsonl", "eval")}
    except (OSError, JsonError):
        return {}


def measured(arm: str, changes: dict) -> list[dict[int, float]]:
    """Return the curve of each seed."""
    curves = [curve(arm, changes, seed) for seed in range(SEEDS)]
    ends = [of[max(of)] for of in curves]
    print(f"{arm}: {statistics.fmean(ends):.4f} after {max(curves[0])} steps, seeds {ends}", flush=True)
    return curves


def share_to_reach(curves: list[dict[int, float]], level: float) -> float | None:
    """Return the share of an arm's FLOPs after which its mean over seeds is at a level for the first time."""
    for step in sorted(set.intersection(*map(set, curves))):
        if statistics.fmean(of[step] for of in curves) >= level:
            return step / max(curves[0])
    return None


def main() -> None:
    """Measure all arms, or the one that was asked for, and judge the best."""
    asked = [word.partition("=")[2] for word in sys.argv[1:] if word.startswith("--mechanism=")]
    if unknown := [arm for arm in asked if arm not in LEVERS]:
        support.usage_error(f"--mechanism={unknown[0]} is not an arm; the arms are {', '.join(LEVERS)}")
    found = {arm: measured(arm, LEVERS[arm]) for arm in (asked or LEVERS)}
    means = {arm: statistics.fmean(of[max(of)] for of in curves) for arm, curves in found.items()}
    figures = {f"{arm}_exact": round(mean, 4) for arm, mean in means.items()}
    if asked:
        support.finish("trm_fast", figures)
        return
    helping = [arm for arm in LEVERS if means[arm] > means[BASE]]
    together = {key: value for arm in helping for key, value in LEVERS[arm].items()}
    found["together"] = measured("together-" + "-".join(helping), together)
    means["together"] = statistics.fmean(of[max(of)] for of in found["together"])
    best = max(means, key=means.get)
    share = share_to_reach(found[best], means[BASE])
    for arm, curves in found.items():
        ends = [of[max(of)] for of in curves]
        figures |= {f"{arm}_exact": round(means[arm], 4), f"{arm}_steps": max(curves[0])}
        figures |= {f"{arm}_deviation": round(statistics.stdev(ends), 4)} if SEEDS > 1 else {}
    figures |= {
        "together_is": ", ".join(helping) or "nothing", "best": best, "gain": round(means[best] - means[BASE], 4),
        "share_of_flops_for_the_base_accuracy": share and round(share, 2),
        "do_not_help": ", ".join(arm for arm in LEVERS if arm != BASE and arm not in helping) or "none",
    }  # fmt: skip
    support.finish("trm_fast", figures)
    if not support.QUICK and figures["gain"] < POINTS and (share is None or share > SHARE):
        sys.exit(f"{best} gains {figures['gain']:.1%}, and reaches the base's accuracy with {share} of its FLOPs")


if __name__ == "__main__":
    main()
