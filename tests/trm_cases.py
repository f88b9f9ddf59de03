# SPDX-License-Identifier: Apache-2.0
"""Tiny recursive models: those of recorded files, and one for tests of our own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from configs import base
from layers.stablemax import stablemax_loss
from migration.trm_reference import from_reference
from models import trm
from objectives.recursive import IGNORED, Recursive
from tests.support import FIXTURES

ROWS, CELLS, VOCAB, PUZZLES = 4, 6, 7, 5


def names_of(part: str) -> list[str]:
    """Return the recorded cases that have a file of weights, steps or grads."""
    files = FIXTURES.glob(f"trm_public_*_{part}.npz")
    return sorted(path.name.removeprefix("trm_public_").removesuffix(f"_{part}.npz") for path in files)


def recorded(name: str) -> dict[str, np.ndarray]:
    """Return the arrays of a recorded file, all of it read."""
    with np.load(FIXTURES / f"trm_public_{name}.npz", allow_pickle=False) as file:
        return {key: file[key] for key in file}


def of_settings(settings: dict):
    """Return the `model` section for the recorded settings of the public code."""
    width, heads = int(settings["hidden_size"]), int(settings["num_heads"])
    config = base.get_config().model
    config.update(
        name="trm", embed_dim=width, num_heads=heads, num_kv_heads=heads,
        mlp_dim=256 * -(-round(float(settings["expansion"]) * width * 2 / 3) // 256),
        num_layers=int(settings["L_layers"]), vocab_size=int(settings["vocab_size"]),
        max_length=int(settings["seq_len"]), dtype=str(settings["forward_dtype"]),
        mixer="mlp" if settings["mlp_t"] else "attention", positions=str(settings["pos_encodings"]),
        high_cycles=int(settings["H_cycles"]), low_cycles=int(settings["L_cycles"]),
        puzzle_dim=int(settings["puzzle_emb_ndim"]), prefix_length=int(settings["puzzle_emb_len"]),
        num_puzzles=int(settings["num_puzzle_identifiers"]),
    )  # fmt: skip
    return config


def small_model(**changes):
    """Return a `model` section of the smallest sizes, with a table of puzzles."""
    config = base.get_config().model
    config.update(
        name="trm", num_layers=2, embed_dim=16, num_heads=2, num_kv_heads=2, mlp_dim=24, vocab_size=VOCAB,
        max_length=CELLS, dtype="float32", high_cycles=2, low_cycles=3, puzzle_dim=20, prefix_length=2,
        num_puzzles=PUZZLES,
    )  # fmt: skip
    config.update(changes)
    return config


def abstract_model(config, *, scan: bool = True, dtype=jnp.float32) -> trm.TRM:
    """Return the model with shapes for parameters."""
    return nnx.eval_shape(lambda: trm.make(config, dtype=dtype, scan=scan, rngs=nnx.Rngs(0)))


def abstract(config, *, scan: bool = True, dtype=jnp.float32) -> tuple[nnx.GraphDef, dict]:
    """Return (graph, shapes of the parameters)."""
    graph, state = nnx.split(abstract_model(config, scan=scan, dtype=dtype))
    return graph, nnx.to_pure_dict(state)


def initial(config, *, dtype=jnp.float32) -> tuple[nnx.GraphDef, dict]:
    """Return (graph, parameters as a run begins with them)."""
    make = jax.jit(lambda: nnx.to_pure_dict(nnx.state(trm.make(config, dtype=dtype, scan=True, rngs=nnx.Rngs(0)))))
    return abstract(config, dtype=dtype)[0], make()


def small_batch(rows: int = ROWS, seed: int = 0) -> dict:
    """Return random examples, some cells of them and all of the last one not learned."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, VOCAB, (rows, CELLS))
    labels[rng.random(labels.shape) < 0.2] = IGNORED
    labels[-1] = IGNORED
    batch = {"inputs": rng.integers(0, VOCAB, (rows, CELLS)), "labels": labels}
    return {k: v.astype(np.int32) for k, v in (batch | {"puzzle_identifiers": rng.integers(0, PUZZLES, rows)}).items()}


@dataclasses.dataclass(frozen=True)
class Case:
    """A recorded case: its files, and what computes the same.

    Attributes:
      tolerance: of logits, of the loss and of gradients, by the kind of mixer: the MLP's norm over positions makes
        rounding grow five times a step, in the reference's arithmetic as in ours.
    """

    name: str
    steps: dict
    grads: dict
    tensors: dict
    config: object
    objective: Recursive
    graph: nnx.GraphDef
    params: dict

    @property
    def tolerance(self) -> dict[str, float]:
        if self.config.mixer == "attention":
            return {"logits": 1e-4, "loss": 1e-4, "gradient": 1e-4}
        return {"logits": 3e-3, "loss": 1e-3, "gradient": 5e-4}

    def at(self, call: int, what: str) -> np.ndarray:
        """Return what was recorded of a call."""
        return self.steps[f"train/step{call}/{what}"]

    def batch(self, call: int) -> dict:
        return {name: self.at(call, f"batch/{name}") for name in self.objective.batch()}

    @functools.cached_property
    def empty(self) -> dict:
        """The carry of a run that begins."""
        init = jax.jit(lambda p: self.objective.init_carry(nnx.merge(self.graph, p), self.objective.rows, _key()))
        return init(self.params)


@functools.cache
def case(name: str) -> Case:
    """Return a recorded case."""
    weights, steps = recorded(f"{name}_weights"), recorded(f"{name}_steps")
    settings = {key.removeprefix("config/"): value[()] for key, value in weights.items() if key.startswith("config/")}
    tensors = {key: value for key, value in weights.items() if not key.startswith("config/")}
    config = of_settings(settings)
    graph, shapes = abstract(config, dtype=jnp.dtype(config.dtype))
    objective = Recursive(
        int(settings["batch_size"]), config.max_length, int(settings["halt_max_steps"]),
        float(settings["halt_exploration_prob"]),
    )  # fmt: skip
    grads = recorded(f"{name}_grads") if name in names_of("grads") else {}
    return Case(name, steps, grads, tensors, config, objective, graph, from_reference(tensors, shapes))


class Watched:
    """A model that keeps the logits and halt logits of its last call."""

    def __init__(self, model):
        self.model, self.start = model, model.start

    def __call__(self, *inputs):
        states, *self.logits = self.model(*inputs)
        return states, *self.logits


@functools.partial(jax.jit, static_argnames=("graph", "objective"))
def call(graph, objective: Recursive, params: dict, carry: dict, batch: dict) -> dict:
    """Return all that one supervision step computes, gradients of the mean over rows among it."""

    def mean_loss(params):
        model = Watched(nnx.merge(graph, params))
        (total, weight), (after, scalars) = objective.loss(model, carry, batch, None)
        return total / weight, (after, scalars, *model.logits)

    gradients, (after, scalars, logits, halt_logits) = jax.grad(mean_loss, has_aux=True)(params)
    learned = after["labels"] != IGNORED
    losses = jnp.where(learned, stablemax_loss(logits, jnp.where(learned, after["labels"], 0)), 0)
    return {
        "gradients": gradients, "carry": after, "scalars": scalars, "logits": logits, "halt_logits": halt_logits,
        "losses": losses,
    }  # fmt: skip


def _key() -> jax.Array:
    return jax.random.key(0)
