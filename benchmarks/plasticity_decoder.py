# SPDX-License-Identifier: Apache-2.0
"""Does a decoder that learns one language after another learn the last one better with a method of plasticity?

A stream of 12 synthetic languages: Markov chains over 64 tokens, each with four random successors of every token, with
probabilities 1/2, 1/4, 1/8, 1/8. Their entropy is 1.75 bits, 1.2130 nats a token, which no model can beat. The model
is a decoder of 2 layers, 64 wide. The figure is the held-out loss on the last language, in nats, at the end of the
stream.

Each method is tried with three strengths on other seeds. The best is measured on three seeds, and so is plain training.
The judge is the loss of a forward pass on new text of the last language, which no method sees. `helps` says whether the
method that is best on other seeds ends at least 0.05 nats below plain training.

Gate: plain training learns the last language to NEAR nats of its entropy, and every method ends elsewhere than plain
training, so that something is compared. `--mechanism=off` runs all of them as plain training and must fail. `--quick`
is too short for both, so that it is judged only with `--mechanism=off`.
"""

import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import support
from flax import nnx
from plasticity import IS_ON, Learner

from configs import base
from parallelism.mesh import mesh_context

LANGUAGES, STEPS = (3, 20) if support.QUICK else (12, 400)  # steps of each language
VOCAB, LENGTH, ROWS, HELDOUT_ROWS = 64, 32, 8, 256
ENTROPY = 1.75 * float(np.log(2))
RATE = 3e-3
TUNING_SEEDS, SEEDS = (100,), (0, 1, 2)
GAIN, NEAR = 0.05, 0.2  # nats below plain training, and above the entropy
METHODS = {  # name: the tried keys of the section `plasticity`
    "plain": ({},),
    "continual_backprop": tuple({"method": "continual_backprop", "rate": rate} for rate in (1e-5, 1e-4, 1e-3)),
    "redraw": tuple({"method": "redraw", "rate": rate} for rate in (1e-5, 1e-4, 1e-3)),
    "l2_init": tuple({"method": "l2_init", "strength": strength} for strength in (1e-5, 1e-4, 1e-3)),
}


def learner(keys: dict) -> Learner:
    """Return the decoder with these keys of the section `plasticity`."""
    config = base.get_config()
    config.model.update(
        num_layers=2, embed_dim=64, num_heads=4, num_kv_heads=4, mlp_dim=128, vocab_size=VOCAB, max_length=LENGTH,
        dtype="float32",
    )  # fmt: skip
    config.data.update(source="synthetic", tokenizer="")
    config.train.update(global_batch=ROWS, sequence_length=LENGTH)
    config.optimizer.update(weight_decay=0.0, beta2=0.999)
    return Learner.of(config, keys)


def text(key: jax.Array, successors_V4: jax.Array, rows: int) -> dict[str, jax.Array]:
    """Return a batch of a language."""
    of_first, of_choices = jax.random.split(key)
    choices = jax.random.categorical(of_choices, jnp.log(jnp.array([4, 2, 1, 1.0])), shape=(LENGTH, rows))

    def following(token, choice):
        new = successors_V4[token, choice]
        return new, new

    first = jax.random.randint(of_first, (rows,), 0, VOCAB)
    after = jax.lax.scan(following, first, choices)[1]
    ones, stream = jnp.ones((rows, LENGTH), jnp.int32), jnp.concatenate([first[None], after]).T
    return {
        "tokens": stream[:, :-1], "targets": stream[:, 1:], "segments": ones, "positions": jnp.cumsum(ones, axis=1) - 1,
    }  # fmt: skip


def last_loss(learner: Learner, seed: jax.Array) -> jax.Array:
    """Return the held-out loss on the last language after the whole stream, with the step of the trainer."""
    run, (step, state) = learner.run, learner.start(RATE, seed)
    of_languages, of_texts = jax.random.split(jax.random.fold_in(jax.random.key(seed), 1))

    def successors(language):
        return jax.random.randint(jax.random.fold_in(of_languages, language), (VOCAB, 4), 0, VOCAB)

    def of_step(state, number):
        batch = text(jax.random.fold_in(of_texts, number), successors(number // STEPS), ROWS)
        return step(state, batch)[0], None

    state, _ = jax.lax.scan(of_step, state, jnp.arange(LANGUAGES * STEPS))
    heldout = text(jax.random.fold_in(of_texts, LANGUAGES * STEPS), successors(LANGUAGES - 1), HELDOUT_ROWS)
    total, weight = run.objective.evaluate(nnx.merge(run.graph, state.params), heldout)["loss"]
    return total / weight


def measured(keys: dict, seeds: tuple[int, ...]) -> np.ndarray:
    """Return the loss of each seed."""
    of_keys = learner(keys)
    with mesh_context(of_keys.run.mesh):
        return np.asarray(jax.jit(jax.vmap(lambda seed: last_loss(of_keys, seed)))(jnp.asarray(seeds)))


def main() -> None:
    """Tune each method, measure it on other seeds, and judge."""
    figures, tuned = {}, {}
    for name, tried in METHODS.items():
        start = time.perf_counter()
        losses = [float(measured(keys, TUNING_SEEDS).mean()) for keys in tried] if len(tried) > 1 else [0.0]
        best = tried[int(np.argmin(losses))]
        found = measured(best, SEEDS)
        tuned[name] = min(losses)
        figures |= {f"{name}_loss": round(float(found.mean()), 4), f"{name}_spread": round(float(np.ptp(found)), 4)}
        said = f"{name}: {found.mean():.4f} nats on the last language, {found.mean() - ENTROPY:.4f} above its entropy"
        print(f"{said}, with {best}, {time.perf_counter() - start:.0f} s", flush=True)
    chosen = min((name for name in METHODS if name != "plain"), key=tuned.get)
    figures["gain_nats"] = round(figures["plain_loss"] - figures[f"{chosen}_loss"], 4)
    print(f"chosen on other seeds: {chosen}", flush=True)
    support.finish("plasticity_decoder", figures | {"helps": figures["gain_nats"] >= GAIN})
    judge(figures)


def judge(figures: dict[str, float]) -> None:
    """End with status 1 if the comparison says nothing."""
    plain = figures["plain_loss"]
    idle = [name for name in METHODS if name != "plain" and figures[f"{name}_loss"] == plain]
    problems = [f"{', '.join(idle)}: the same loss as plain training"] if idle else []
    if plain > ENTROPY + NEAR:
        problems.append("plain training does not learn the last language")
    if problems and (not IS_ON or not support.QUICK):
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
