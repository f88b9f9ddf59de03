# SPDX-License-Identifier: Apache-2.0
"""Forgetting: the objective's metrics on the held-out data of each task of `data.stream`."""

import dataclasses

from core.evaluation import evaluate_heldout
from core.evaluators import Evaluator
from input_pipeline.corpus import Corpus

KIND = "stream"


def make(config, corpus: Corpus | None) -> Evaluator | None:
    if corpus is None or not corpus.tasks:
        return None
    return StreamTasks(config.train.eval_every, config.evaluation.batches)


class StreamTasks(Evaluator):
    """The objective's metrics on the held-out data of each task of `data.stream`, earlier and later ones too."""

    name = KIND

    def __init__(self, every: int, num_batches: int):
        """Evaluate on `num_batches` global batches of each task, every `every` steps."""
        self.every, self.num_batches = every, num_batches

    def evaluate(self, context):
        """Return {path of the task/metric: mean}."""
        found, corpus = {}, context.corpus
        for path, heldout in zip(corpus.names, corpus.tasks, strict=True):
            of_task = dataclasses.replace(context, corpus=dataclasses.replace(corpus, heldout=heldout))
            result = evaluate_heldout(of_task, self.num_batches)
            if result is None:
                return None
            found |= {f"{path}/{metric}": mean for metric, mean in result[0].items()}
        return found

    def lines(self, context, figures):
        return [f"task {name}: {figure:.4f}" for name, figure in figures.items()]
