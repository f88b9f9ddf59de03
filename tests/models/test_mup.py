# SPDX-License-Identifier: Apache-2.0
"""muP's coordinate check (arXiv:2203.03466, appendix D.1): how far activations move in the first steps, by width.

With muP as far in a wide model as in a narrow one; without it the farther, the wider. Width grows by heads.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from configs import base
from layers.axes import declared_axes
from models import decoder_lm
from objectives import language_modeling
from tests.support import model_config, packed_batch
from training import optimizers

WIDTHS = BASE, _ = 32, 256
V, T = 13, 3  # few tokens: the more of them share an update, the longer chance alignments of narrow models show
SEEDS, STEPS, LEARNING_RATE = 3, 4, 1e-2


def observe(model) -> dict[str, jax.Array]:
    """Return a dict that fills with the stream where it enters the blocks and leaves them, and with it normalised."""
    seen, norm, stack = {}, model.norm, model.stack

    def normalise(x):
        seen.update(stream=x, normalised=norm(x))
        return seen["normalised"]

    model.norm = normalise
    model.stack = lambda x, *args, **options: seen.update(embedding=x) or stack(x, *args, **options)
    return seen


@functools.cache
def moved(width: int, mup: bool, tied: bool, optimizer_name: str, steps: int = STEPS) -> tuple[dict, dict]:
    """Return the root mean squares of activations at first, and of their changes after a few steps.

    `head`: of the first logits, as they change by the head alone. Without steps no gradient is compiled.
    """
    config = model_config(
        num_layers=2, embed_dim=width, num_heads=width // 8, num_kv_heads=width // 16, head_dim=8,
        mlp_dim=width, vocab_size=V, tie_embeddings=tied, mup_base_dim=BASE if mup else 0,
    )  # fmt: skip
    batch = packed_batch([[T]] * 2, T, V)
    loss = language_modeling.LanguageModeling(0, 0, 1, 0.0).loss
    settings = base.get_config().optimizer
    settings.update(weight_decay=0.0, clip_norm=0.0)
    abstract = nnx.eval_shape(lambda: decoder_lm.make(config, dtype=jnp.float32, scan=True, rngs=nnx.Rngs(0)))
    axes = {path: names for path, (_, names) in declared_axes(nnx.state(abstract)).items()}
    weights = optimizers.Weights(axes, width / BASE if mup else 1.0)
    direction = getattr(optimizers, optimizer_name)(settings, weights)
    optimizer = optimizers.make(direction, settings, lambda step: LEARNING_RATE, weights)

    @jax.jit
    @jax.vmap
    def history(seed):
        model = decoder_lm.make(config, dtype=jnp.float32, scan=True, rngs=nnx.Rngs(jax.random.key(seed)))
        graph, state = nnx.split(model)

        def observed_loss(params):
            model = nnx.merge(graph, params)
            seen = observe(model)
            value = loss(model, {}, batch, None)[0][0]
            return value, seen | {"head": model.head_weight(), "logits": model.logits(seen["normalised"])}

        def step(carry, _):
            params, moments = carry
            gradients, seen = jax.grad(observed_loss, has_aux=True)(params)
            updates, moments = optimizer.update(gradients, moments, params)
            return (optax.apply_updates(params, updates), moments), seen

        params = nnx.to_pure_dict(state)
        if not steps:
            return jax.tree.map(lambda x: x[None], observed_loss(params)[1])
        return jax.lax.scan(step, (params, optimizer.init(params)), length=steps + 1)[1]

    seen = jax.tree.map(np.asarray, history(np.arange(SEEDS)))  # [seeds, steps, ...]
    seen["head"] = np.einsum("nbtd,nsdv->nsbtv", seen.pop("normalised")[:, 0], seen["head"])
    first = {name: np.sqrt(np.mean(x[:, 0] ** 2)) for name, x in seen.items()}
    return first, {name: np.sqrt(np.mean((x[:, -1] - x[:, 0]) ** 2)) for name, x in seen.items()}


def exponents(mup: bool, tied: bool, optimizer_name: str) -> dict[str, float]:
    """Return for each activation the power of the width with which its change grows; at the base muP is nothing."""
    changes = [moved(width, mup or width == BASE, tied, optimizer_name)[1] for width in WIDTHS]
    return {name: np.polyfit(np.log(WIDTHS), np.log([c[name] for c in changes]), 1)[0] for name in changes[0]}


@pytest.mark.slow
@pytest.mark.parametrize(("optimizer_name", "tied"), [("adamw", True), ("muon", False), ("adafactor", False)])
def test_with_mup_activations_move_as_far_at_any_width(optimizer_name, tied):
    """Exponents are 0, except for terms of width^-1/2 at small widths; a wrong learning rate would give 1/2 or 1."""
    found = exponents(True, tied, optimizer_name)
    assert all(abs(exponent) < 0.15 for exponent in found.values()), found
    assert max(abs(found["embedding"]), abs(found["stream"])) < 0.05, found


@pytest.mark.slow
def test_without_mup_they_move_the_farther_the_wider():
    found = exponents(False, True, "adamw")
    assert min(found.values()) > 0.3, found


@pytest.mark.parametrize(("optimizer_name", "tied"), [
    ("adamw", True), pytest.param("muon", False, marks=pytest.mark.slow),
])  # fmt: skip
def test_at_first_no_activation_is_larger_than_at_the_base_width(optimizer_name, tied):
    narrow, wide = (moved(width, True, tied, optimizer_name, steps=0)[0] for width in WIDTHS)
    assert wide["logits"] < narrow["logits"]
    for name in ("embedding", "stream"):
        np.testing.assert_allclose(wide[name], narrow[name], rtol=0.1)
