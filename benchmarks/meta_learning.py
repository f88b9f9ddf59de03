# SPDX-License-Identifier: Apache-2.0
"""Does meta-learning learn to learn? Sinusoids from ten points, and glyphs from one example of each class.

Networks are trained by the trainer's own step on the recipes configs/meta_sinusoid.py and configs/meta_glyphs.py, with
SEEDS seeds. They are judged on tasks that no training saw by NumPy code of this file: its own network, its own
gradients, its own nearest prototypes. Figures are means of the seeds.

- `maml_mse`, `reptile_mse`: squared error on held-out sinusoids after at most STEPS gradient steps on ten points.
- `pretrained_mse`: that of a network trained jointly on all sinusoids.
- `glyphs_protonet`, `glyphs_maml`, `glyphs_pixels`: fraction of queries right, 5-way 1-shot, of unseen classes; the
  last is the nearest raw image.

The judge chooses each network's rate among RATES and its number of gradient steps, 1 to STEPS, on other held-out tasks
than those that are reported.

Gate, except with --quick: maml_mse is at most 0.2 of pretrained_mse, and glyphs_protonet at least 25 points above
glyphs_pixels. Otherwise the status is 1. With `--mechanism=off`, networks are trained without an inner loop or not at
all, and the gate fails.
"""

import functools
import time

import support

import jax
import numpy as np

from core import assembly
from input_pipeline.tasks import task_windows
from parallelism.mesh import mesh_context
from settings import loading, validation

OFF = not support.mechanism_is_on()
SEEDS = 1 if support.QUICK else 3
TASKS, STEPS, SHOTS = 400, 5, 10  # held-out tasks; most gradient steps; points of a sinusoid
RATES = (0.001, 0.003, 0.01, 0.03, 0.1)
CHOOSING, REPORTED = 1, 2  # draws of held-out tasks
WAYS, UNSEEN = 5, 1 << 40  # classes of a task; number of the first task that the judge sees
SINUSOID_STEPS, GLYPH_STEPS, BLOCK = 5_000, 500, 100  # steps of training; those in one call
MOST_OF_PRETRAINED, LEAST_OVER_PIXELS = 0.2, 0.25
Layers = list[tuple[np.ndarray, np.ndarray]]  # weights and biases


def trained(recipe: str, windows: task_windows.TaskWindows, seed: int, steps: int, **keys) -> Layers:
    """Return a network after some steps of the trainer; 0: as it was initialised."""
    loaded = loading.load(f"configs/{recipe}.py", "", {name.replace("__", "."): str(keys[name]) for name in keys})
    config = loaded.config
    config.train.seed = seed
    validation.validate(config, 1, loaded)
    run, train = assembly.assemble(config, devices=jax.devices()[:1]), config.train

    @functools.partial(jax.jit, donate_argnums=0)
    def block(state, batches):
        return jax.lax.scan(lambda state, batch: run.train_step(state, batch, {}), state, batches)

    with mesh_context(run.mesh):
        state = run.init()
        for first in range(0, steps // (10 if support.QUICK else 1), BLOCK):
            number = (seed << 28) + np.arange(first * train.global_batch, (first + BLOCK) * train.global_batch)
            batches = windows.read(number, train.sequence_length)
            state, scalars = block(state, {k: a.reshape(BLOCK, -1, *a.shape[1:]) for k, a in batches.items()})
            if first % (10 * BLOCK) == 0:
                print(f"{recipe} {keys} seed {seed} step {first}: {float(scalars['loss'][-1]):.4f}", flush=True)
    layers = jax.device_get(state.params["layers"])
    return [(layers[name]["kernel"], layers[name]["bias"]) for name in sorted(layers)]


def forward(layers: Layers, x: np.ndarray) -> list[np.ndarray]:
    """Return the input, and the output of each layer."""
    outputs = [x]
    for number, (weights, bias) in enumerate(layers):
        x = x @ weights + bias[..., None, :]
        x = np.maximum(x, 0) if number < len(layers) - 1 else x
        outputs.append(x)
    return outputs


def fine_tuned(layers: Layers, x: np.ndarray, slope, rate: float) -> Layers:
    """Return the layers of all tasks [tasks, ...] after one gradient step; `slope` maps outputs to their gradient."""
    outputs, changed = forward(layers, x), []
    gradient = slope(outputs[-1])
    for (weights, bias), before in reversed(list(zip(layers, outputs, strict=False))):
        of_weights, of_bias = np.swapaxes(before, -1, -2) @ gradient, gradient.sum(-2)
        gradient = (gradient @ np.swapaxes(weights, -1, -2)) * (before > 0)
        changed.append((weights - rate * of_weights, bias - rate * of_bias))
    return changed[::-1]


def errors(layers: Layers, x: np.ndarray, slope, error) -> dict[tuple[float, int], float]:
    """Return the error for each (rate, number of gradient steps), 1 to STEPS, of the layers of all tasks."""
    found = {}
    for rate in RATES:
        tuned = [(np.broadcast_to(w, (len(x), *w.shape)), np.broadcast_to(b, (len(x), *b.shape))) for w, b in layers]
        for steps in range(1, STEPS + 1):
            tuned = fine_tuned(tuned, x, slope, rate)
            found[rate, steps] = error(tuned)
    return found


def at_the_best(errors_of) -> float:
    """Return the reported error at the (rate, number of steps) whose error is least on the tasks to choose by.

    `errors_of(draw)` returns {(rate, steps): error}; an error that is not finite is never chosen.
    """
    with np.errstate(over="ignore", invalid="ignore"):  # of a rate that diverges
        choosing, reported = errors_of(CHOOSING), errors_of(REPORTED)
    return reported[min(choosing, key=lambda at: np.nan_to_num(choosing[at], nan=np.inf))]


def sinusoid_errors(layers: Layers, seed: int, draw: int) -> dict[tuple[float, int], float]:
    """Return the squared error on random sinusoids for each (rate, number of steps)."""
    draws = np.random.default_rng([seed, draw])
    amplitude, phase = draws.uniform(0.1, 5, (TASKS, 1, 1)), draws.uniform(0, np.pi, (TASKS, 1, 1))
    x, query = draws.uniform(-5, 5, (TASKS, SHOTS, 1)), draws.uniform(-5, 5, (TASKS, 100, 1))

    def slope(outputs):
        return 2 * (outputs - amplitude * np.sin(x - phase)) / SHOTS

    def error(layers):
        return float(np.mean((forward(layers, query)[-1] - amplitude * np.sin(query - phase)) ** 2))

    return errors(layers, x, slope, error)


def glyph_tasks(seed: int, draw: int = REPORTED) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (one image of each class, images to tell apart, their classes) of tasks of unseen classes."""
    windows = task_windows.Glyphs(0, "heldout", WAYS)
    tasks = windows.read(UNSEEN + (3 * seed + draw) * TASKS + np.arange(TASKS), 4 * WAYS)
    pixels = tasks["inputs"].view(np.float32).astype(np.float64)
    return pixels[:, :WAYS], pixels[:, WAYS:], tasks["targets"][:, WAYS:]


def nearest(support_vectors: np.ndarray, vectors: np.ndarray, classes: np.ndarray) -> float:
    """Return how often the nearest of one vector of each class is of the right class."""
    distances = ((vectors[:, :, None] - support_vectors[:, None]) ** 2).sum(-1)
    return float(np.mean(distances.argmin(-1) == classes))


def glyph_errors(layers: Layers, seed: int, draw: int) -> dict[tuple[float, int], float]:
    """Return the fraction of wrong queries for each (rate, number of steps)."""
    images, queries, classes = glyph_tasks(seed, draw)

    def slope(outputs):
        odds = np.exp(outputs - outputs.max(-1, keepdims=True))
        return (odds / odds.sum(-1, keepdims=True) - np.eye(WAYS)) / WAYS

    def error(layers):
        return float(np.mean(forward(layers, queries)[-1].argmax(-1) != classes))

    return errors(layers, images, slope, error)


def figures_of(seed: int) -> dict[str, float]:
    """Train all networks with one seed, and judge them."""
    sines, glyphs = task_windows.Sinusoids(0, "train"), task_windows.Glyphs(0, "train", WAYS)
    joint = {"meta__inner_steps": 0}
    maml = trained("meta_sinusoid", sines, seed, SINUSOID_STEPS, **(joint if OFF else {}))
    reptile = {"meta__method": "reptile", "meta__inner_steps": 20, "meta__inner_rate": 0.02}
    reptile = trained("meta_sinusoid", sines, seed, SINUSOID_STEPS, **(joint if OFF else reptile))
    pretrained = trained("meta_sinusoid", sines, seed, SINUSOID_STEPS, **joint)
    episodes = {"train__sequence_length": 2 * WAYS, "train__global_batch": 16}
    of_maml = episodes | {"meta__method": "maml", "model__output_dim": WAYS, "meta__inner_rate": 0.1}
    glyphs_maml = trained("meta_glyphs", glyphs, seed, 0 if OFF else GLYPH_STEPS, **of_maml)
    protonet = trained("meta_glyphs", glyphs, seed, 0 if OFF else GLYPH_STEPS, **episodes)
    images, queries, classes = glyph_tasks(seed)
    embedded = [forward(protonet, pixels)[-1] for pixels in (images, queries)]
    return {
        "maml_mse": at_the_best(functools.partial(sinusoid_errors, maml, seed)),
        "reptile_mse": at_the_best(functools.partial(sinusoid_errors, reptile, seed)),
        "pretrained_mse": at_the_best(functools.partial(sinusoid_errors, pretrained, seed)),
        "glyphs_protonet": nearest(*embedded, classes),
        "glyphs_maml": 1 - at_the_best(functools.partial(glyph_errors, glyphs_maml, seed)),
        "glyphs_pixels": nearest(images, queries, classes),
    }


def main() -> None:
    """Print the figures, and end with status 1 if the gate fails."""
    found, began = [], time.perf_counter()
    for seed in range(SEEDS):
        found.append(figures_of(seed))
        print(f"seed {seed}: {found[-1]}", flush=True)
    elapsed = time.perf_counter() - began
    figures = {name: round(float(np.mean([of[name] for of in found])), 4) for name in found[0]}
    learns = figures["maml_mse"] <= MOST_OF_PRETRAINED * figures["pretrained_mse"]
    tells_apart = figures["glyphs_protonet"] >= figures["glyphs_pixels"] + LEAST_OVER_PIXELS
    missed = "" if learns and tells_apart else "the gate fails: meta-learning does not learn faster than its baselines"
    support.judge("meta_learning", figures | {"seeds": SEEDS, "minutes": round(elapsed / 60, 1)}, missed)


if __name__ == "__main__":
    main()
