# SPDX-License-Identifier: Apache-2.0
"""Held-out problems solved by search during training, with `tot.use_tot`."""

import statistics

from configs.errors import ConfigError
from core import solving
from core.evaluators import Evaluator
from input_pipeline.corpus import Corpus

KIND = "tot"


def make(config, corpus: Corpus | None) -> Evaluator | None:
    if not config.tot.use_tot:
        return None
    if corpus is None:
        raise ConfigError("tot.use_tot=True: batches of the caller have no held-out problems; leave it out")
    task = solving.task_of(config)
    return TreeOfThoughts(config.train.eval_every, task, task.problems(corpus.heldout, config.tot.problems))


class TreeOfThoughts(Evaluator):
    """The share of held-out problems that `tot.search` solves, and what it takes."""

    name = KIND

    def __init__(self, every: int, task, problems: list[str]):
        self.every, self.task, self.problems = every, task, problems

    def evaluate(self, context):
        """Return the share that is solved, and per problem the tokens drawn, computed, and taken from other rows."""
        if context.stop():
            return None
        found, batch = solving.solve(context.engine, context.run.config, self.problems, stop=context.stop)
        if found is None:
            return None
        return {
            "solved": statistics.fmean(self.task.is_correct(one.problem, one.answer) for one in found),
            "drawn_tokens": statistics.fmean(one.num_tokens for one in found),
            "prompt_tokens": batch.num_prompt_tokens / len(found),
            "shared_tokens": batch.num_shared_tokens / len(found),
        }

    def lines(self, context, figures):
        tot = context.run.config.tot
        return [
            f"{tot.search} with {tot.max_thoughts} thoughts, {tot.thoughts_per_step} lines each: "
            f"{figures['solved']:.1%} of {len(self.problems)} problems solved, "
            f"{figures['drawn_tokens']:.0f} tokens each"
        ]
