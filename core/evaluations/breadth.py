# SPDX-License-Identifier: Apache-2.0
"""Accuracy of a recursive model against depth and breadth: supervision steps and trajectories, at the end of a run.

Figures have names such as `vote/16x8`, for a way of choosing, 16 steps and 8 trajectories. `oracle/16x8` is the share
of puzzles that some trajectory solves by a checker of the rules, which no choice without it can exceed.
"""

import jax
import jax.numpy as jnp

from core import assembly
from core.evaluation import batches_of_rows
from core.evaluators import Evaluator
from input_pipeline.corpus import Corpus
from objectives import breadth
from objectives.recursive import IGNORED
from puzzles import choosing

KIND = "breadth"
ALONE, ORACLE = "alone", "oracle"  # the first trajectory, which has no noise; a checker of the rules
SEED = 0  # of the noise; the same in all evaluations


def make(config, corpus: Corpus | None) -> Evaluator | None:
    """Return the evaluator of a recursive model, unless `inference.puzzles` is 0."""
    wanted = corpus is not None and config.train.objective == "recursive" and config.inference.puzzles
    return DepthAndBreadth(config) if wanted else None


class DepthAndBreadth(Evaluator):
    """The share of held-out puzzles solved at each depth and breadth."""

    name = KIND

    def __init__(self, config):
        self.config, self.breadth = config, breadth.of_config(config)

    def evaluate(self, context):
        """Return {"CHOICE/STEPSxTRAJECTORIES": share of puzzles}, and `puzzles`, their number."""
        run, wanted = context.run, self.config.inference.puzzles
        rows = rows_at_once(run, self.breadth.trajectories)
        measure = measuring(run, self.breadth)
        sums = {}
        for number, batch in enumerate(batches_of_rows(run, context.corpus, rows, -(-wanted // rows))):
            if context.stop():
                return None
            for name, total in measure(context.params, batch, jnp.int32(number)).items():
                sums[name] = sums.get(name, 0) + int(total)
        count = sums.pop("puzzles")
        return {name: total / max(count, 1) for name, total in sums.items()} | {"puzzles": count}

    def lines(self, context, figures):
        model = self.config.model
        title = f"{model.mixer} mixer, {model.num_layers} layers, {figures['puzzles']:,} held-out puzzles"
        return table(figures, self.breadth, self.config.inference.choice, title)


def rows_at_once(run: assembly.Run, trajectories: int) -> int:
    """Return the puzzles of a batch, so that their trajectories are about as many rows as evaluation has elsewhere."""
    shards = run.batch_sharding.num_devices
    return max(1, run.eval_rows // trajectories // shards) * shards


def measuring(run: assembly.Run, how: breadth.Breadth):
    """Return the compiled (parameters, batch, number of the batch) -> {name: number of solved puzzles}."""
    checker = choosing.checker_of(run.config)

    def measure(params, batch, number):
        draws = draws_of(number, batch["inputs"].shape[0])
        found = breadth.explore(run.objective, run.model(params), batch, draws, how)
        return solved(found, batch, checker, how)

    return jax.jit(measure)


def draws_of(number: jax.Array, rows: int) -> jax.Array:
    """Return the keys of the puzzles of a batch, uint32 [B, 2]."""
    return jax.random.key_data(jax.random.split(jax.random.fold_in(jax.random.key(SEED), number), rows))


def solved(
    found: breadth.Explored, batch: dict, checker: choosing.Checker | None, how: breadth.Breadth
) -> dict[str, jax.Array]:
    """Return the number of puzzles that are solved, for each name, and of all `puzzles`: int32."""
    labels = batch["labels"][:, None]
    is_puzzle = (labels != IGNORED).any(axis=(1, 2))
    sums = {"puzzles": is_puzzle.sum()}
    for depth in doublings(how.steps):
        tokens, halts, changes = (part[depth - 1] for part in found)
        right = ((tokens == labels) | (labels == IGNORED)).all(axis=-1)
        sums[f"{ALONE}/{depth}x1"] = (right[:, 0] & is_puzzle).sum()
        for width in doublings(how.trajectories)[1:]:
            first = tokens[:, :width], halts[:, :width], changes[:, :width]
            for choice in choosing.CHOICES:
                place = choosing.chosen(choice, *first)
                taken = jnp.take_along_axis(right[:, :width], place[:, None], axis=1)[:, 0]
                sums[f"{choice}/{depth}x{width}"] = (taken & is_puzzle).sum()
            if checker:
                keeps = checker(batch["inputs"][:, None], first[0]).any(axis=1)
                sums[f"{ORACLE}/{depth}x{width}"] = (keeps & is_puzzle).sum()
    return sums


def doublings(most: int) -> list[int]:
    """Return 1, 2, 4, ... up to `most`, and `most`."""
    return [*(1 << n for n in range(most.bit_length()) if 1 << n < most), most]


def table(figures: dict[str, float], how: breadth.Breadth, choice: str, title: str) -> list[str]:
    """Return the lines of accuracy by depth: alone, by each way of choosing among all trajectories, and by breadth."""
    width, widths = how.trajectories, doublings(how.trajectories)[1:]
    columns = {ALONE: (ALONE, 1)}
    columns |= {name: (name, width) for name in (*choosing.CHOICES, ORACLE) if f"{name}/{how.steps}x{width}" in figures}
    lines = [f"accuracy by depth: {title}", _row("steps", columns)]
    if widths:
        lines[0] += f"; {width} trajectories, noise {how.noise:g}"
    for depth in doublings(how.steps):
        lines.append(_row(depth, [f"{figures[f'{name}/{depth}x{of}']:.2%}" for name, of in columns.values()]))
    if widths:
        lines += [f"accuracy by depth and number of trajectories, chosen by {choice}:", _row("steps", [1, *widths])]
        for depth in doublings(how.steps):
            names = [f"{ALONE}/{depth}x1", *(f"{choice}/{depth}x{of}" for of in widths)]
            lines.append(_row(depth, [f"{figures[name]:.2%}" for name in names]))
    return lines


def _row(first, cells) -> str:
    return f"{first!s:>7}" + "".join(f"{cell!s:>15}" for cell in cells)
