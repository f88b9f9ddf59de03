# SPDX-License-Identifier: Apache-2.0
"""Language modelling in which a share of the rows are tasks: adapt to the start of a document, predict the rest.

A task is the document in the middle of a window. Its tokens in the first half are the support, those in the second half
the query. The model takes gradient steps on the support (layers/inner_loop.py), and the loss of the query counts. The
query does not see the support, so all that it learns from the support is in the adapted weights.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import nnx

from layers import inner_loop, taps
from layers.axes import unsharded
from layers.cross_entropy import log_probabilities
from layers.inner_loop import InnerLoop
from objectives import language_modeling
from objectives.language_modeling import LanguageModeling, loss_mask
from objectives.meta_learning import inner_loop_of

NUM_HALVES = 2  # of a window: support and query


def make(config) -> "MetaLanguageModeling":
    """Return the objective of a configuration."""
    language = language_modeling.make(config)
    return MetaLanguageModeling(**vars(language), share=config.meta.share, inner=inner_loop_of(config.meta))


@dataclasses.dataclass(frozen=True)
class MetaLanguageModeling(LanguageModeling):
    """The mean of -log p(target) over the tokens of plain rows and of queries after adaptation.

    The reported `loss` is that of plain rows, if there are some. `after_adaptation` is that of queries.

    Attributes:
      share: share of the rows that are tasks, rounded to whole rows of a device's microbatch, at least one.
    """

    share: float = 1.0
    inner: InnerLoop = dataclasses.field(default_factory=InnerLoop)

    def transform(self, model: nnx.Module, rngs: nnx.Rngs, **frozen: nnx.Module) -> nnx.Module:
        """Add learned step sizes, if they are learned."""
        model = super().transform(model, rngs, **frozen)
        return inner_loop.add_rates(model) if self.inner.learns_rates else model

    def flops_per_token(self, of_model, *, frozen: bool) -> float:
        """Return the mean of tasks and plain rows, by `share` before it is rounded to whole rows.

        The two halves of a task attend to fewer keys than a row, which is not counted.
        """
        return of_model() * (1 - self.share + self.share * self.inner.passes(1, 1) / NUM_HALVES)

    def loss(self, model, carry, batch, key):
        """Return the sum over plain rows, as in language modelling, and queries; `key` is that of the dropout."""
        tasks, plain = self._parts(batch)
        build, params, scales = inner_loop.split(model)

        def of_task(support, query):
            return self.inner.minimized(functools.partial(self._mean_loss, build), params, scales, support, query)

        minimized, after, weights_B = _over_tasks(of_task, tasks)
        minimized, after, weight = jnp.sum(weights_B * minimized), jnp.sum(weights_B * after), weights_B.sum()
        scalars = {"after_adaptation": (after, weight)}
        if not plain["tokens"].shape[0]:
            return (minimized, weight), (carry, jax.lax.stop_gradient(scalars | {"loss": (after, weight)}))
        (total, of_plain), (carry, others) = super().loss(inner_loop.with_float32_gradients(model), carry, plain, key)
        reported = jax.lax.stop_gradient(scalars | others)
        return (total + minimized, of_plain + weight), (carry, reported)

    def evaluate(self, model, batch) -> dict:
        """Return the loss of all rows, and of the queries of `share` of them before and after adaptation."""
        tasks, _ = self._parts(batch)
        build, params, scales = inner_loop.split(model)
        loss = functools.partial(self._mean_loss, build)

        def of_task(support, query):
            adapted = self.inner.adapt(loss, params, scales, support, self.inner.eval_steps)
            return loss(params, query), loss(adapted, query)

        before, after, weights_B = _over_tasks(of_task, tasks)
        pairs = {"before_adaptation": before, "after_adaptation": after}
        figures = {name: (jnp.sum(weights_B * of_task), weights_B.sum()) for name, of_task in pairs.items()}
        return super().evaluate(model, batch) | figures

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts of the loss, and of adaptation."""
        name, loss, unit = super().format_metrics(figures)
        before, after = figures["before_adaptation"], figures["after_adaptation"]
        return name, f"{loss}, of queries {before:.4f} before adaptation and {after:.4f} after it", unit

    def _parts(self, batch: dict) -> tuple[dict, dict]:
        """Return the rows that are tasks, and the others."""
        rows = batch["tokens"].shape[0]
        count = max(1, round(self.share * rows))
        parts = slice(count), slice(count, rows)
        return tuple({name: array[part] for name, array in batch.items()} for part in parts)

    def _mean_loss(self, build, params: dict, examples: dict) -> jax.Array:
        """Return the mean of -log p(target) over the unmasked tokens of arrays [B, T], 0 if there are none."""
        model = build(params)
        stream_BTD, *_ = model.forward_with_aux(examples["tokens"], examples["positions"], examples["segments"])
        chunks = self._chunks_of_part(examples["tokens"].shape[1], NUM_HALVES)
        log_p_BT = log_probabilities(*model.head_inputs(stream_BTD), examples["targets"], chunks, model.logit_cap)
        weights_BT = loss_mask(examples)
        return -jnp.sum(weights_BT * log_p_BT) / jnp.maximum(weights_BT.sum(), 1)


def halves(window: dict) -> tuple[dict, dict]:
    """Return (support, query) of one window of arrays [T]: each [1, T / 2], without tokens of other documents.

    The document is that of the last token of the first half. Other tokens have segment 0, so no weight. An odd last
    token is left out.
    """
    half = window["tokens"].shape[0] // 2
    is_document = window["segments"] == window["segments"][half - 1]
    window = window | {"segments": jnp.where(is_document, window["segments"], 0)}
    return tuple(
        {name: array[None, part] for name, array in window.items()} for part in (slice(half), slice(half, 2 * half))
    )


def _over_tasks(of_task, rows: dict) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return both results of `of_task(support, query)` for each row, and the number of tokens of each query: [B]."""

    def of_row(window):
        support, query = halves(window)
        return *of_task(support, query), loss_mask(query).sum()

    with unsharded(), taps.paused():  # the units of adapted copies are not those of the model
        return jax.vmap(of_row)(rows)
