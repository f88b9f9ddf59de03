# SPDX-License-Identifier: Apache-2.0
"""Deep supervision of a recursive model, with halting (arXiv:2510.04871, section 4.6; arXiv:2506.21734).

A row of the batch is a slot that holds a puzzle for several steps. In each step the model continues from its last
states, gets a loss, and predicts whether it is done. A slot that has halted takes its row of the next batch as a new
puzzle; the rows of other slots are discarded.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from layers import latents
from layers.stablemax import softmax_loss, stablemax_loss
from objectives.objective import Objective

IGNORED = -100  # a masked label
HALT_WEIGHT = 0.5
OF_START, OF_PATH = range(1, 3)  # purposes of random draws, each with keys of its own
LOSSES = {"stablemax": stablemax_loss, "softmax": softmax_loss}


def make(config) -> "Recursive":
    """Return the objective of a configuration."""
    train, supervision = config.train, config.supervision
    return Recursive(
        rows=train.global_batch, num_cells=train.sequence_length, max_steps=supervision.max_steps,
        exploration=supervision.exploration, cell_loss=supervision.loss, vocab_size=config.model.vocab_size,
        num_puzzles=config.model.num_puzzles, final_exploration=supervision.final_exploration, num_updates=train.steps,
        label_smoothing=supervision.label_smoothing, random_start=supervision.random_start,
        path_noise=supervision.path_noise, parallel=supervision.parallel,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Recursive(Objective):
    """Minimise the mean loss of a slot's cells plus half the loss of its halt logit.

    Attributes:
      max_steps: number of steps after which a slot halts.
      exploration: probability, in each step, that a slot must take at least a random number of steps.
      final_exploration: the probability in the last of `num_updates`, to which it moves in equal parts; less
        than 0: it stays.
      label_smoothing: part of a cell's target that is spread evenly over all tokens, in training.
      random_start: standard deviation of random initial latents; 0: those of the model.
      path_noise: standard deviation of the noise that training adds to each update of a latent.
      parallel: number of latents of a slot in training, K. The gradient is that of the latents with the lowest loss of
        the cells, whose `high` all K continue with; each keeps its own low latents (arXiv:2601.19085, section 4).
    """

    rows: int
    num_cells: int
    max_steps: int = 16
    exploration: float = 0.1
    cell_loss: str = "stablemax"
    vocab_size: int = 0  # of random batches
    num_puzzles: int = 1  # of random batches
    final_exploration: float = -1.0
    num_updates: int = 0
    label_smoothing: float = 0.0
    random_start: float = 0.0
    path_noise: float = 0.0
    parallel: int = 1

    def batch(self) -> dict[str, tuple]:
        """Return the shapes of a batch: tokens, labels (may be IGNORED), and identifiers, rows of the puzzle table."""
        cells = (self.rows, self.num_cells)
        return {"inputs": cells, "labels": cells, "puzzle_identifiers": (self.rows,)}

    def random_batch(self, key) -> dict[str, jax.Array]:
        """Return a random batch; a tenth of its labels is IGNORED."""
        of_inputs, of_labels, of_ignored, of_puzzles = jax.random.split(key, 4)
        cells = (self.rows, self.num_cells)
        labels = jax.random.randint(of_labels, cells, 0, self.vocab_size)
        return {
            "inputs": jax.random.randint(of_inputs, cells, 0, self.vocab_size),
            "labels": jnp.where(jax.random.bernoulli(of_ignored, 0.1, cells), IGNORED, labels),
            "puzzle_identifiers": jax.random.randint(of_puzzles, (self.rows,), 0, self.num_puzzles),
        }

    def init_carry(self, model, rows: int, key) -> dict:
        """Return halted slots; each has its own random key, so the draws do not depend on the layout."""
        return {
            "states": jax.tree.map(jnp.zeros_like, self._grouped(model.start(rows * self.parallel))),
            "steps": jnp.zeros(rows, jnp.int32),
            "halted": jnp.ones(rows, bool),
            "draws": jax.random.key_data(jax.random.split(key, rows)),
            **({"updates": jnp.zeros(rows, jnp.int32)} if self.anneals else {}),
            **{name: jnp.zeros((rows, *shape[1:]), jnp.int32) for name, shape in self.batch().items()},
        }

    def flops_per_token(self, of_model, *, frozen: bool) -> float:
        """Return the model FLOPs of one token: those of a step for each of its latents."""
        return self.parallel * super().flops_per_token(of_model, frozen=frozen)

    @property
    def plain(self) -> "Recursive":
        """This objective without what only training does: several latents of a slot, and noise."""
        return dataclasses.replace(self, parallel=1, path_noise=0.0, label_smoothing=0.0)

    @property
    def anneals(self) -> bool:
        """Whether `exploration` changes during the run."""
        return self.final_exploration >= 0

    def used_rows(self, carry: dict) -> jax.Array:
        """Return the identifiers of the puzzles in the slots."""
        return carry["puzzle_identifiers"]

    def loss(self, model, carry, batch, key):
        """Return the loss of one supervision step of every slot; random draws come from the carry."""
        carry, logits, halt_logits = self.step(model, carry, batch)
        if self.parallel > 1:
            carry, logits, halt_logits = self._best(carry, logits, halt_logits)
        exploration = self._explorations(carry) if self.anneals else self.exploration
        draws, chosen = _drawn(carry["draws"], exploration, self.max_steps)
        if self.anneals:
            carry |= {"updates": carry["updates"] + 1}
        wants = (halt_logits > 0) & (carry["steps"] >= chosen)
        carry |= {"halted": (carry["steps"] >= self.max_steps) | wants, "draws": draws}
        sums = self._sums(carry, logits, halt_logits, self.label_smoothing)
        counts = carry["halted"] & (sums.pop("count") > 0)
        rows, total = jnp.float32(counts.shape[0]), sums["lm_loss"].sum() + HALT_WEIGHT * sums["halt_loss"].sum()
        scalars = {"lm_loss": (sums.pop("lm_loss").sum(), rows), "halt_loss": (sums.pop("halt_loss").sum(), rows)}
        scalars |= _counted(sums, counts) | {"loss": (total, rows)}
        return (total * self.num_cells, rows * self.num_cells), (carry, jax.lax.stop_gradient(scalars))

    def evaluate(self, model, batch) -> dict:
        """Return the scalars after `max_steps` from a fresh carry, over rows with any label; no slot halts earlier."""
        sums = self._sums(*self.plain._answered(model, batch))
        counts = sums.pop("count") > 0
        scalars = _counted(sums, counts)
        return scalars | {"loss": scalars["lm_loss"]}

    def predict(self, model, batch) -> tuple[jax.Array, jax.Array]:
        """Return the answers that `evaluate` evaluates: (int32 tokens [B, cells], float32 halt logits [B])."""
        _, logits, halt_logits = self.plain._answered(model, batch)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), halt_logits

    def format_metrics(self, figures: dict[str, float]) -> tuple[str, str, str]:
        """Return the texts of solved puzzles, correct cells, and the loss."""
        exact, cells, loss = (figures[name] for name in ("exact_accuracy", "accuracy", "loss"))
        return "exact", f"{exact:.2%}, cells {cells:.2%}, loss {loss:.4f} a cell", "puzzles"

    def step(self, model, carry: dict, batch: dict) -> tuple[dict, jax.Array, jax.Array]:
        """Return (carry after the model's step, logits [B, cells, V], float32 halt logits [B]).

        With K `parallel` latents, logits are [B, K, cells, V] and halt logits [B, K].
        """
        halted = carry["halted"]
        fresh = functools.partial(where_rows, halted)
        states = jax.tree.map(fresh, self._grouped(self.start(model, carry["draws"])), carry["states"])
        example = {name: fresh(batch[name], carry[name]) for name in self.batch()}
        states, logits, halt = self._called(model, states, example, carry["draws"])
        steps = jnp.where(halted, 0, carry["steps"]) + 1
        return carry | {"states": states, "steps": steps, **example}, logits, halt[..., 0]

    def start(self, model, draws: jax.Array):
        """Return the initial states of the slots with these keys; a slot's `parallel` latents are consecutive rows."""
        begun = model.start(draws.shape[0] * self.parallel)
        if not self.random_start:
            return begun
        return latents.random_states(self._draws(draws, OF_START), begun, self.random_start)

    def _called(self, model, states, example: dict, draws: jax.Array) -> tuple:
        """Return the model's (states, logits, halt logits) for the slots' examples, of each of a slot's latents."""
        inputs, puzzles = (
            array if self.parallel == 1 else jnp.repeat(array, self.parallel, axis=0)
            for array in (example["inputs"], example["puzzle_identifiers"])
        )
        if self.parallel > 1:
            states = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), states)
        if self.path_noise:
            path = latents.Path(self._draws(draws, OF_PATH), self.path_noise)
            return self._grouped(model(states, inputs, puzzles, path=path))
        return self._grouped(model(states, inputs, puzzles))

    def _draws(self, draws: jax.Array, purpose: int) -> jax.Array:
        """Return the keys of a purpose for each of the slots' latents."""
        keys = latents.folded(draws, purpose)
        return keys if self.parallel == 1 else latents.of_each(keys, self.parallel)

    def _grouped(self, tree):
        """Return arrays [B * K, ...] as [B, K, ...], with the K latents of a slot; K = 1 has no dimension."""
        if self.parallel == 1:
            return tree
        return jax.tree.map(lambda leaf: leaf.reshape(-1, self.parallel, *leaf.shape[1:]), tree)

    def _best(self, carry: dict, logits: jax.Array, halt_logits: jax.Array) -> tuple:
        """Return (carry, logits, halt logits) of each slot's latents with the lowest loss of the cells."""
        labels = carry["labels"][:, None]
        learned = labels != IGNORED
        of_cell = LOSSES[self.cell_loss](
            jax.lax.stop_gradient(logits),
            jnp.broadcast_to(jnp.where(learned, labels, 0), logits.shape[:-1]),
            self.label_smoothing,
        )
        best_B = jnp.where(learned, of_cell, 0).sum(axis=-1).argmin(axis=1)

        def chosen(array):
            return jnp.take_along_axis(array, best_B.reshape(-1, *[1] * (array.ndim - 1)), axis=1)

        high, low = carry["states"]
        states = jnp.broadcast_to(chosen(high), high.shape), low
        return carry | {"states": states}, chosen(logits)[:, 0], chosen(halt_logits)[:, 0]

    def step_on(self, model, carry: dict, batch: dict) -> tuple[dict, jax.Array, jax.Array]:
        """Return the results of `step` with no slot halted."""
        carry, logits, halt_logits = self.step(model, carry, batch)
        return carry | {"halted": jnp.zeros_like(carry["halted"])}, logits, halt_logits

    def _explorations(self, carry: dict) -> jax.Array:
        """Return float32 [B]: `exploration` of this update, linear in the number of updates before it."""
        part = jnp.minimum(carry["updates"] / max(1, self.num_updates - 1), 1.0)
        return self.exploration + (self.final_exploration - self.exploration) * part

    def _answered(self, model, batch) -> tuple[dict, jax.Array, jax.Array]:
        """Return the results of `step` after `max_steps` from a fresh carry, in which no slot halts."""
        rows = batch["labels"].shape[0]
        carry = self.init_carry(model, rows, jax.random.key(0))
        _, *shapes = jax.eval_shape(lambda: self.step_on(model, carry, batch))
        begun = (carry, *[jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes])
        return jax.lax.fori_loop(0, self.max_steps, lambda _, before: self.step_on(model, before[0], batch), begun)

    def _sums(
        self, carry: dict, logits: jax.Array, halt_logits: jax.Array, smoothing: float = 0.0
    ) -> dict[str, jax.Array]:
        """Return float32 [B] each: `count` of unmasked cells, losses, and metrics of a slot."""
        labels = carry["labels"]
        learned = labels != IGNORED
        count = learned.sum(axis=1)
        cells = jnp.maximum(count, 1)
        of_cell = LOSSES[self.cell_loss](logits, jnp.where(learned, labels, 0), smoothing)
        right = (jnp.argmax(logits, axis=-1) == labels) & learned
        exact = right.sum(axis=1) == count
        return {
            "count": count,
            "lm_loss": jnp.where(learned, of_cell, 0).sum(axis=1) / cells,
            "halt_loss": jax.nn.softplus(halt_logits) - halt_logits * exact,  # binary cross-entropy
            "accuracy": right.sum(axis=1) / cells,
            "exact_accuracy": exact.astype(jnp.float32),
            "halt_accuracy": ((halt_logits >= 0) == exact).astype(jnp.float32),
            "steps": carry["steps"].astype(jnp.float32),
        }


def where_rows(of_rows: jax.Array, new: jax.Array, old: jax.Array) -> jax.Array:
    """Return the rows of `new` where bool [B] is true, and those of `old` elsewhere."""
    return jnp.where(of_rows.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _counted(of_slots: dict[str, jax.Array], counts: jax.Array) -> dict[str, tuple]:
    """Return for each name the pair (sum over the counted slots, their number)."""
    return {name: (jnp.where(counts, of_slot, 0).sum(), counts.sum()) for name, of_slot in of_slots.items()}


def _drawn(draws: jax.Array, exploration: float | jax.Array, max_steps: int) -> tuple[jax.Array, jax.Array]:
    """Return (the keys of the next draws, the minimum number of steps of each slot, 0 for most).

    Args:
      exploration: probability of a minimum; one for all slots, or float32 [B].
    """

    def one(data, probability):
        after, explores, steps = jax.random.split(jax.random.wrap_key_data(data), 3)
        least = jax.random.randint(steps, (), 2, max(3, max_steps + 1))
        return jax.random.key_data(after), jnp.where(jax.random.bernoulli(explores, probability), least, 0)

    return jax.vmap(one, in_axes=(0, 0 if jnp.ndim(exploration) else None))(draws, exploration)
