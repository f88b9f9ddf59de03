# SPDX-License-Identifier: Apache-2.0
"""The answers to held-out puzzles by vote, as ARC is scored: during training, and at the end of a run."""

import base64
import json
import logging
import pathlib

import jax

from cluster import processes
from core.evaluation import heldout_batches
from core.evaluators import Evaluator
from files.atomic import write_atomically
from input_pipeline.corpus import Corpus
from input_pipeline.errors import DataError
from parallelism import axis_rules
from parallelism.placement import local_values
from puzzles import voting
from puzzles.voting import Votes

KIND = "votes"
LOG = logging.getLogger("torus")
HEADLINE = "pass@2"
POOLED = "pooled/"


def make(config, corpus: Corpus | None) -> Evaluator | None:
    """Return the evaluator of held-out puzzles that are answered by vote."""
    if corpus is None or not corpus.heldout.test_puzzles:
        return None
    return PuzzleVotes(config.evaluation.votes_every)


class PuzzleVotes(Evaluator):
    """The results of votes on the held-out puzzles, with those of earlier steps if `evaluation.pooled_votes` is set."""

    name = KIND

    def __init__(self, every: int):
        """Vote every `every` steps, and at the end."""
        self.every = every

    def evaluate(self, context):
        """Return `voting.results` of the answers of this step.

        Votes are saved in the workdir's folder `votes`, one file for each step. The answers that win, without the votes
        of other steps, are saved in submission.json. `at_step/N/pass@2` is the result of another step's votes alone.
        """
        tasks, step = context.corpus.heldout.test_puzzles, context.step
        votes, file = vote(context), context.workdir / "votes" / f"{step}.gz"
        if votes is None:
            return None

        def keep() -> dict[str, float]:
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                votes.save(file)
                submission = json.dumps(voting.submission(votes, tasks))
                write_atomically(context.workdir / "submission.json", submission.encode())
            except OSError as error:  # such as a full disk, which ends no run
                LOG.error(f"the votes of step {step} are not saved: {error}")
            others = earlier_votes(file.parent, step)
            pooled = context.run.config.evaluation.pooled_votes
            found = voting.results(votes, tasks, [others[name] for name in sorted(others)] if pooled else [])
            return found | voting.of_steps(others, tasks, HEADLINE)

        return processes.shared(f"passes {step}", keep)

    def lines(self, context, figures):
        """Return the results in words, the headline first."""
        known = voting.num_known(context.corpus.heldout.test_puzzles)
        lines = []
        for prefix, what in (("", "held-out"), (POOLED, "held-out, pooled with earlier votes,")):
            of_kind = {k: figures[f"{prefix}pass@{k}"] for k in voting.PASSES if f"{prefix}pass@{k}" in figures}
            if of_kind:
                every = ", ".join(f"@{k} {value:.2%}" for k, value in of_kind.items())
                lines.append(f"{what} {HEADLINE}: {figures[prefix + HEADLINE]:.2%} of {known:,} tasks ({every})")
        steps = {int(name.split("/")[1]): value for name, value in figures.items() if name.startswith(voting.AT_STEP)}
        if steps:
            alone = ", ".join(f"step {step} {value:.2%}" for step, value in sorted(steps.items()))
            lines.append(f"held-out {HEADLINE} of other checkpoints, each alone: {alone}")
        return lines


def vote(context) -> Votes | None:
    """Return the votes of the answers to all held-out puzzles, the same in all processes; None if it was stopped."""
    run, windows, votes = context.run, context.corpus.heldout, Votes()
    layouts = axis_rules.batch_sharding(run.mesh, 2), axis_rules.batch_sharding(run.mesh, 1)
    predict = jax.jit(lambda params, batch: run.objective.predict(run.model(params), batch), out_shardings=layouts)
    for batch in heldout_batches(run, context.corpus, progress=context.progress):
        if context.stop():
            return None
        predictions, halt_logits = map(local_values, predict(context.params, batch))
        names = [windows.identifiers[row] for row in local_values(batch["puzzle_identifiers"]).tolist()]
        votes.add_batch(names, local_values(batch["inputs"]), predictions, halt_logits)
    texts = processes.gather("votes", base64.b64encode(votes.to_bytes()).decode())
    return Votes().merge(Votes.from_bytes(base64.b64decode(text)) for text in texts)


def earlier_votes(folder: pathlib.Path, step: int) -> dict[str, Votes]:
    """Return the votes of the steps before `step`, by step; files that cannot be read are left out, and named."""
    found = {}
    for path in folder.glob("*.gz"):
        if path.stem.isdigit() and int(path.stem) < step:
            try:
                found[path.stem] = Votes.load(path)
            except DataError as error:
                LOG.error(f"the votes of step {path.stem} are left out: {error}")
    return found
