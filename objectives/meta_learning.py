# SPDX-License-Identifier: Apache-2.0
"""Meta-learning: train a model to learn a new task from a few examples.

A row of the batch is a task: its first `num_support` examples are the support, which the model learns from, and the
others are the query, which it is judged by. `meta.method` says how it learns:

- maml, first_order_maml, reptile: by gradient steps on the support, see layers/inner_loop.py;
- prototypical: by the mean embedding of each class (Snell et al. 2017, arXiv:1703.05175, equations 1 and 2);
- in_context: by reading the examples as a sequence (Garg et al. 2022, arXiv:2208.01066, equation 3).

The interface of objectives has integers alone, so numbers of examples are float32 whose bits are carried as int32.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx

from layers import inner_loop
from layers.axes import unsharded
from layers.inner_loop import InnerLoop
from objectives.objective import Objective, bits_of, numbers_of

SQUARED, CROSS_ENTROPY = "squared_error", "cross_entropy"
EMPTY = -1e9  # logit of a class without a member: finite, so that its gradient is 0 and not NaN


def make(config) -> "MetaLearning":
    """Return the objective of a configuration."""
    train, meta = config.train, config.meta
    kind = {"prototypical": Prototypical, "in_context": InContext}.get(meta.method, GradientBased)
    return kind(
        rows=train.global_batch, length=train.sequence_length, num_support=meta.support,
        input_dim=config.model.input_dim, loss_name=meta.loss, num_outputs=config.model.output_dim,
        inner=inner_loop_of(meta),
    )  # fmt: skip


def inner_loop_of(meta) -> InnerLoop:
    """Return the inner loop of the `meta` section of a configuration."""
    return InnerLoop(
        method=meta.method, num_steps=meta.inner_steps, eval_steps=meta.eval_steps, rate=meta.inner_rate,
        learns_rates=meta.learn_rates,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MetaLearning(Objective):
    """Minimise the mean loss of the queries of all tasks.

    Attributes:
      rows: tasks in a batch.
      length: examples of a task.
      num_support: examples of the support.
      input_dim: numbers of an input.
      loss_name: loss of an example; SQUARED: its target is a number; CROSS_ENTROPY: its target is a class.
      num_outputs: numbers that the model returns for an example. They limit the classes of random batches.
    """

    rows: int
    length: int
    num_support: int
    input_dim: int
    loss_name: str = SQUARED
    num_outputs: int = 1
    inner: InnerLoop = dataclasses.field(default_factory=InnerLoop)

    def of_tasks(self, model, inputs, targets, *, trains: bool) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Return (what each task minimises, {name: the mean of each task's queries}), all float32 [B].

        Args:
          inputs: float32 [B, length, input_dim].
          targets: [B, length], float32 numbers or int32 classes.
          trains: whether the first result is used; otherwise the figures are those of an evaluation.
        """
        raise NotImplementedError

    def batch(self) -> dict[str, tuple]:
        """Return the shapes of a batch: inputs (bits of float32), targets (such bits, or classes), and task numbers.

        Task 0 is padding.
        """
        shape = (self.rows, self.length)
        return {"inputs": (*shape, self.input_dim), "targets": shape, "tasks": (self.rows,)}

    def random_batch(self, key) -> dict[str, jax.Array]:
        """Return random tasks; the last row is padding if there are several."""
        of_inputs, of_targets = jax.random.split(key)
        shapes = self.batch()
        classes = jnp.broadcast_to(jnp.arange(self.length), shapes["targets"]) % min(self.num_support, self.num_outputs)
        numbers = bits_of(jax.random.normal(of_targets, shapes["targets"]))
        number = 1 + jnp.arange(self.rows)
        return {
            "inputs": bits_of(jax.random.normal(of_inputs, shapes["inputs"])),
            "targets": classes if self.loss_name == CROSS_ENTROPY else numbers,
            "tasks": jnp.where((number == self.rows) & (self.rows > 1), 0, number),
        }

    def loss(self, model, carry, batch, key):
        """Return the loss; nothing is drawn at random. Its weight is the number of query examples."""
        minimized, figures, weight = self._sums(model, batch, trains=True)
        return (minimized, weight), (carry, jax.lax.stop_gradient(figures))

    def evaluate(self, model, batch) -> dict:
        """Return the figures of held-out tasks: `loss`, and what the method adds."""
        return self._sums(model, batch, trains=False)[1]

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts of all figures."""
        others = {name: value for name, value in figures.items() if name not in ("loss", "tokens")}
        texts = [f"{figures['loss']:.4f}", *(f"{name} {value:.4f}" for name, value in sorted(others.items()))]
        return "query loss", ", ".join(texts), "examples"

    def _sums(self, model, batch: dict, *, trains: bool):
        """Return (sum of what is minimised, {name: (sum, weight)}, weight); a task weighs its query examples."""
        inputs = numbers_of(batch["inputs"])
        targets = batch["targets"]
        if self.loss_name == SQUARED:
            targets = numbers_of(targets)
        minimized_B, figures = self.of_tasks(model, inputs, targets, trains=trains)
        weights_B = jnp.where(batch["tasks"] > 0, self.length - self.num_support, 0).astype(jnp.float32)
        weight = weights_B.sum()
        sums = {name: (jnp.sum(weights_B * of_task), weight) for name, of_task in figures.items()}
        return jnp.sum(weights_B * minimized_B), sums, weight

    def _split(self, inputs: jax.Array, targets: jax.Array) -> tuple[dict, dict]:
        """Return (support, query) of one task."""
        task = {"inputs": inputs, "targets": targets}
        return tuple(
            jax.tree.map(lambda array, part=part: array[part], task)
            for part in (slice(self.num_support), slice(self.num_support, None))
        )


class GradientBased(MetaLearning):
    """The model adapts by gradient steps, the same number for each task of the batch."""

    def transform(self, model: nnx.Module, rngs: nnx.Rngs, **frozen: nnx.Module) -> nnx.Module:
        """Add learned step sizes, if they are learned."""
        return inner_loop.add_rates(model) if self.inner.learns_rates else model

    def flops_per_token(self, of_model, *, frozen: bool) -> float:
        """Return the model FLOPs of one example, its share of those of a task."""
        return of_model() * self.inner.passes(self.num_support, self.length - self.num_support) / self.length

    def of_tasks(self, model, inputs, targets, *, trains):
        """Return the loss after adaptation; in evaluation that before it too, and accuracies of classes."""
        build, params, scales = inner_loop.split(model)

        def loss(params: dict, examples: dict) -> jax.Array:
            return self._mean_loss(build(params)(examples["inputs"]), examples["targets"])

        def of_task(inputs, targets):
            support, query = self._split(inputs, targets)
            if trains:
                minimized, after = self.inner.minimized(loss, params, scales, support, query)
                return minimized, {"loss": after}
            adapted = self.inner.adapt(loss, params, scales, support, self.inner.eval_steps)
            figures = {"before_adaptation": loss(params, query), "after_adaptation": loss(adapted, query)}
            if self.loss_name == CROSS_ENTROPY:
                figures["accuracy"] = _accuracy(build(adapted)(query["inputs"]), query["targets"])
            return figures["after_adaptation"], figures | {"loss": figures["after_adaptation"]}

        with unsharded():
            return jax.vmap(of_task)(inputs, targets)

    def _mean_loss(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the mean loss of outputs [N, num_outputs], a float32 scalar."""
        outputs = outputs.astype(jnp.float32)
        if self.loss_name == SQUARED:
            return jnp.mean(jnp.square(outputs[:, 0] - targets))
        return _cross_entropy(outputs, targets)


class Prototypical(MetaLearning):
    """The model embeds examples; a class is the mean of its support, and a query belongs to the nearest class.

    The classes of a task are 0, 1, ..., and each has as many examples in its support.
    """

    def of_tasks(self, model, inputs, targets, *, trains):
        """Return cross-entropy and accuracy of the queries, with logits -||f(x) - c||^2."""
        embeddings = model(inputs.reshape(-1, inputs.shape[-1])).astype(jnp.float32)
        embeddings = embeddings.reshape(*targets.shape, -1)

        def of_task(embeddings, targets):
            support, query = self._split(embeddings, targets)
            logits = prototype_logits(support["inputs"], support["targets"], query["inputs"])
            loss = _cross_entropy(logits, query["targets"])
            return loss, {"loss": loss, "accuracy": _accuracy(logits, query["targets"])}

        return jax.vmap(of_task)(embeddings, targets)


class InContext(MetaLearning):
    """The model reads (x_1, y_1, x_2, y_2, ...) and predicts each y from what precedes it; no parameter changes."""

    def of_tasks(self, model, inputs, targets, *, trains):
        """Return the mean squared error over all examples; in evaluation that of the first, and that of the queries."""
        squares_BT = jnp.square(model(inputs, targets) - targets)
        if trains:
            return squares_BT.mean(axis=1), {"loss": squares_BT.mean(axis=1)}
        after_B = squares_BT[:, self.num_support :].mean(axis=1)
        figures = {"before_adaptation": squares_BT[:, 0], "after_adaptation": after_B, "loss": after_B}
        return after_B, figures


def prototype_logits(support: jax.Array, classes: jax.Array, query: jax.Array) -> jax.Array:
    """Return float32 logits [Q, S] of the embeddings [Q, D] of queries: -||f(x) - c||^2, c being a class's mean.

    Args:
      support: embeddings [S, D].
      classes: int [S], of the support. A task has at most S classes; those without a member have probability 0.
    """
    members = jax.nn.one_hot(classes, len(classes), axis=0)
    counts = members.sum(axis=1)
    sums = (members[:, :, None] * support[None]).sum(axis=1)  # a product of matrices would round `support` on a TPU
    prototypes = sums / jnp.maximum(counts, 1)[:, None]
    distances = jnp.square(query[:, None] - prototypes[None]).sum(axis=-1)
    return jnp.where(counts > 0, -distances, EMPTY)


def _cross_entropy(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Return the mean of -log p(class) in nats, of logits [N, classes]."""
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), classes[:, None], axis=1))


def _accuracy(logits: jax.Array, classes: jax.Array) -> jax.Array:
    """Return the fraction of rows whose largest logit is that of the class."""
    return jnp.mean(jnp.argmax(logits, axis=1) == classes)
