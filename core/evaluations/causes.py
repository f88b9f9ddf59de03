# SPDX-License-Identifier: Apache-2.0
"""Causal analysis during training: which activations carry what distinguishes two prompts."""

import logging

import numpy as np

from causality import explanation, page
from cluster import processes
from configs.errors import ConfigError
from core.evaluators import Evaluator
from files.atomic import write_atomically
from inference.prompts import text_start
from input_pipeline.corpus import Corpus

LOG = logging.getLogger("torus")
KIND = "causality"


def make(config, corpus: Corpus | None) -> Evaluator | None:
    """Return the evaluator of `causality.prompt` and `causality.corrupt`; None without them."""
    if not config.causality.prompt:
        return None
    if corpus is None:
        raise ConfigError(
            f"causality.prompt={config.causality.prompt}: a run on batches of the caller has no tokenizer; leave it out"
        )
    names = "causality.prompt", "causality.corrupt"
    texts = config.causality.prompt, config.causality.corrupt
    start = text_start(corpus.tokenizer, config, is_trained=True)
    prompts = explanation.prompt_tokens(corpus.tokenizer, *texts, config.model.max_length, names, start)
    return CausalAnalysis(config.causality.every or config.train.eval_every, prompts)


class CausalAnalysis(Evaluator):
    """Which activations carry what distinguishes `causality.prompt` from `causality.corrupt`; see causality/."""

    name = KIND

    def __init__(self, every: int, prompts: tuple[np.ndarray, np.ndarray]):
        """Explain these two prompts, int32 [T], every `every` steps."""
        self.every, self.prompts = every, prompts

    def evaluate(self, context):
        """Return `explanation.figures`; write the heat maps to `workdir`/causes.html."""
        if context.stop():
            return None
        run, decode = context.run, context.corpus.tokenizer.decode
        found = explanation.explain(run.graph, context.params, *self.prompts, decode)
        if processes.index() == 0:
            text = page.page(found, f"Causal analysis at step {context.step:,}")
            try:
                write_atomically(context.workdir / "causes.html", text.encode())
            except OSError as error:  # such as a full disk, which ends no run
                LOG.error(f"causes.html is not written: {error}")
        return explanation.figures(found)

    def lines(self, context, figures):
        layer, head, effect = (figures[f"heads/{name}"] for name in ("layer", "head", "effect"))
        line = f"causality: head {head} of layer {layer} restores {effect:.3f} of the difference between the prompts"
        return [f"{line}; {context.workdir}/causes.html"]
