# SPDX-License-Identifier: Apache-2.0
"""Does the module of error correction find wrong tokens and repair them, and does it know how sure it is?

The base is the tiny recipe's model, in runs/tiny as `make train` leaves it, or trained there first. The module is
trained on it by configs/error_correction.py. A second call trains neither again, and refuses runs whose configuration
is another than it would be now.

Held-out rows are corrupted here: a tenth of the tokens is replaced by draws from the model's own unigram distribution,
the mean of its predictions over training rows. Half of the rows tune the threshold (the most repairs with at most
TUNED_DAMAGE damaged), and all figures are of the other half.

- `auc`: of the detector, with scikit-learn. `max_probability_auc`: of 1 - the model's largest probability;
  `token_probability_auc`: of 1 - its probability of the draft's token.
- `restored`, `damaged`: shares of the corrupted tokens that are repaired, and of the others that are changed.
  `auc_without_mixture`, `restored_without_mixture`: with the factor of the mixture density set to 0, and a threshold
  tuned for that.
- `restored_at_default`, `damaged_at_default`: with the threshold of the recipe.
- `calibration_error`: expected calibration error of the detector in 10 bins.
- `mixture_nll`, `gaussian_nll`: nats of five components and of one on Bishop's inverse problem (1994, section 5), means
  of SEEDS seeds. `least_gap` is the smallest difference.

Gate: auc is at least 0.9 and above both probabilities; at least half is restored, at most 1 % damaged; the calibration
error is less than 0.05; least_gap is at least 0.5.
"""

import functools
import statistics

import support

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from sklearn.metrics import roc_auc_score

from core.start import prepare_corpus
from inference.revision import judge
from layers.axes import weight
from layers.mixture_density import MixtureDensity
from parallelism.mesh import mesh_context
from trained_run import TrainedRun, open_run

BASE = support.folder("error-correction-base") if support.QUICK else support.ROOT / "runs" / "tiny"
FOLDER = support.folder("error-correction")
ROWS, BATCH, RATE, TUNED_DAMAGE = (32 if support.QUICK else 512), 16, 0.1, 0.009
SEEDS, STEPS, EXAMPLES, HIDDEN = 4, (200 if support.QUICK else 4000), 256, 64
SMALL = {  # keys of a quick call
    "model.num_layers": 2, "model.embed_dim": 128, "model.num_heads": 2, "model.num_kv_heads": 2, "model.mlp_dim": 384,
    "train.sequence_length": 128, "train.global_batch": 8, "train.steps": 200, "train.eval_every": 0,
    "evaluation.sample_tokens": 0,
}  # fmt: skip


def trained(folder, recipe: str, **keys) -> TrainedRun:
    """Train what is left of a run, with `__` for a dot in the keys; return it."""
    changes = (SMALL if support.QUICK else {}) | {key.replace("__", "."): value for key, value in keys.items()}
    support.train(changes, f"configs/{recipe}.py", workdir=folder)
    return open_run(folder)


@functools.partial(jax.jit, static_argnums=0)
def probabilities(graph: nnx.GraphDef, params: dict, batch: dict, draft: jax.Array) -> tuple:
    """Return (the mean distribution of a batch, the largest probability and that of the draft's token) [V], [B, T]."""
    model = nnx.merge(graph, params)
    stream, _ = model(batch["tokens"], batch["positions"], batch["segments"])
    p = jax.nn.softmax(model.logits(stream))
    of_draft = jnp.take_along_axis(p, draft[..., None], axis=-1)[..., 0]
    weights = (batch["segments"] > 0)[..., None]
    return jnp.sum(p * weights, axis=(0, 1)) / weights.sum(), p.max(axis=-1), of_draft


def batches(windows, length: int) -> list[dict]:
    """Return ROWS rows, spread over the data, as batches."""
    indices = np.linspace(0, windows.num_examples(length) - 1, ROWS).astype(np.int64)
    return [windows.read(part, length) for part in np.split(indices, ROWS // BATCH)]


def corrupted(batch: dict, unigram: np.ndarray, rng: np.random.Generator) -> tuple[dict, np.ndarray, np.ndarray]:
    """Return (the batch as the model reads it, the draft, which of its tokens are wrong)."""
    targets = np.asarray(batch["targets"])
    chosen = (rng.random(targets.shape) < RATE) & (batch["segments"] > 0) & (targets >= 0)
    draft = np.where(chosen, rng.choice(len(unigram), targets.shape, p=unigram), targets)
    follows = np.asarray(batch["positions"])[:, 1:] > 0
    tokens = np.array(batch["tokens"])
    tokens[:, 1:] = np.where(follows, draft[:, :-1], tokens[:, 1:])
    return batch | {"tokens": tokens}, draft, draft != targets


def judged(run: TrainedRun, params: dict, rows: list[tuple]) -> dict[str, np.ndarray]:
    """Return all that is measured of the unmasked tokens of corrupted batches, one after the other."""
    found = {name: [] for name in ("wrong", "p", "sure", "repairs", "largest", "of_draft", "row")}
    for number, (batch, draft, wrong) in enumerate(rows):
        one = judge(
            run.run.graph, params, batch["tokens"], draft, batch["positions"], batch["segments"],
            run.tokenizer.vocab_size,
        )  # fmt: skip
        _, largest, of_draft = probabilities(run.run.graph, params, batch, draft)
        counts = (np.asarray(batch["segments"]) > 0) & (np.asarray(batch["targets"]) >= 0)
        of_batch = dict(
            wrong=wrong, p=one.wrong_BT, sure=one.confidence_BT, repairs=one.best_BT == batch["targets"],
            largest=largest, of_draft=of_draft, row=number * BATCH + np.indices(draft.shape)[0],
        )  # fmt: skip
        for name, values in of_batch.items():
            found[name].append(np.asarray(values)[counts])
    return {name: np.concatenate(parts) for name, parts in found.items()}


def shares(found: dict, threshold: float) -> tuple[float, float]:
    """Return the shares (restored, damaged) of a threshold."""
    revised, wrong = found["sure"] >= threshold, found["wrong"]
    return float((revised & found["repairs"])[wrong].mean()), float(revised[~wrong].mean())


def tuned(found: dict) -> float:
    """Return the lowest threshold that damages at most TUNED_DAMAGE of the right tokens."""
    sure = np.sort(found["sure"][~found["wrong"]])[::-1]
    return float(np.nextafter(sure[int(TUNED_DAMAGE * len(sure))], np.float32(1)))


def halves(found: dict) -> tuple[dict, dict]:
    """Return the tokens of even rows and of odd rows."""
    return tuple({name: values[found["row"] % 2 == side] for name, values in found.items()} for side in (0, 1))


def calibration_error(p: np.ndarray, wrong: np.ndarray, bins: int = 10) -> float:
    """Return the expected calibration error (arXiv:1706.04599, equation 3)."""
    place = np.minimum((p * bins).astype(int), bins - 1)
    return float(sum(abs((p - wrong)[place == one].sum()) for one in range(bins)) / len(p))


def of_detection() -> dict[str, float]:
    """Train what is missing, and return the figures of the module."""
    trained(BASE, "tiny")
    run = trained(FOLDER, "error_correction", train__init_from=str(BASE))
    corpus, length = prepare_corpus(run.config, False), run.config.train.sequence_length
    with mesh_context(run.run.mesh):
        of_training = batches(corpus.train.parts[0], length)
        means = [probabilities(run.run.graph, run.params, one, one["tokens"])[0] for one in of_training]
        unigram = np.mean(np.asarray(means, np.float64), axis=0)
        unigram[run.tokenizer.vocab_size :] = 0
        rng = np.random.default_rng(0)
        rows = [corrupted(one, unigram / unigram.sum(), rng) for one in batches(corpus.heldout, length)]
        tuning, found = halves(judged(run, run.params, rows))
        without = jax.tree_util.tree_map_with_path(
            lambda path, leaf: 0 * leaf if path[-1].key == "mixture_factor" else leaf, run.params
        )
        tuning_without, found_without = halves(judged(run, without, rows))
    threshold = tuned(tuning)
    restored, damaged = shares(found, threshold)
    at_default = shares(found, run.config.error_correction.threshold)
    wrong = found["wrong"]
    return {
        "tokens": len(wrong), "wrong": int(wrong.sum()), "auc": roc_auc_score(wrong, found["p"]),
        "max_probability_auc": roc_auc_score(wrong, 1 - found["largest"]),
        "token_probability_auc": roc_auc_score(wrong, 1 - found["of_draft"]),
        "threshold": threshold, "restored": restored, "damaged": damaged,
        "auc_without_mixture": roc_auc_score(wrong, found_without["p"]),
        "restored_without_mixture": shares(found_without, tuned(tuning_without))[0],
        "restored_at_default": at_default[0], "damaged_at_default": at_default[1],
        "calibration_error": calibration_error(found["p"], wrong),
    }  # fmt: skip


class Inverse(nnx.Module):
    """A hidden layer of tanh, and a mixture of its output."""

    def __init__(self, num_components: int, rngs: nnx.Rngs):
        self.kernel = weight(rngs, (1, HIDDEN), (None, None), 1.0)
        self.bias = weight(rngs, (HIDDEN,), (None,), 1.0)
        self.head = MixtureDensity(
            embed_dim=HIDDEN, out_dim=1, num_components=num_components, least_scale=1e-3, rngs=rngs
        )

    def nll(self, x: jax.Array, y: jax.Array) -> jax.Array:
        """Return the mean of -log p(y | x) of numbers [N]."""
        hidden = jnp.tanh(x[:, None] @ self.kernel[...] + self.bias[...])
        return -self.head(hidden[None]).log_density(y[None, :, None]).mean()


def inverse_problem(key: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """Return (x, y) with x = y + 0.3 sin(2 pi y) + uniform noise, then scaled to -2 to 2: up to three y for an x."""
    of_y, of_noise = jax.random.split(key)
    y = jax.random.uniform(of_y, (count,))
    x = y + 0.3 * jnp.sin(2 * jnp.pi * y) + jax.random.uniform(of_noise, (count,), minval=-0.1, maxval=0.1)
    return 4 * x - 2, 4 * y - 2


@functools.partial(jax.jit, static_argnums=0)
def inverse_nll(num_components: int, seed: int) -> jax.Array:
    """Return the negative log-likelihood of new examples, in nats, after training on STEPS batches."""
    graph, params = nnx.split(Inverse(num_components, nnx.Rngs(jax.random.key(seed))))
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, STEPS))

    def loss(params, key, count=EXAMPLES):
        return nnx.merge(graph, params).nll(*inverse_problem(key, count))

    def update(state, key):
        params, moments = state
        updates, moments = optimizer.update(jax.grad(loss)(params, key), moments)
        return (optax.apply_updates(params, updates), moments), None

    keys = jax.random.split(jax.random.key(seed), STEPS)
    (params, _), _ = jax.lax.scan(update, (params, optimizer.init(params)), keys)
    return loss(params, jax.random.key(10_000 + seed), 20_000)


def of_inverse_problem(mesh) -> dict[str, float]:
    """Return the figures of the mixture and of a single Gaussian."""
    with mesh_context(mesh):
        mixture, gaussian = ([float(inverse_nll(count, seed)) for seed in range(SEEDS)] for count in (5, 1))
    return {
        "mixture_nll": statistics.fmean(mixture), "gaussian_nll": statistics.fmean(gaussian),
        "least_gap": min(one - other for one, other in zip(gaussian, mixture, strict=True)),
    }  # fmt: skip


def main() -> None:
    """Train, measure and judge."""
    figures = of_detection()
    print(figures, flush=True)
    figures |= of_inverse_problem(open_run(BASE).run.mesh)
    best = max(figures["max_probability_auc"], figures["token_probability_auc"])
    holds = (
        figures["auc"] >= 0.9 and figures["auc"] > best and figures["restored"] >= 0.5 and figures["damaged"] <= 0.01
        and figures["calibration_error"] < 0.05 and figures["least_gap"] >= 0.5
    )  # fmt: skip
    rounded = {name: round(value, 4) if isinstance(value, float) else value for name, value in figures.items()}
    support.judge("error_correction", rounded, "" if holds else "gate missed")


if __name__ == "__main__":
    main()
