# SPDX-License-Identifier: Apache-2.0
"""Does a network that learns one task after another keep its ability to learn?

Online permuted digits (after Dohare et al., Nature 632, 2024): in each task the pixels of scikit-learn's digits have a
new random order, and the network of configs/digits.py sees every image once, in batches of 8, without a reset. The
figure is the share of images that are classified right before the step that trains on them, over the first or the last
tenth of the tasks.

Every method, plain Adam included, has its learning rate chosen among the same five, by the accuracy over the last tenth
on other seeds than those that are reported. Other hyperparameters are fixed, see METHODS; the replacement rate was
chosen among 3e-4, 1e-3 and 3e-3 on one of these other seeds. `gradual` is plain Adam on the same tasks, blended: from
one task to the next, the share of images in the new order rises from 0 to 1.

The judge is the accuracy of a forward pass, which no method sees. Gate: plain Adam loses accuracy, and continual
backprop and l2_init end at least 10 points above it; `--mechanism=off` runs them as plain Adam and must fail.
`--quick` has too few tasks for a loss of plasticity, so that it is judged only with `--mechanism=off`.

It needs scikit-learn: `make setup EXTRAS=bench`.
"""

import dataclasses
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import support
from flax import nnx

from configs import digits as recipe
from core import assembly
from layers.axes import declared_axes, declared_stddevs
from parallelism.mesh import mesh_context
from settings.validation import validate
from training import optimizers, step_transform
from training.state import TrainState
from training.step import make_gradient, make_train_step

IS_ON = support.mechanism_is_on()
TASKS = 20 if support.QUICK else 200
RATES = (3e-4, 1e-3, 2e-3, 3e-3, 1e-2)
TUNING_SEEDS, SEEDS = (100, 101), (0, 1, 2)
ROWS = 8
LEAD = 0.10  # of continual backprop and l2_init over plain Adam
METHODS = {  # name of the figure: keys of the section `plasticity`
    "adam": {},
    "continual_backprop": {"method": "continual_backprop", "rate": 3e-3, "maturity": 100},
    "redo": {"method": "redo", "every": 1000, "dormant_below": 0.1},
    "l2_init": {"method": "l2_init", "strength": 1e-3},
    "shrink_perturb": {"method": "shrink_perturb", "every": 100, "shrink": 1e-2, "perturb": 3e-3},
    "redraw": {"method": "redraw", "rate": 3e-3, "maturity": 100},
    "gradual": {},
}


class Learner(NamedTuple):
    """A method of plasticity with all that its training step needs."""

    config: object
    run: assembly.Run
    weights: optimizers.Weights

    @classmethod
    def of(cls, config, keys: dict) -> "Learner":
        """Return the learner with these keys of the section `plasticity`, assembled as train.py does."""
        config.plasticity.update(keys if IS_ON else {})
        config.mesh.fsdp = 1
        validate(config, 1)
        run = assembly.assemble(config, devices=jax.devices()[:1])
        axes = {path: names for path, (_, names) in declared_axes(run.models.trained).items()}
        stddevs = declared_stddevs(run.models.trained)
        return cls(config, run, optimizers.Weights(axes, stddevs=stddevs, units=run.hidden_units))

    def start(self, rate: jax.Array, seed: jax.Array) -> tuple:
        """Return (the trainer's step, its first state) for a traced learning rate and seed."""
        schedule = lambda step: rate  # noqa: E731
        direction = optimizers.adamw(self.config.optimizer, self.weights)
        optimizer = optimizers.make(direction, self.config.optimizer, schedule, self.weights)
        transforms = [
            dataclasses.replace(transform, seed=seed) if transform.name == "plasticity" else transform
            for transform in step_transform.of_config(self.config, self.weights, schedule)
        ]
        gradient = make_gradient(
            self.run.models.graphs, self.run.objective.loss, measures=step_transform.measures(transforms)
        )
        params = nnx.to_pure_dict(nnx.state(self.run.models.make(nnx.Rngs(jax.random.key(seed))), nnx.Param))
        memories = {transform.name: transform.init(params) for transform in transforms}
        state = TrainState(
            jnp.int32(0), jnp.uint32(0), params, optimizer.init(params), {}, {n: m for n, m in memories.items() if m}
        )
        return make_train_step(gradient, optimizer, transforms, seed=seed, norm=optimizers.norm(self.weights)), state


def of_digits(keys: dict) -> Learner:
    """Return the network of configs/digits.py with these keys of the section `plasticity`."""
    config = recipe.get_config()
    config.train.global_batch, config.model.dtype = ROWS, "float32"
    return Learner.of(config, keys)


def accuracies(learner: Learner, data: tuple, *, gradual: bool, rate: jax.Array, seed: jax.Array) -> jax.Array:
    """Return the online accuracy on each task, [TASKS]."""
    images, labels = data
    steps = len(images) // ROWS
    step, state = learner.start(rate, seed)
    key = jax.random.fold_in(jax.random.key(seed), 1)

    def permutation(task):
        return jax.random.permutation(jax.random.fold_in(key, 2 * task), images.shape[1])

    def of_task(state, task):
        now, after = permutation(task), permutation(task + 1)
        of_order, of_blend = jax.random.split(jax.random.fold_in(key, 2 * task + 1))
        order = jax.random.permutation(of_order, len(images))[: steps * ROWS].reshape(steps, ROWS)
        is_next = jax.random.uniform(of_blend, (steps, ROWS)) < jnp.arange(steps)[:, None] / steps

        def of_step(state, inputs):
            rows, is_next = inputs
            pixels = images[rows]
            pixels = jnp.where((gradual & is_next)[:, None], pixels[:, after], pixels[:, now])
            state, scalars, _ = step(state, {"inputs": pixels, "labels": labels[rows]})
            return state, scalars["accuracy"]

        state, found = jax.lax.scan(of_step, state, (order, is_next))
        return state, found.mean()

    return jax.lax.scan(of_task, state, jnp.arange(TASKS))[1]


def measured(name: str, data: tuple, lanes: list[tuple[float, int]]) -> np.ndarray:
    """Return the accuracies [lane, task] of a method for each (learning rate, seed)."""
    learner = of_digits(METHODS[name])

    def of_lane(rate, seed):
        return accuracies(learner, data, gradual=name == "gradual", rate=rate, seed=seed)

    with mesh_context(learner.run.mesh):
        return np.asarray(jax.jit(jax.vmap(of_lane))(*(jnp.asarray(column) for column in zip(*lanes, strict=True))))


def figures_of(name: str, data: tuple) -> dict[str, float]:
    """Return the figures of a method at its best learning rate."""
    start, tenth = time.perf_counter(), TASKS // 10
    tuning = measured(name, data, [(rate, seed) for rate in RATES for seed in TUNING_SEEDS])
    ends = tuning[:, -tenth:].mean(axis=1).reshape(len(RATES), len(TUNING_SEEDS)).mean(axis=1)
    best = RATES[int(ends.argmax())]
    found = measured(name, data, [(best, seed) for seed in SEEDS])
    first, last = found[:, :tenth].mean(axis=1), found[:, -tenth:].mean(axis=1)
    rates = ", ".join(f"{rate:g}: {end:.3f}" for rate, end in zip(RATES, ends, strict=True))
    print(
        f"{name}: {first.mean():.3f} to {last.mean():.3f} at rate {best:g} ({rates} when tuned), "
        f"{time.perf_counter() - start:.0f} s", flush=True,
    )  # fmt: skip
    return {
        f"{name}_first": round(float(first.mean()), 4), f"{name}_last": round(float(last.mean()), 4),
        f"{name}_last_spread": round(float(np.ptp(last)), 4), f"{name}_rate": best,
    }  # fmt: skip


def main() -> None:
    """Tune each method, measure it on other seeds, and judge."""
    data = tuple(jnp.asarray(array, jnp.int32) for array in digits())
    figures = {}
    for name in METHODS:
        figures |= figures_of(name, data)
    support.finish("plasticity", figures)
    judge(figures)


def judge(figures: dict[str, float]) -> None:
    """End with status 1 if the claim does not hold."""
    problems = []
    if figures["adam_last"] >= figures["adam_first"]:
        problems.append("plain Adam loses no accuracy")
    for name in ("continual_backprop", "l2_init"):
        if figures[f"{name}_last"] < figures["adam_last"] + LEAD:
            problems.append(f"{name} does not end {LEAD:.0%} above plain Adam")
    if problems and (not IS_ON or not support.QUICK):
        sys.exit("; ".join(problems))


def digits() -> tuple:
    """Return scikit-learn's images [1797, 64], values 0 to 16, and labels; end with a line if it is not installed."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        sys.exit(f"error: benchmarks/plasticity.py needs scikit-learn ({error}); run: make setup EXTRAS=bench")
    return load_digits(return_X_y=True)


if __name__ == "__main__":
    main()
