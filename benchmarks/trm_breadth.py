# SPDX-License-Identifier: Apache-2.0
"""How much does breadth at test time help a recursive model, without any further training?

A small model learns Sudokus of 6 x 6 with the fewest clues. The amount of noise and the way of choosing are fixed on
RULE_BOARDS held-out boards, by accuracy without labels in the choice. Then TEST_BOARDS other boards are measured once:
one trajectory at the trained depth, and TRAJECTORIES at up to twice that depth. Intervals are Wilson's at 95 %.

The run stays in runs/benchmark-trm_breadth, so that the same command continues after an interruption; delete it to
train again. `--quick` shows that everything runs.
"""

import itertools

import support

STEPS = 20 if support.QUICK else 750  # about 5 minutes on two idle cores
RULE_BOARDS, TEST_BOARDS = (8, 8) if support.QUICK else (500, 500)
TRAJECTORIES, NOISES = (2, (1.0,)) if support.QUICK else (16, (0.5, 1.0, 1.5))
BOARDS_AT_ONCE = 8 if support.QUICK else 50
FOLDER = support.folder("trm_breadth")
RANGE = (0.40, 0.85)  # of one trajectory; below or above, the question is another one
KEYS = {
    "data.puzzle_size": 6, "model.vocab_size": 8, "model.max_length": 36, "train.sequence_length": 36,
    "data.puzzle_clues": 0, "data.puzzle_heldout": RULE_BOARDS + TEST_BOARDS, "model.embed_dim": 64,
    "model.mlp_dim": 256, "train.steps": STEPS, "train.save_every": 250, "train.eval_every": 250,
    "evaluation.batches": 2, "inference.puzzles": 0,
}  # fmt: skip


def counted(noise: float, first: int, boards: int) -> dict[str, int]:
    """Return how many of some held-out boards are solved, by way of choosing, depth and breadth."""
    import jax
    import jax.numpy as jnp

    from core.evaluations import breadth
    from objectives.breadth import Breadth
    from parallelism.mesh import mesh_context
    from trained_run import open_run
    import train

    opened = open_run(FOLDER)
    heldout = train.prepare_corpus(opened.config, vocab_size_typed=True).heldout
    how = Breadth(TRAJECTORIES, 2 * opened.config.supervision.max_steps, noise)
    sums: dict[str, int] = {}
    with mesh_context(opened.run.mesh):
        measure = breadth.measuring(opened.run, how)
        for start in range(first, first + boards, BOARDS_AT_ONCE):
            batch = heldout.read(jax.numpy.arange(start, start + BOARDS_AT_ONCE), opened.config.train.sequence_length)
            for name, count in measure(opened.params, batch, jnp.int32(start)).items():
                sums[name] = sums.get(name, 0) + int(count)
        print(f"noise {noise}: {sums.get('alone/8x1')} of {sums['puzzles']} boards alone", flush=True)
    return sums


def best_rule(found: dict[float, dict[str, int]]) -> tuple[float, str]:
    """Return (noise, "CHOICE/STEPSxTRAJECTORIES") with the most solved boards, of those that need no label."""
    names = [
        name for name in next(iter(found.values()))
        if name.endswith(f"x{TRAJECTORIES}") and not name.startswith(("oracle", "alone"))
    ]  # fmt: skip
    return max(itertools.product(found, names), key=lambda pair: found[pair[0]][pair[1]])


def interval(solved: int, boards: int) -> str:
    """Return the share with its 95 % interval, in percent."""
    low, high = support.interval(solved, boards)
    return f"{100 * solved / boards:.1f} ({100 * low:.1f} to {100 * high:.1f})"


def main() -> None:
    """Train, fix the rule, measure, and judge."""
    run = support.train(KEYS, "configs/trm/sudoku_mini.py", workdir=FOLDER)
    rule = {noise: counted(noise, 0, RULE_BOARDS) for noise in NOISES}
    noise, name = best_rule(rule)
    print(f"rule: {name}, noise {noise}, {rule[noise][name]} of {RULE_BOARDS} boards", flush=True)
    test = counted(noise, RULE_BOARDS, TEST_BOARDS)
    depth = max(int(place.split("/")[1].split("x")[0]) for place in test if "/" in place)
    alone = test[f"alone/{depth // 2}x1"]
    figures = {
        "training_steps": max(run.lines["train"]),
        "training_minutes": round(run.minutes, 1),
        "rule": f"{name}, noise {noise}",
        "alone": interval(alone, TEST_BOARDS),
        "alone_at_twice_the_depth": interval(test[f"alone/{depth}x1"], TEST_BOARDS),
        **{
            f"{way}_{steps}_steps": interval(test[f"{way}/{steps}x{TRAJECTORIES}"], TEST_BOARDS)
            for way in ("q_head", "vote", "weighted_vote", "convergence", "oracle") for steps in (depth // 2, depth)
        },
        "chosen": interval(test[name], TEST_BOARDS),
        "errors_alone": TEST_BOARDS - alone,
        "errors_chosen": TEST_BOARDS - test[name],
    }  # fmt: skip
    share = alone / TEST_BOARDS
    missed = "breadth does not halve the errors" if 2 * figures["errors_chosen"] > figures["errors_alone"] else ""
    if not RANGE[0] <= share <= RANGE[1]:
        missed = f"one trajectory solves {share:.1%}, and the question is of models that solve {RANGE}"
    support.judge("trm_breadth", figures, missed)


if __name__ == "__main__":
    main()
