# SPDX-License-Identifier: Apache-2.0
"""Puts a run together from a configuration: mesh, model, objective, optimizer, steps, abstract state.

The one file that knows all lower rooms. What is rehearsed, proved or trained is what `assemble` returns.
"""

import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from configs import fine_tuning, ramp, simulation
from configs.base import BATCH_AXES, MESH_AXES, OF_TWO_MODELS, supports_shard_map
from configs.topologies import COMPILER_OPTIONS
from layers.adapters import LoRA
from layers.axes import declared_axes
from layers.projection import Projection
from parallelism import axis_rules, processes, proof
from parallelism.mesh import make_mesh, mesh_context
from training import automatic, fit, guard, noise_scale, offload, optimizers, preflight, schedules, throughput
from training.shards import part_square, shard_map_gradient
from training.state import TrainState
from training.step import make_eval_step, make_gradient, make_train_step
from training.teacher import Teacher
from training.teacher import configuration as teacher_configuration

PRODUCTS = ("matrix", optimizers.VOCAB)  # kinds of weights that are used in the type that a model computes in
FULL_GRADIENT_BYTES = 2**30  # up to this size a device holds the full float32 gradient between microbatches


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a run is made of; nothing is allocated or compiled yet.

    `abstract_state`, `abstract_batch` and `abstract_frozen`, the weights beside adapters or a teacher's if there are
    any, carry shapes, types and layouts of what steps take. `train_step`, `observed_step` (which returns the gradients
    too, and keeps its arguments) and `eval_step` are jitted; they, `init` (the state at the start, with random
    parameters or given ones, which it takes over) and `model` are used inside `mesh_context(run.mesh)`. A run is
    `slow` where a CPU takes so long for a step that `assemble` cut it into microbatches.
    """

    config: object
    mesh: jax.sharding.Mesh
    objective: object
    graph: nnx.GraphDef
    init: Callable[..., TrainState]
    train_step: Callable
    observed_step: Callable
    eval_step: Callable
    abstract_state: TrainState
    abstract_batch: dict
    abstract_frozen: tuple
    num_microbatches: int
    slow: bool
    num_parameters: int
    num_trained: int  # of them
    num_active: int  # parameters that a token meets: of experts, those that it is sent to
    flops_per_token: float

    def model(self, params: dict) -> nnx.Module:
        """Return the model with these parameters."""
        return nnx.merge(self.graph, params)

    def evaluated(self, state: TrainState, frozen: Sequence) -> dict:
        """Return what a state is evaluated with: all parameters of the model, of which adapters are a part."""
        if not self.config.lora.rank:
            return state.evaluated
        return unflatten_dict(flatten_dict(state.evaluated) | flatten_dict(frozen[0]))

    def compile(self):
        """Return `train_step` compiled for the run's state and batch."""
        with mesh_context(self.mesh):
            lowered = self.train_step.lower(self.abstract_state, self.abstract_batch, *self.abstract_frozen)
            return lowered.compile(compiler_options=COMPILER_OPTIONS[automatic.platform(self.mesh)])

    @property
    def batch_sharding(self) -> NamedSharding:
        """How a batch array [batch, length] lies."""
        return axis_rules.batch_sharding(self.mesh)

    @property
    def eval_rows(self) -> int:
        """Sequences evaluated at once: a microbatch, so that evaluating fits where training does."""
        return self.config.train.global_batch // self.num_microbatches

    @property
    def flops_per_example(self) -> float:
        """Model FLOPs of one row of a batch, of padding and what is not learned too."""
        return self.flops_per_token * self.config.train.sequence_length

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one update."""
        return self.flops_per_example * self.config.train.global_batch


def assemble(
    config, *, devices=None, rows: int = 0, on_microbatch: Callable | None = None,
    wrap_gradient: Callable = lambda gradient: gradient,
) -> Run:  # fmt: skip
    """Return the run that a validated configuration with a resolved mesh describes.

    Args:
      config: with `train.steps` set.
      devices: of the mesh; default all.
      rows: of the global batch, where a ramp has not come to the whole one; 0: it has.
      on_microbatch: progress within a step, see training/step.py; wired where steps are slow.
      wrap_gradient: gradient function -> gradient function, to spoil it on purpose.

    Raises ConfigError for a dimension that its mesh axis does not divide.
    """
    rows = rows or config.train.global_batch
    rate_factor = ramp.rate_factor(config, rows)
    config = config if rows == config.train.global_batch else ramp.of_size(config, rows)
    mesh = make_mesh({axis: config.mesh[axis] for axis in config.layout.axis_order.split(",")}, devices)
    how = {"frozen": True} if config.lora.rank else {}
    flops_per_token = _model_module(config).flops_per_token(config.model, config.train.sequence_length, **how)
    num_microbatches = config.train.gradient_accumulation or automatic.microbatches(config, flops_per_token, mesh)
    slow = num_microbatches > 1 and not config.train.gradient_accumulation
    teacher = _teacher(config, mesh)
    make_model, graph, abstract_model, others = _model(config, mesh, teacher)
    frozen = [_beside(config, others, mesh)] if config.lora.rank else [teacher.params] if teacher else []
    schedule = vars(schedules)[config.optimizer.schedule](config.optimizer, config.train.steps)
    schedule = schedules.scaled(schedule, rate_factor)
    weights = _weights(config, abstract_model)
    direction = vars(optimizers)[config.optimizer.name](config.optimizer, weights)
    optimizer = optimizers.make(direction, config.optimizer, schedule, weights)
    uses_shard_map = not slow and supports_shard_map(config)
    num_chunks = automatic.loss_chunks(config, num_microbatches, mesh, vocab_split=not uses_shard_map)
    objective = importlib.import_module(f"objectives.{config.train.objective}").make(
        config, num_chunks=num_chunks, **({"teacher": teacher.model} if teacher else {})
    )
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=axis_rules.batch_sharding(mesh, len(shape)))
        for name, shape in objective.batch().items()
    }

    def make_state(params=None):
        model = make_model(nnx.Rngs(config.train.seed))
        params = nnx.to_pure_dict(nnx.state(model, _trained(config))) if params is None else params
        return TrainState(
            step=jnp.int32(0), examples=jnp.uint32(0), params=params, optimizer=optimizer.init(params),
            average=jax.tree.map(jnp.copy, params) if config.optimizer.ema_decay else {},
            carry=objective.init_carry(model, config.train.global_batch, jax.random.key(config.train.seed)),
            guard=guard.init(), noise=noise_scale.init() if ramp.measures_noise(config) else {},
        )  # fmt: skip

    with mesh_context(mesh):
        abstract_state = jax.eval_shape(make_state)
    shardings = _state_shardings(abstract_state, axis_rules.weight_shardings(declared_axes(abstract_model), mesh), mesh)
    make = functools.partial(
        make_gradient, graph, objective.loss, num_microbatches=num_microbatches,
        on_microbatch=on_microbatch if slow else None, adapted=config.lora.rank > 0, teacher=teacher and teacher.graph,
    )  # fmt: skip
    gradient, num_parts = _gradient(
        config, make, abstract_model, shardings.params, num_microbatches, slow=slow, uses_shard_map=uses_shard_map,
        frozen=frozen,
    )  # fmt: skip
    step = make_train_step(
        wrap_gradient(gradient), optimizer, schedule, seed=config.train.seed,
        average=optimizers.average(weights, config.optimizer.ema_decay) if config.optimizer.ema_decay else None,
        spike_deviations=config.train.spike_deviations, norm=optimizers.norm(weights), num_parts=num_parts,
    )  # fmt: skip
    if config.train.offload == "optimizer":
        shardings, step = offload.on_host(shardings), offload.brought(step)

    def train_step(state, batch, *frozen):
        return step(state, batch, *frozen)[:2]

    return Run(
        config=config,
        mesh=mesh,
        objective=objective,
        graph=graph,
        init=jax.jit(make_state, donate_argnums=0, out_shardings=shardings),
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None)),
        observed_step=jax.jit(step, out_shardings=(shardings, None, shardings.params)),
        eval_step=jax.jit(make_eval_step(graph, objective.evaluate, teacher and teacher.graph)),
        abstract_state=jax.tree.map(_laid_as, abstract_state, shardings),
        abstract_batch=batch,
        abstract_frozen=tuple(frozen),
        num_microbatches=num_microbatches,
        slow=slow,
        num_parameters=_num_parameters(abstract_model) + _num_parameters(others),
        num_trained=_num_parameters(abstract_model),
        num_active=_num_active(config.model, nnx.merge_state(abstract_model, others)),
        flops_per_token=flops_per_token,
    )


def _gradient(
    config, make: Callable, abstract_model: nnx.State, shardings: dict, num_microbatches: int, *, slow: bool,
    uses_shard_map: bool, frozen: Sequence[dict],
) -> tuple[Callable, int]:  # fmt: skip
    """Return (the gradient function, the number of parts of a batch that measure the noise scale; 0: none).

    Args:
      make: `make_gradient` of training/step.py without the arguments that depend on the mesh.
      shardings: of the parameters.
      slow: whether microbatches report progress.
      uses_shard_map: whether each device computes its own part in a shard_map.
    """
    measures, once = ramp.measures_noise(config), _reduce_once_axes(config, abstract_model)
    if not uses_shard_map:
        groups = {} if slow or num_microbatches == 1 else once
        square = functools.partial(noise_scale.part_square, optimizers.norm(_weights(config, abstract_model)))
        gradient = make(groups=groups, part_square=square if measures else None)
        return gradient, measures * num_microbatches * math.prod(groups.values())
    axes = unflatten_dict({path: names for path, (_, names) in declared_axes(abstract_model).items()})
    specs = jax.tree.map(lambda sharding: sharding.spec, shardings)
    reduce_once = num_microbatches > 1 and "fsdp" in once and not frozen
    square, of_devices = part_square(axes, specs, config.mesh, reduce_once=reduce_once)
    gradient = shard_map_gradient(
        make(part_square=square if measures else None), axes, specs, reduce_once=reduce_once,
        reduce_dtype=None if config.train.sum_dtype == "auto" else jnp.dtype(config.train.sum_dtype),
        frozen_specs=jax.tree.map(lambda leaf: leaf.sharding.spec, frozen),
    )  # fmt: skip
    return gradient, measures * num_microbatches * of_devices


def fit_batch(config, announce: Callable[[str], None]) -> None:
    """Do what `batch.fit` says: put as few microbatches into a configuration as memory allows, or ConfigError."""
    if config.batch.fit == "none":
        return
    available = config.batch.memory_gib or throughput.device_capacity_gib()

    def fits(candidate) -> bool:
        count = candidate.train.gradient_accumulation
        needed = preflight.needed_gib(assemble(candidate).compile)
        said = "more than there is" if needed == math.inf else f"{needed:.3g} GiB"
        announce(f"train.gradient_accumulation={count} needs {said} of {available:.3g} GiB a device")
        return needed <= available

    fit.fit(config, fits)
    config.train.gradient_accumulation = max(processes.gather("microbatches", config.train.gradient_accumulation))


def layout_differences(config) -> list[str]:
    """Return where a shrunken copy of a configuration computes something else on its mesh than on one device.

    The copy keeps mesh, kinds of layers, remat, scan, microbatches, optimizer and objective; it computes in float32,
    without dropout, whose draws belong to a layout.
    """
    config = config.copy_and_resolve_references()
    simulation.scale_down(config, {})
    config.model.update(dtype="float32", dropout=0.0)
    if config.train.objective in OF_TWO_MODELS:  # the loss of one is proved; layouts are of models
        config.train.objective, config.distillation.teacher = "language_modeling", ""
    config.lora.rank = 0
    config.batch.update(ramp="none", first=0, noise_scale=False)  # whose parts belong to a layout too
    alone = config.copy_and_resolve_references()
    alone.mesh.update(dict.fromkeys(MESH_AXES, 1))
    alone.train.gradient_accumulation = 1
    one = assemble(alone, devices=jax.devices()[:1])
    many = assemble(config, devices=jax.devices()[: math.prod(config.mesh.values())])
    batches = [jax.device_get(one.objective.random_batch(jax.random.key(seed))) for seed in range(3)]
    reference = _layout(one)
    with mesh_context(one.mesh):
        state = one.init()
        for batch in batches[:2]:  # moments of a first step would be gradients that two runs can hardly share
            state, *_ = one.observed_step(*jax.device_put((state, batch), (reference.state, reference.batch)))
    return proof.differences(reference, _layout(many), jax.device_get(state), batches[2])


def _layout(run: Run) -> proof.Layout:
    state, batch = jax.tree.map(lambda leaf: leaf.sharding, (run.abstract_state, run.abstract_batch))
    return proof.Layout(run.mesh, run.observed_step, state, batch)


def _num_parameters(abstract_model: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model))


def _num_active(model, abstract_model: nnx.State) -> int:
    declared = declared_axes(abstract_model).values()
    of_experts = sum(math.prod(shape) for shape, names in declared if optimizers.EXPERTS in names)
    idle = model.num_experts - model.experts_per_token
    return _num_parameters(abstract_model) - (of_experts * idle // model.num_experts if of_experts else 0)


def _model_module(config):
    return importlib.import_module(f"models.{config.model.name}")


def _trained(config) -> type[nnx.Param]:
    """Return which parameters are trained: all, or adapters."""
    return nnx.LoRAParam if config.lora.rank else nnx.Param


def _model(config, mesh, teacher: Teacher | None = None) -> tuple[Callable, nnx.GraphDef, nnx.State, nnx.State]:
    """Return (rngs -> model, the model without its parameters, the shapes of those that are trained, and of others).

    A student whose stream is compared with its teacher's has a `projection` to the width of that.
    """

    def make_model(rngs):
        how = dict(
            dtype=automatic.dtype(config, mesh),
            scan=automatic.scan(config, mesh),
            kernel=automatic.kernel(config, mesh),
        )
        if config.lora.rank:
            how["lora"] = LoRA(config.lora.rank, config.lora.alpha, fine_tuning.targets(config.lora.targets))
        model = _model_module(config).make(config.model, **how, rngs=rngs)
        if teacher and config.train.objective == "distillation" and config.distillation.hidden_weight:
            widths = dict(embed_dim=config.model.embed_dim, out_dim=teacher.model.embed_dim)
            model.projection = Projection(**widths, rngs=rngs)
        return model

    # On one device, where any shape is divisible: what the mesh does not divide is told by axis_rules, by name.
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), mesh.devices.flat[:1])):
        model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    return make_model, *nnx.split(model, _trained(config), ...)


def _teacher(config, mesh) -> Teacher | None:
    """Return the teacher or reference of a configuration, laid out as any model: a teacher in the type it computes in.

    A reference has the types of weights beside adapters, and so computes what the run does at first.
    """
    if config.train.objective not in OF_TWO_MODELS:
        return None
    stored = teacher_configuration(config)
    _, graph, abstract, _ = _model(stored, mesh)
    if config.train.objective == "dpo":
        return Teacher(stored.model, graph, _beside(stored, abstract, mesh))
    dtype = automatic.dtype(stored, mesh)
    return Teacher(stored.model, graph, _laid_out(abstract, mesh, lambda names: dtype))


def _beside(config, abstract: nnx.State, mesh) -> dict:
    """Return the weights beside adapters, or of a reference: what they come to is what trained ones would.

    Those of products are in the type that these are computed in, those of norms in float32.
    """
    dtype = automatic.dtype(config, mesh)
    return _laid_out(abstract, mesh, lambda names: dtype if optimizers.kind(names) in PRODUCTS else jnp.float32)


def _laid_out(abstract: nnx.State, mesh, dtype: Callable) -> dict:
    """Return parameters as shapes that lie as any do; `dtype` says the type of one by the names of its dimensions."""
    types = unflatten_dict({path: dtype(names) for path, (_, names) in declared_axes(abstract).items()})
    shardings = axis_rules.weight_shardings(declared_axes(abstract), mesh)
    return jax.tree.map(_laid_as, nnx.to_pure_dict(abstract), shardings, types)


def _laid_as(leaf, sharding: NamedSharding, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)


def _state_shardings(abstract_state: TrainState, weights: dict, mesh) -> TrainState:
    """Weights, and all that is kept of a weight's shape under its path, lie as the weights, a carry as the batch.

    Everything else is small, a count or a factor of second moments, and copied to every device.
    """
    copied = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    of_weight = flatten_dict(weights)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(abstract_state.params).items()}

    def of_leaf(path, leaf):
        keys = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
        weight = next((keys[n:] for n in range(len(keys)) if keys[n:] in shapes), None)
        return of_weight[weight] if weight and shapes[weight] == leaf.shape else copied

    shardings = jax.tree_util.tree_map_with_path(of_leaf, abstract_state)
    return dataclasses.replace(shardings, carry=jax.tree.map(lambda _: rows, abstract_state.carry))


def _weights(config, abstract_model: nnx.State) -> optimizers.Weights:
    """Return what the optimizer knows of the model's parameters."""
    base_dim = config.model.mup_base_dim
    axes = {path: names for path, (_, names) in declared_axes(abstract_model).items()}
    return optimizers.Weights(axes, config.model.embed_dim / base_dim if base_dim else 1.0)


def _reduce_once_axes(config, abstract_model: nnx.State) -> dict[str, int]:
    """Return {mesh axis: size} of the axes that gradients are reduced over once a step.

    fsdp is one of them if a device can hold the full gradient.
    """
    full_bytes = 4 * _num_parameters(abstract_model) / config.mesh.model
    axes = ("dcn_data", "data", "fsdp") if full_bytes <= FULL_GRADIENT_BYTES else ("dcn_data", "data")
    return {axis: config.mesh[axis] for axis in axes if config.mesh[axis] > 1}
