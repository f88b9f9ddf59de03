# SPDX-License-Identifier: Apache-2.0
"""AdamW against the paper, what decays, and clipping."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from configs import base
from tests.support import assert_close, make_model, model_config
from training import optimizers

PARAMS = {"kernel": np.array([0.5, -1.0, 2.0], np.float32), "scale": np.array([1.0, 3.0], np.float32)}


def test_adamw_is_algorithm_2_of_the_paper_with_decay_on_kernels_alone():
    config = base.get_config().optimizer
    config.update(weight_decay=0.3, beta1=0.8, beta2=0.9, epsilon=1e-3)
    rates = [0.0, 0.1, 0.07]
    optimizer = optimizers.adamw(config, lambda step: jnp.array(rates)[step])
    rng, state, actual = np.random.default_rng(0), optimizer.init(PARAMS), PARAMS
    expected, m, v = dict(PARAMS), dict.fromkeys(PARAMS, 0.0), dict.fromkeys(PARAMS, 0.0)
    for t, rate in enumerate(rates, start=1):
        gradients = {name: rng.standard_normal(value.shape).astype(np.float32) for name, value in PARAMS.items()}
        updates, state = optimizer.update(gradients, state, actual)
        actual = optax.apply_updates(actual, updates)
        for name, g in gradients.items():
            m[name], v[name] = 0.8 * m[name] + 0.2 * g, 0.9 * v[name] + 0.1 * g**2
            adam = m[name] / (1 - 0.8**t) / (np.sqrt(v[name] / (1 - 0.9**t)) + 1e-3)
            decay = 0.3 * expected[name] if name == "kernel" else 0
            expected[name] = expected[name] - rate * (adam + decay)
    assert_close(actual, expected)


@pytest.mark.parametrize("changes", [{}, {"tie_embeddings": True, "qk_norm": True}])
def test_norms_and_embeddings_do_not_decay_and_every_matrix_does(changes):
    _, params = make_model(model_config(**changes))
    decayed = {
        jax.tree_util.keystr(path, simple=True, separator=".").removeprefix("stack.blocks."): flag
        for path, flag in jax.tree_util.tree_leaves_with_path(optimizers.is_decayed(params))
    }
    matrices = {f"attention.{name}" for name in ("query", "key", "value", "out")}
    matrices |= {f"mlp.{name}" for name in ("gate", "up", "down")} | ({"head.kernel"} & decayed.keys())
    assert {name for name, flag in decayed.items() if flag} == matrices
    assert ("attention.query_norm.scale" in decayed) == bool(changes) != ("head.kernel" in decayed)


@pytest.mark.parametrize(("clip_norm", "factor"), [(1.0, 1 / 13), (13.0, 1.0), (26.0, 1.0), (0.0, 1.0)])
def test_clipping_scales_a_larger_global_norm_down_and_nothing_else(clip_norm, factor):
    gradients = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([[12.0]])}
    optimizer = optimizers.clipped(optax.sgd(1.0), clip_norm)
    updates, _ = optimizer.update(gradients, optimizer.init(gradients))
    assert_close(updates, jax.tree.map(lambda g: -factor * g, gradients))
