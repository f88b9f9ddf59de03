# SPDX-License-Identifier: Apache-2.0
"""The inner loop of meta-learning: adapt parameters to one task by gradient steps, and differentiate through them.

With a loss L, step sizes a and steps i = 0 ... k-1, the parameters of a task are
theta_0 = theta and theta_{i+1} = theta_i - a * grad L(theta_i, support).

- MAML (Finn et al. 2017, arXiv:1703.03400, equation 1) minimises L(theta_k, query). Its gradient has second derivatives
  of L, since theta_k depends on theta through every gradient.
- First-order MAML (ibid., section 5.2) takes the gradients of the inner loop as constants.
- Reptile (Nichol et al. 2018, arXiv:1803.02999, algorithm 1) moves theta towards theta_k: its gradient is
  theta - theta_k.
- Meta-SGD (Li et al. 2017, arXiv:1707.09835, equation 3) learns a step size for each entry of each parameter.

All functions are pure and work on trees of parameters of any model. `jax.vmap` maps them over tasks.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict

from layers.fsdp import all_gather_state

RATES = "inner_rates"  # attribute of a model with the learned step sizes
MAML, FIRST_ORDER, REPTILE = "maml", "first_order_maml", "reptile"

Loss = Callable[[dict, dict], jax.Array]  # (parameters, examples) -> the mean loss of the examples, a scalar


@dataclasses.dataclass(frozen=True)
class InnerLoop:
    """How parameters are adapted.

    Attributes:
      method: MAML, FIRST_ORDER or REPTILE.
      num_steps: gradient steps in training; 0: none, so that MAML is plain training on the queries.
      eval_steps: gradient steps in evaluation.
      rate: step size of all parameters.
      learns_rates: whether each entry of each parameter has its own step size: `rate` times a learned factor.
    """

    method: str = MAML
    num_steps: int = 1
    eval_steps: int = 1
    rate: float = 0.01
    learns_rates: bool = False

    def passes(self, support: int, query: int) -> float:
        """Return the training passes on a task, each the forward and the backward pass of an example.

        MAML differentiates each inner step again: the gradient of a gradient takes about two more of its passes.
        """
        if self.method == REPTILE:
            return self.num_steps * (support + query) + query / 3  # the loss after it, a forward pass
        return self.num_steps * support * (3 if self.method == MAML else 1) + query

    def minimized(self, loss: Loss, params: dict, scales: dict, support: dict, query: dict):
        """Return (the scalar whose gradient trains on one task, the query's loss after adaptation).

        Reptile adapts to support and query together, since it needs no held-out part of a task. The loss after its
        adaptation is then one of examples that it has seen.
        """
        if self.method == REPTILE:
            both = jax.tree.map(lambda s, q: jnp.concatenate([s, q]), support, query)
            adapted = jax.lax.stop_gradient(self.adapt(loss, params, scales, both, self.num_steps))
            return reptile_surrogate(params, adapted), loss(adapted, query)
        after = loss(self.adapt(loss, params, scales, support, self.num_steps), query)
        return after, jax.lax.stop_gradient(after)

    def adapt(self, loss: Loss, params: dict, scales: dict, support: dict, num_steps: int) -> dict:
        """Return the parameters after `num_steps` gradient steps on the support.

        Args:
          params: tree of arrays.
          scales: tree like it, of factors on `rate`, arrays of the same shapes or numbers.
        """

        def body(params, _):
            # Stopped before the gradient, not after it: then nothing inside the gradient is differentiated again.
            point = params if self.method == MAML else jax.lax.stop_gradient(params)
            gradients = jax.grad(loss)(point, support)
            return jax.tree.map(lambda p, s, g: p - self.rate * s * g, params, scales, gradients), None

        if num_steps == 1:  # the TPU compiler copies all parameters into a loop
            return body(params, None)[0]
        return jax.lax.scan(body, params, length=num_steps)[0]


def reptile_surrogate(params: dict, adapted: dict) -> jax.Array:
    """Return a scalar whose gradient with respect to `params` is exactly params - adapted.

    It is the inner product of `params` with the constant params - adapted. Its value has no meaning. A training step
    divides the sum over tasks by the sum of their weights; with equal weights w, a task's term is therefore multiplied
    by w, so that the step's gradient is the mean of params - adapted over all tasks.
    """
    products = jax.tree.map(lambda p, a: jnp.sum(jax.lax.stop_gradient(p - a) * p), params, adapted)
    return sum(jax.tree.leaves(products))


class Scale(nnx.Module):
    """Learned factors on the inner step size of one parameter, 1 at first. Their name keeps weight decay away."""

    def __init__(self, weight: nnx.Param):
        self.scale = nnx.Param(jnp.ones(weight.shape), out_sharding=weight.get_metadata("out_sharding"))


def add_rates(model: nnx.Module) -> nnx.Module:
    """Add a `Scale` for each parameter of a model, sharded like it; return the model."""

    def as_module(tree: dict) -> nnx.Dict:
        return nnx.Dict({name: as_module(leaf) if isinstance(leaf, dict) else leaf for name, leaf in tree.items()})

    scales = {path: Scale(weight) for path, weight in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    setattr(model, RATES, as_module(unflatten_dict(scales)))
    return model


def split(model: nnx.Module) -> tuple[Callable[[dict], nnx.Module], dict, dict]:
    """Return (the function from adapted parameters to the model, its parameters, the scales of their step sizes).

    The scales are 1 if the model has no learned ones. Inside a shard_map, parameters and scales are all-gathered in
    float32: a gradient of one task must not be reduced over the tasks of other devices.
    """
    graph, learned, params = nnx.split(model, nnx.PathContains(RATES), ...)
    learned, params = (all_gather_state(state, jnp.float32) for state in (learned, params))
    scales = jax.tree.map(lambda _: 1.0, params)
    if learned:
        of_path = flatten_dict(learned[RATES])
        scales = unflatten_dict({path: of_path[*path, "scale"] for path in flatten_dict(params)})
    return lambda params: nnx.merge(graph, learned, params), params, scales


@jax.custom_vjp
def _float32_gradients(params):
    return params


_float32_gradients.defvjp(
    lambda params: (params, None), lambda _, gradients: (jax.tree.map(lambda g: g.astype(jnp.float32), gradients),)
)


def with_float32_gradients(model: nnx.Module) -> nnx.Module:
    """Return the model for rows outside of tasks: layers reduce gradients in the compute type, tasks in float32."""
    graph, params = nnx.split(model)
    return nnx.merge(graph, _float32_gradients(params))
