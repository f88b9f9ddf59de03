# SPDX-License-Identifier: Apache-2.0
"""The interface of an objective: what a run trains, on which models, with which loss.

`train.objective = "NAME"` is the module objectives/NAME.py, whose `make(config)` returns an `Objective`.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx


class FrozenModel(NamedTuple):
    """Another model that the loss reads and does not train.

    Attributes:
      role: the keyword by which `transform`, `loss` and `evaluate` get it, such as "teacher".
      key: the configuration key that names the run of its weights.
      evaluates: whether `evaluate` needs it too.
    """

    role: str
    key: str
    evaluates: bool = False


class Sampled(NamedTuple):
    """A batch that an objective sampled, and its records for rollouts.jsonl.

    Attributes:
      batch: with the names and shapes of `Objective.batch`; a batch of the data may have fewer arrays.
      records: the fields of a line of the file, as JSON values; the same in all processes.
    """

    batch: dict[str, jax.Array]
    records: Sequence[dict] = ()


class Objective:
    """Loss and evaluation return sums and weights, never means: sums stay correct under sharding and accumulation.

    Subclasses define `batch`, `random_batch`, `loss`, `evaluate` and `format_metrics`. The other methods have defaults.

    Attributes:
      trainable: the filter of the trained parameters. The other parameters of the model are frozen. They are restored
        from the run that `train.init_from` names.
      progress: names of the step's scalars that the line of a step shows besides the loss.
      steps_of_batch: number of steps on each batch that `sample_batch` returns.
      reports_likelihood: whether `loss` of `evaluate` is -log p of the targets, which may be given in bits per byte.
    """

    trainable: nnx.filterlib.Filter = nnx.Param
    progress = ()
    steps_of_batch = 1
    reports_likelihood = True

    def frozen_models(self) -> tuple[FrozenModel, ...]:
        """Return the other models that the loss needs."""
        return ()

    def check_to_train(self) -> None:
        """Raise ConfigError if this process lacks what only training needs, such as a function of the recipe."""
        return  # a body, which tests/shape_check.py wraps

    def notes(self, config) -> list[str]:
        """Return lines, printed before step 1 of a new run, about what is allowed but may surprise."""
        return []

    def transform(self, model: nnx.Module, rngs: nnx.Rngs, **frozen: nnx.Module) -> nnx.Module:
        """Change the model before it is initialised, for example by adapters or a second head; return it.

        `frozen` has the frozen models by role, with abstract parameters.
        """
        return model

    def chunked(self, num_chunks: int) -> "Objective":
        """Return this objective for a sequence in `num_chunks` parts, whose logits exist one part at a time."""
        return self

    def flops_per_token(self, of_model: Callable[..., float], *, frozen: bool) -> float:
        """Return the model FLOPs of training on one token.

        Args:
          of_model: returns those of the model's forward and backward pass; with frozen=True, without the gradients of
            its weights.
          frozen: whether weights of the model are frozen.
        """
        return of_model(frozen=True) if frozen else of_model()

    def batch(self) -> dict[str, tuple]:
        """Return {name: shape} of the int32 arrays of a batch; the first dimension is the rows."""
        raise NotImplementedError

    def random_batch(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return a batch with random contents, to prove a layout."""
        raise NotImplementedError

    def sample_batch(self, engine, batch: dict[str, jax.Array], key: jax.Array) -> Sampled | None:
        """Return the batch to train on, sampled from the model that is trained; None: train on `batch` itself.

        It is called on the host, in each process, before every step or, of `steps_of_batch` steps, before the first.
        `engine` decodes with the live parameters, see inference/engine.py. `batch` is the next one of the data, and
        `key` depends on the step. All processes must return the same.
        """
        return None

    def decoded(self) -> tuple[int, int] | None:
        """Return (rows, tokens of a row) of the cache in which `sample_batch` decodes; None: it decodes nothing."""
        return None

    def init_carry(self, model: nnx.Module, rows: int, key: jax.Array) -> dict:
        """Return the first carry, which a step passes to the next; the first dimension of its arrays is the rows."""
        return {}

    def used_rows(self, carry: dict) -> jax.Array | None:
        """Return the int32 indices of the rows that a step used of a table with axis "puzzles"; None: there is none."""
        return None

    def loss(self, model: nnx.Module, carry: dict, batch: dict, key: jax.Array, **frozen: nnx.Module):
        """Return (sum, weight), (carry, scalars).

        `batch` may have only the rows of one microbatch on one device, and with mesh.model > 1 a part of their length.
        So compute sum and weight of what is in it, and shift nothing along the length. The step adds the sums and the
        weights of all parts; core/layout_proof.py compares layouts.

        The weight counts what the loss is a mean over, usually tokens. Scalars are (sum, weight) pairs. They include
        `loss`, and `tokens` if the weight counts something else; `gradient_norm`, `part_square` and `measured` are the
        step's own. `key` is that of the random draws of this step and microbatch.
        """
        raise NotImplementedError

    def evaluate(self, model: nnx.Module, batch: dict, **frozen: nnx.Module) -> dict[str, tuple]:
        """Return the scalars of held-out rows, (sum, weight) pairs of numbers with `loss` and without `tokens`."""
        raise NotImplementedError

    def summary(self, figures: dict[str, float]) -> dict[str, float]:
        """Return the figures to report, computed of the means of `evaluate` over all held-out rows."""
        return figures

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts for the figures of `summary`: (name, values, unit of the weight of the loss)."""
        raise NotImplementedError


def bits_of(numbers: jax.Array) -> jax.Array:
    """Return float32 numbers as int32 with the same bits, since batches are integers."""
    return jax.lax.bitcast_convert_type(numbers.astype(jnp.float32), jnp.int32)


def numbers_of(bits: jax.Array) -> jax.Array:
    """Return the float32 numbers whose bits these int32 are."""
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
