# SPDX-License-Identifier: Apache-2.0
"""Does the router's bias balance experts, and what does a step with experts cost relative to a dense step?

A frozen router is skewed, so that some experts get most tokens. The optimizer's rule moves the bias for 300 steps. Then
`tiny` and `moe_small`, which have the same FLOPs per token, are trained on the same data.
"""

import statistics
import sys

import support

import jax
import jax.numpy as jnp
from flax import nnx

from configs.base import MESH_AXES
from layers.experts.experts import Experts
from parallelism.mesh import make_mesh, mesh_context
from training import optimizers

BALANCED = 0.3  # violation that is to be reached
SKEW = 0.5  # mean of tokens whose deviation is 1: some experts are nearer to all of them than others
TOKENS, EMBED_DIM = 8192, 16
BALANCING_STEPS = 300
STEPS = 4 if support.QUICK else 20


def violations(tokens: int) -> jax.Array:
    """Return the violation (largest load / mean load - 1) of each step of balancing 16 experts, 2 per token.

    The bias step is the published 1e-3, with the optimizer's own rule; no weight is trained.

    Args:
      tokens: number of tokens of a step, drawn at random for each step.
    """
    layer = Experts(
        embed_dim=EMBED_DIM, mlp_dim=4, num_experts=16, experts_per_token=2, shared_experts=0, capacity=0.0,
        router="softmax", gate_scale=1.0, out_scale=1.0, rngs=nnx.Rngs(0),
    )  # fmt: skip
    graph, state = nnx.split(layer)
    rule, weights = optimizers.router_bias_update(1e-3), nnx.to_pure_dict(state)

    def loss(bias, x):
        y, figures = nnx.merge(graph, weights | {"bias": bias})(x, jnp.ones(x.shape[:2], bool))
        return y.sum(), figures["load"].max() / figures["load"].mean() - 1

    def step(bias, key):
        x = SKEW + jax.random.normal(key, (1, tokens, EMBED_DIM))
        gradient, violation = jax.grad(loss, has_aux=True)(bias, x)
        return bias + rule.update(gradient, rule.init(bias))[0], violation

    keys = jax.random.split(jax.random.key(0), BALANCING_STEPS)
    return jax.jit(lambda bias: jax.lax.scan(step, bias, keys))(weights["bias"])[1]


def trained(recipe: str) -> tuple[float, dict]:
    """Return (median seconds of a step, metrics of the last step)."""
    keys = support.QUIET | {"train.steps": STEPS, "train.log_every": 1}
    lines = support.train(keys, f"configs/{recipe}.py").lines["train"]
    seconds = statistics.median(line["step_seconds"] for line in list(lines.values())[1:])
    return seconds, lines[STEPS]


def main() -> None:
    """Balance, train both and print."""
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), jax.devices()[:1])):
        found = violations(TOKENS)
    start, end = float(found[0]), float(found[-20:].max())
    (dense_seconds, dense), (moe_seconds, moe) = trained("tiny"), trained("moe_small")
    figures = {
        "max_violation_start": round(start, 3), "max_violation_end": round(end, 3),
        "dense_step_seconds": round(dense_seconds, 3), "moe_step_seconds": round(moe_seconds, 3),
        "steps": STEPS, "dense_loss": round(dense["loss"], 4), "moe_loss": round(moe["loss"], 4),
        "moe_load_violation": round(moe["load_violation"], 3), "moe_router_entropy": round(moe["router_entropy"], 3),
    }  # fmt: skip
    support.finish("moe", figures)
    if end > BALANCED:
        sys.exit(f"moe: the fullest expert has {1 + end:.2f} times the mean, more than {1 + BALANCED:.2f}")


if __name__ == "__main__":
    main()
