# SPDX-License-Identifier: Apache-2.0
"""The models of a run: the trained model, changed as its objective says, and the frozen models.

They have shapes, types and shardings here. Nothing is allocated.
"""

import dataclasses
import functools
import importlib
import inspect
import math
import numbers
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding

from checkpointing.frozen_models import configuration_of
from configs.base import MESH_AXES
from configs.errors import ConfigError, check_returned
from inference.engine import decodes
from layers.axes import declared_axes
from layers.units import Units
from objectives.objective import Objective
from parallelism import axis_rules
from parallelism.mesh import make_mesh, mesh_context
from training import optimizers, platform_defaults
from training.step import Graphs

INTERFACE = ("make", "flops_per_token", "hidden_units")  # of a module of models/
PRODUCTS = ("matrix", optimizers.VOCAB)  # kinds of weights that are cast to the compute type


@dataclasses.dataclass(frozen=True)
class Models:
    """The models of a run.

    Attributes:
      make: rngs -> the trained model, initialised; call it with the run's mesh in context.
      graphs: all models without parameters.
      trained: abstract parameters that are trained.
      base: abstract parameters of the same model that are frozen; empty for most runs.
      frozen: {"base" or role: abstract parameters with types and shardings}, as a step takes them.
      frozen_flops: floating-point operations of a token in the models that the loss reads and does not train.
    """

    make: Callable[[nnx.Rngs], nnx.Module]
    graphs: Graphs
    trained: nnx.State
    base: nnx.State
    frozen: dict[str, dict]
    frozen_flops: float

    @property
    def declared(self) -> nnx.State:
        """All abstract parameters of the trained model, with the names of their axes."""
        return nnx.merge_state(self.trained, self.base)

    @property
    def num_trained(self) -> int:
        """The number of trained parameters."""
        return num_parameters(self.trained)

    @property
    def num_parameters(self) -> int:
        """The number of parameters of the trained model, frozen ones included."""
        return num_parameters(self.trained) + num_parameters(self.base)

    def num_active(self, model) -> int:
        """Return the number of parameters that one token uses: of experts only the chosen ones.

        `model` is the section of the configuration.
        """
        declared = declared_axes(self.declared).values()
        of_experts = sum(math.prod(shape) for shape, names in declared if optimizers.EXPERTS in names)
        idle = model.num_experts - model.experts_per_token
        return self.num_parameters - (of_experts * idle // model.num_experts if of_experts else 0)

    def merge_base(self, params: dict, frozen: dict) -> dict:
        """Return all parameters of the trained model: `params`, and the base of `frozen`."""
        if not jax.tree.leaves(self.base):
            return params
        return unflatten_dict(flatten_dict(params) | flatten_dict(frozen["base"]))


def model_module(config):
    """Return the module of models/ that `model.name` names; ConfigError if it lacks a part of the interface."""
    module = importlib.import_module(f"models.{config.model.name}")
    if missing := [name for name in INTERFACE if name not in vars(module)]:
        raise ConfigError(f"models/{config.model.name}.py lacks {', '.join(missing)}, which every model has")
    return module


def hidden_units(config) -> tuple[Units, ...]:
    """Return the hidden units of the model; TypeError if its module returns something else."""
    found = model_module(config).hidden_units(config.model)
    is_right = isinstance(found, tuple | list) and all(isinstance(one, Units) for one in found)
    check_returned(f"hidden_units of models/{config.model.name}.py", found, is_right, "a tuple of layers.units.Units")
    return tuple(found)


def flops_per_token(config, length: int, **how) -> float:
    """Return the floating-point operations of a token.

    Raises ConfigError if the function of the model's module takes other arguments, and TypeError if it returns no
    number. `how` may be frozen=True, which a module needs to take only if weights of its model are frozen.
    """
    function, name = model_module(config).flops_per_token, f"flops_per_token of models/{config.model.name}.py"
    try:
        inspect.signature(function).bind(config.model, length, **how)
    except TypeError as error:
        raise ConfigError(f"{name} {error}; give it the arguments of that in models/decoder_lm.py") from None
    found = function(config.model, length, **how)
    check_returned(name, found, isinstance(found, numbers.Real), "a number")
    return found


def build(config, mesh, objective: Objective) -> Models:
    """Return the models of a configuration and its objective on a mesh."""
    others, graphs, params, frozen_flops = {}, {}, {}, 0.0
    for model in objective.frozen_models():
        stored = configuration_of(model, config)
        how = platform_defaults.execution(stored, mesh)
        make_other = functools.partial(model_module(stored).make, stored.model, **how)
        other = _declared(lambda rngs, make=make_other: make(rngs=rngs), mesh)
        graphs[model.role], abstract = nnx.split(other, nnx.Param)
        frozen_flops += flops_per_token(stored, config.train.sequence_length) / 3  # the forward pass alone
        others[model.role], params[model.role] = other, in_compute_type(abstract, how["dtype"], mesh)
    how = platform_defaults.execution(config, mesh)
    make_plain = functools.partial(model_module(config).make, config.model, **how)

    def make(rngs: nnx.Rngs) -> nnx.Module:
        plain = make_plain(rngs=rngs)
        check_returned(f"make of models/{config.model.name}.py", plain, isinstance(plain, nnx.Module), "an nnx.Module")
        return objective.transform(plain, rngs, **others)

    declared = _declared(make, mesh)
    if config.lora.rank and not jax.tree.leaves(nnx.state(declared, nnx.LoRAParam)):
        raise ConfigError(
            f"lora.rank={config.lora.rank} has no effect: train.objective={config.train.objective} adds no "
            f"nnx.LoRAParam to model.name={config.model.name}; leave it out, or add adapters in its `transform`"
        )
    graph, trained, base = nnx.split(declared, objective.trainable, ...)
    if not jax.tree.leaves(trained):
        raise ConfigError(
            f"train.objective={config.train.objective}: no parameter of model.name={config.model.name} is trained, "
            f"since `trainable` of the objective is {objective.trainable}"
        )
    chunk = config.evaluation.chunk_tokens
    if chunk and not decodes(graph):
        raise ConfigError(
            f"evaluation.chunk_tokens={chunk} needs the empty_cache of a model, which model.name={config.model.name} "
            "lacks; leave it out"
        )
    if jax.tree.leaves(base):
        params["base"] = in_compute_type(base, how["dtype"], mesh)
    return Models(make, Graphs(graph, graphs), trained, base, params, frozen_flops)


def _declared(make: Callable, mesh) -> nnx.Module:
    """Return a model with abstract parameters.

    It is declared on one device, which divides any shape. axis_rules reports by name what the mesh cannot divide.
    """
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), mesh.devices.flat[:1])):
        return nnx.eval_shape(lambda: make(nnx.Rngs(0)))


def in_compute_type(abstract: nnx.State, compute: jnp.dtype, mesh) -> dict:
    """Return parameters that are not trained as shapes with types and shardings.

    Weights of products are in the compute type and those of norms in float32, so the model computes the same as with
    trained weights.
    """
    declared = declared_axes(abstract)
    kinds = {path: optimizers.kind(names) for path, (_, names) in declared.items()}
    types = unflatten_dict({path: compute if kind in PRODUCTS else jnp.float32 for path, kind in kinds.items()})
    shardings = axis_rules.weight_shardings(declared, mesh)
    return jax.tree.map(with_sharding, nnx.to_pure_dict(abstract), shardings, types)


def with_sharding(leaf, sharding: NamedSharding, dtype=None) -> jax.ShapeDtypeStruct:
    """Return an abstract array with this sharding, and with its own type unless one is given."""
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)


def num_parameters(abstract: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract))
