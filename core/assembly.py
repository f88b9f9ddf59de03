# SPDX-License-Identifier: Apache-2.0
"""Assemble a run from a configuration: mesh, model, objective, optimizer, steps, abstract state.

Only this file knows all lower rooms. Rehearsal, layout proof and training all use the result of `assemble`.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from configs.base import BATCH_AXES, supports_shard_map
from configs.errors import ConfigError, check_returned
from configs.topologies import COMPILER_OPTIONS
from core import models
from core.models import Models, with_sharding
from layers.axes import declared_axes, declared_stddevs
from layers.units import Units
from objectives.objective import Objective
from parallelism import axis_rules
from parallelism.mesh import make_mesh, mesh_context
from settings import meta_learning, ramp
from settings.decoding import dropless
from training import offload, optimizers, platform_defaults, schedules, step_transform
from training.shard_map import part_square, shard_map_gradient
from training.state import TrainState
from training.step import Graphs, make_eval_step, make_gradient, make_train_step
from training.step_transform import StepTransform
from training.transforms import noise

FULL_GRADIENT_BYTES = 2**30  # up to this size a device holds the full float32 gradient between microbatches


@dataclasses.dataclass(frozen=True)
class Run:
    """All parts of a run; nothing is allocated or compiled yet.

    `abstract_state`, `abstract_batch` and `abstract_frozen` are shapes, types and shardings of the arguments of a step.
    `abstract_frozen` are the frozen parameters by role; "base" is that of the trained model itself.

    `train_step`, `train_step_with_grads` and `eval_step` are jitted. `train_step` donates the state;
    `train_step_with_grads` returns the gradients too and donates nothing. `init` returns the initial state, with random
    parameters or with given ones, which it donates. Call these and `model` inside `mesh_context(run.mesh)`.

    A run is `slow` if a step takes so long on a CPU that `assemble` split it into microbatches.
    """

    config: object
    mesh: jax.sharding.Mesh
    objective: Objective
    models: Models
    init: Callable[..., TrainState]
    train_step: Callable
    train_step_with_grads: Callable
    eval_step: Callable
    abstract_state: TrainState
    abstract_batch: dict
    num_microbatches: int
    slow: bool
    flops_per_token: float

    @property
    def graph(self) -> nnx.GraphDef:
        """The trained model without its parameters."""
        return self.models.graphs.trained

    @property
    def hidden_units(self) -> tuple[Units, ...]:
        return models.hidden_units(self.config)

    @property
    def abstract_frozen(self) -> dict[str, dict]:
        """The abstract frozen parameters by role."""
        return self.models.frozen

    @property
    def abstract_params(self) -> dict:
        """All abstract parameters of the trained model, including a frozen base."""
        return self.models.merge_base(self.abstract_state.params, self.abstract_frozen)

    def model(self, params: dict) -> nnx.Module:
        return nnx.merge(self.graph, params)

    def eval_params(self, state: TrainState, frozen: dict) -> dict:
        """Return the parameters that a state is evaluated with, including the frozen base."""
        return self.models.merge_base(state.eval_params, frozen)

    def dropless(self) -> "Run":
        """Return this run with experts that drop no token. All readers of its checkpoints use it."""
        devices = list(self.mesh.devices.flat)
        return assemble(dropless(self.config), devices=devices) if self.config.model.expert_capacity else self

    def compile(self):
        """Compile `train_step` for the run's state and batch."""
        with mesh_context(self.mesh):
            lowered = self.train_step.lower(self.abstract_state, self.abstract_batch, self.abstract_frozen)
            return lowered.compile(compiler_options=COMPILER_OPTIONS[platform_defaults.platform(self.mesh)])

    @property
    def batch_sharding(self) -> NamedSharding:
        """The sharding of a batch array [batch, length]."""
        return axis_rules.batch_sharding(self.mesh)

    @property
    def eval_rows(self) -> int:
        """Sequences in a batch of evaluation: a microbatch, so that evaluation fits if training does."""
        return self.config.train.global_batch // self.num_microbatches

    @property
    def flops_per_example(self) -> float:
        """Model FLOPs of one row of a batch, including padding and masked targets."""
        return self.flops_per_token * self.config.train.sequence_length

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one update."""
        return self.flops_per_example * self.config.train.global_batch


class Update(NamedTuple):
    """What turns a gradient into a new state."""

    weights: optimizers.Weights
    optimizer: optax.GradientTransformationExtraArgs
    transforms: tuple[StepTransform, ...]


def assemble(
    config, *, devices=None, rows: int = 0, on_microbatch: Callable | None = None,
    transforms: Sequence[StepTransform] = (), optimizer: optax.GradientTransformation | None = None,
) -> Run:  # fmt: skip
    """Return the run of a validated configuration with a resolved mesh.

    Args:
      config: with `train.steps` set.
      devices: of the mesh; default all.
      rows: of the batch during a ramp; 0: `train.global_batch`.
      on_microbatch: progress within a step, see training/step.py; used if steps are slow.
      transforms: in addition to those that the configuration asks for.
      optimizer: used as it is, in place of that of `config.optimizer` with its schedule, clipping and decay. The scalar
        `learning_rate` is NaN then.

    Raises ConfigError for a dimension that its mesh axis does not divide, and for settings of jax that would make it
    another run.
    """
    _check_jax()
    rows = rows or config.train.global_batch
    rate_factor = ramp.rate_factor(config, rows)
    config = config if rows == config.train.global_batch else ramp.of_size(config, rows)
    mesh = make_mesh({axis: config.mesh[axis] for axis in config.layout.axis_order.split(",")}, devices)
    objective = objective_of(config)
    built = models.build(config, mesh, objective)
    of_model = functools.partial(models.flops_per_token, config, config.train.sequence_length)
    flops_per_token = objective.flops_per_token(of_model, frozen="base" in built.frozen) + built.frozen_flops
    num_microbatches = config.train.gradient_accumulation
    num_microbatches = num_microbatches or platform_defaults.microbatches(config, flops_per_token, mesh)
    slow = num_microbatches > 1 and not config.train.gradient_accumulation
    meta_learning.check_rows(config, meta_learning.microbatch_rows(config, num_microbatches))
    uses_shard_map = not slow and supports_shard_map(config)
    objective = objective.chunked(
        platform_defaults.loss_chunks(config, num_microbatches, mesh, vocab_split=not uses_shard_map)
    )  # fmt: skip
    update = _update(config, built, rate_factor, transforms, optimizer)
    make_state = _state_maker(config, objective, built, update)
    with mesh_context(mesh):
        abstract_state = jax.eval_shape(make_state)
    step_transform.check_storable("memory of a step transform", abstract_state.extra)
    if optimizer is None:  # a caller's own belongs to a loop that saves nothing
        step_transform.check_storable(f"carry of train.objective={config.train.objective}", abstract_state.carry)
        step_transform.check_storable(f"optimizer.name={config.optimizer.name}", abstract_state.optimizer)
    weights = axis_rules.weight_shardings(declared_axes(built.trained), mesh)
    shardings = _state_shardings(abstract_state, weights, mesh)
    make = functools.partial(
        make_gradient, built.graphs, objective.loss, num_microbatches=num_microbatches,
        on_microbatch=on_microbatch if slow else None, measures=step_transform.measures(update.transforms),
    )  # fmt: skip
    gradient, num_parts = _gradient(
        config, make, built, update, shardings.params, num_microbatches, slow=slow, uses_shard_map=uses_shard_map
    )  # fmt: skip
    step = make_train_step(
        gradient, update.optimizer, update.transforms, seed=config.train.seed, norm=optimizers.norm(update.weights),
        num_parts=num_parts, used_rows=objective.used_rows,
    )  # fmt: skip
    # An evaluation drops no token: which ones would depend on the mesh and on the microbatches.
    evaluated = models.build(dropless(config), mesh, objective) if config.model.expert_capacity else built
    if config.train.offload == "optimizer":
        shardings, step = offload.optimizer_on_host(shardings), offload.with_optimizer_on_device(step)

    def train_step(state, batch, frozen=None):
        return step(state, batch, frozen)[:2]

    return Run(
        config=config,
        mesh=mesh,
        objective=objective,
        models=built,
        init=jax.jit(make_state, donate_argnums=0, out_shardings=shardings),
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None)),
        train_step_with_grads=jax.jit(step, out_shardings=(shardings, None, shardings.params)),
        eval_step=jax.jit(make_eval_step(_graphs_to_evaluate(objective, evaluated), objective.evaluate)),
        abstract_state=jax.tree.map(with_sharding, abstract_state, shardings),
        abstract_batch=_abstract_batch(objective, mesh),
        num_microbatches=num_microbatches,
        slow=slow,
        flops_per_token=flops_per_token,
    )


def objective_of(config) -> Objective:
    """Return the objective that `train.objective` names."""
    name = config.train.objective
    objective = importlib.import_module(f"objectives.{name}").make(config)
    check_returned(f"make of objectives/{name}.py", objective, isinstance(objective, Objective), "an Objective")
    return objective


def _abstract_batch(objective: Objective, mesh) -> dict[str, jax.ShapeDtypeStruct]:
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=axis_rules.batch_sharding(mesh, len(shape)))
        for name, shape in objective.batch().items()
    }


def _graphs_to_evaluate(objective: Objective, built: Models) -> Graphs:
    roles = [model.role for model in objective.frozen_models() if model.evaluates]
    return Graphs(built.graphs.trained, {role: built.graphs.others[role] for role in roles})


def _check_jax() -> None:
    """Raise ConfigError if an environment variable or the caller has set jax so that a run computes other numbers."""
    changed = {
        "jax_enable_x64": (jax.config.jax_enable_x64, False),
        "jax_disable_jit": (jax.config.jax_disable_jit, False),
        "jax_default_prng_impl": (jax.config.jax_default_prng_impl, "threefry2x32"),
        "jax_threefry_partitionable": (jax.config.jax_threefry_partitionable, True),
        "jax_random_seed_offset": (jax.config.jax_random_seed_offset, 0),
        "jax_high_dynamic_range_gumbel": (jax.config.jax_high_dynamic_range_gumbel, False),
    }
    for name, (value, usual) in changed.items():
        if value != usual:
            raise ConfigError(
                f"{name}={value} would change the numbers of a run; unset {name.upper()}, or call "
                f"jax.config.update({name!r}, {usual!r})"
            )


def _update(
    config, built: Models, rate_factor: float, transforms: Sequence[StepTransform],
    optimizer: optax.GradientTransformation | None,
) -> Update:  # fmt: skip
    """Return transforms and optimizer; `rate_factor` multiplies the learning rate of the configuration's optimizer."""
    base_dim = config.model.mup_base_dim
    axes = {path: names for path, (_, names) in declared_axes(built.trained).items()}
    weights = optimizers.Weights(
        axes, width_multiplier=config.model.embed_dim / base_dim if base_dim else 1.0,
        stddevs=declared_stddevs(built.trained), units=models.hidden_units(config),
    )  # fmt: skip
    if optimizer is None:
        name, of_steps = config.optimizer.name, config.optimizer.schedule
        schedule = vars(schedules)[of_steps](config.optimizer, config.train.steps)
        check_returned(f"optimizer.schedule={of_steps}", schedule, callable(schedule), "a function of the step")
        rate = jax.eval_shape(schedule, jax.ShapeDtypeStruct((), jnp.int32))
        is_number = isinstance(rate, jax.ShapeDtypeStruct) and rate.shape == ()
        check_returned(f"optimizer.schedule={of_steps} for a step", rate, is_number, "a number")
        schedule = schedules.scaled(schedule, rate_factor)
        direction = vars(optimizers)[name](config.optimizer, weights)
        is_right = isinstance(direction, optax.GradientTransformation)
        check_returned(f"optimizer.name={name}", direction, is_right, "an optax.GradientTransformation")
        direction = step_transform.checked_direction(f"optimizer.name={name}", direction)
        optimizer = optimizers.make(direction, config.optimizer, schedule, weights)
    else:
        schedule, optimizer = optax.constant_schedule(math.nan), optax.with_extra_args_support(optimizer)
    transforms = step_transform.ordered([*step_transform.of_config(config, weights, schedule), *transforms])
    step_transform.check(transforms)
    return Update(weights, optimizer, transforms)


def _state_maker(config, objective: Objective, built: Models, update: Update) -> Callable[..., TrainState]:
    """Return params -> the initial state; without params they are random."""

    def make_state(params=None):
        model = built.make(nnx.Rngs(config.train.seed))
        params = nnx.to_pure_dict(nnx.state(model, objective.trainable)) if params is None else params
        memories = {transform.name: transform.init(params) for transform in update.transforms}
        return TrainState(
            step=jnp.int32(0), examples=jnp.uint32(0), params=params, optimizer=update.optimizer.init(params),
            carry=objective.init_carry(model, config.train.global_batch, jax.random.key(config.train.seed)),
            extra={name: memory for name, memory in memories.items() if memory},
        )  # fmt: skip

    return make_state


def _gradient(
    config, make: Callable, built: Models, update: Update, shardings: dict, num_microbatches: int, *, slow: bool,
    uses_shard_map: bool,
) -> tuple[Callable, int]:  # fmt: skip
    """Return (the gradient function, the number of parts of a batch that are measured; 0: none).

    `make` is `make_gradient` of training/step.py without the arguments that depend on the mesh. `shardings` are those
    of the parameters. If `uses_shard_map`, each device computes its own part in a shard_map. If `slow`, microbatches
    report progress.
    """
    measures_parts = any(transform.measures_parts for transform in update.transforms)
    once = _reduce_once_axes(config, built)
    if not uses_shard_map:
        # All devices report the progress of slow steps together, and balance their experts together.
        groups = {} if slow or config.model.num_experts or num_microbatches == 1 else once
        square = functools.partial(noise.part_square, optimizers.norm(update.weights))
        gradient = make(groups=groups, part_square=square if measures_parts else None)
        return gradient, measures_parts * num_microbatches * math.prod(groups.values())
    axes = unflatten_dict(update.weights.axes)
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    reduce_once = num_microbatches > 1 and "fsdp" in once and not built.frozen
    square, of_devices = part_square(axes, specs, config.mesh, reduce_once=reduce_once)
    gradient = shard_map_gradient(
        make(part_square=square if measures_parts else None), axes, specs, reduce_once=reduce_once,
        reduce_dtype=None if config.train.sum_dtype == "auto" else jnp.dtype(config.train.sum_dtype),
        frozen_specs=jax.tree.map(lambda leaf: leaf.sharding.spec, built.frozen),
        measures=step_transform.measures(update.transforms),
    )  # fmt: skip
    return gradient, measures_parts * num_microbatches * of_devices


def _state_shardings(abstract_state: TrainState, weights: dict, mesh) -> TrainState:
    """Return the shardings of a state.

    An array with the path of a weight is sharded like the weight if each of its dimensions has the weight's size; a
    dimension of size 1 is not sharded. The carry is sharded like the batch. All else is small, such as counts and
    factored second moments, and is replicated.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    of_weight = flatten_dict(weights)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(abstract_state.params).items()}

    def of_leaf(path, leaf):
        weight = optimizers.path_of_weight(path, shapes)
        if weight is None or leaf.shape == (1,) * leaf.ndim or leaf.ndim != len(shapes[weight]):
            return replicated
        sizes = list(zip(leaf.shape, shapes[weight], strict=True))
        if any(size not in (1, whole) for size, whole in sizes):
            return replicated
        spec = (*of_weight[weight].spec, *[None] * leaf.ndim)
        kept = [axes if size == whole else None for axes, (size, whole) in zip(spec, sizes, strict=False)]
        return of_weight[weight] if leaf.shape == shapes[weight] else NamedSharding(mesh, PartitionSpec(*kept))

    shardings = jax.tree_util.tree_map_with_path(of_leaf, abstract_state)
    return dataclasses.replace(shardings, carry=jax.tree.map(lambda _: rows, abstract_state.carry))


def _reduce_once_axes(config, built: Models) -> dict[str, int]:
    """Return {mesh axis: size} of the axes that gradients are reduced over once a step.

    fsdp is one of them if a device can hold the full gradient.
    """
    full_bytes = 4 * built.num_trained / config.mesh.model
    axes = ("dcn_data", "data", "fsdp") if full_bytes <= FULL_GRADIENT_BYTES else ("dcn_data", "data")
    return {axis: config.mesh[axis] for axis in axes if config.mesh[axis] > 1}
