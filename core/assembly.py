# SPDX-License-Identifier: Apache-2.0
"""Assemble a run from a configuration: mesh, model, objective, optimizer, steps, abstract state.

Only this file knows all lower rooms. Rehearsal, layout proof and training all use the result of `assemble`.
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

from checkpointing.teacher import Teacher
from checkpointing.teacher import configuration as teacher_configuration
from cluster import processes
from configs.base import BATCH_AXES, MESH_AXES, OF_TWO_MODELS, supports_shard_map
from configs.topologies import COMPILER_OPTIONS
from layers.adapters import LoRA
from layers.axes import declared_axes
from layers.projection import Projection
from parallelism import axis_rules, proof
from parallelism.mesh import make_mesh, mesh_context
from reporting import preflight, throughput
from settings import fine_tuning, ramp, simulation
from training import fit, guard, noise_scale, offload, optimizers, platform_defaults, schedules
from training.shard_map import part_square, shard_map_gradient
from training.state import TrainState
from training.step import make_eval_step, make_gradient, make_train_step

PRODUCTS = ("matrix", optimizers.VOCAB)  # kinds of weights that are cast to the compute type
FULL_GRADIENT_BYTES = 2**30  # up to this size a device holds the full float32 gradient between microbatches


@dataclasses.dataclass(frozen=True)
class Run:
    """All parts of a run; nothing is allocated or compiled yet.

    `abstract_state`, `abstract_batch` and `abstract_frozen` are shapes, types and shardings of the arguments of a step.
    `abstract_frozen` are the frozen base weights of adapters, or the parameters of a teacher or reference.

    `train_step`, `train_step_with_grads` and `eval_step` are jitted. `train_step` donates the state;
    `train_step_with_grads` returns the gradients too and donates nothing. `init` returns the initial state, with random
    parameters or with given ones, which it donates. Call these and `model` inside `mesh_context(run.mesh)`.

    A run is `slow` if a step takes so long on a CPU that `assemble` split it into microbatches.
    """

    config: object
    mesh: jax.sharding.Mesh
    objective: object
    graph: nnx.GraphDef
    init: Callable[..., TrainState]
    train_step: Callable
    train_step_with_grads: Callable
    eval_step: Callable
    abstract_state: TrainState
    abstract_batch: dict
    abstract_frozen: tuple
    num_microbatches: int
    slow: bool
    num_parameters: int
    num_trained: int  # trainable parameters
    num_active: int  # parameters that one token uses, so of experts only the chosen ones
    flops_per_token: float

    def model(self, params: dict) -> nnx.Module:
        """Return the model with these parameters."""
        return nnx.merge(self.graph, params)

    def eval_params(self, state: TrainState, frozen: Sequence) -> dict:
        """Return the parameters that a state is evaluated with; adapters are combined with the frozen base weights."""
        if not self.config.lora.rank:
            return state.eval_params
        return unflatten_dict(flatten_dict(state.eval_params) | flatten_dict(frozen[0]))

    def compile(self):
        """Compile `train_step` for the run's state and batch."""
        with mesh_context(self.mesh):
            lowered = self.train_step.lower(self.abstract_state, self.abstract_batch, *self.abstract_frozen)
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


def assemble(
    config, *, devices=None, rows: int = 0, on_microbatch: Callable | None = None,
    wrap_gradient: Callable = lambda gradient: gradient,
) -> Run:  # fmt: skip
    """Return the run of a validated configuration with a resolved mesh.

    Args:
      config: with `train.steps` set.
      devices: of the mesh; default all.
      rows: of the batch during a ramp; 0: `train.global_batch`.
      on_microbatch: progress within a step, see training/step.py; used if steps are slow.
      wrap_gradient: gradient function -> gradient function, to inject faults.

    Raises ConfigError for a dimension that its mesh axis does not divide.
    """
    rows = rows or config.train.global_batch
    rate_factor = ramp.rate_factor(config, rows)
    config = config if rows == config.train.global_batch else ramp.of_size(config, rows)
    mesh = make_mesh({axis: config.mesh[axis] for axis in config.layout.axis_order.split(",")}, devices)
    how = {"frozen": True} if config.lora.rank else {}
    flops_per_token = _model_module(config).flops_per_token(config.model, config.train.sequence_length, **how)
    num_microbatches = config.train.gradient_accumulation
    num_microbatches = num_microbatches or platform_defaults.microbatches(config, flops_per_token, mesh)
    slow = num_microbatches > 1 and not config.train.gradient_accumulation
    teacher = _teacher(config, mesh)
    make_model, graph, abstract_model, untrained = _model(config, mesh, teacher)
    frozen = [teacher.params] if teacher else []
    if config.lora.rank:
        frozen = [_abstract_frozen_params(config, untrained, mesh)]
    schedule = vars(schedules)[config.optimizer.schedule](config.optimizer, config.train.steps)
    schedule = schedules.scaled(schedule, rate_factor)
    weights = _weights(config, abstract_model)
    direction = vars(optimizers)[config.optimizer.name](config.optimizer, weights)
    optimizer = optimizers.make(direction, config.optimizer, schedule, weights)
    uses_shard_map = not slow and supports_shard_map(config)
    num_chunks = platform_defaults.loss_chunks(config, num_microbatches, mesh, vocab_split=not uses_shard_map)
    objective = importlib.import_module(f"objectives.{config.train.objective}").make(
        config, num_chunks=num_chunks, **({"teacher": teacher.model} if teacher else {})
    )
    batch = {
        name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=axis_rules.batch_sharding(mesh, len(shape)))
        for name, shape in objective.batch().items()
    }

    def make_state(params=None):
        model = make_model(nnx.Rngs(config.train.seed))
        params = nnx.to_pure_dict(nnx.state(model, _trainable(config))) if params is None else params
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
        shardings, step = offload.optimizer_on_host(shardings), offload.with_optimizer_on_device(step)

    def train_step(state, batch, *frozen):
        return step(state, batch, *frozen)[:2]

    return Run(
        config=config,
        mesh=mesh,
        objective=objective,
        graph=graph,
        init=jax.jit(make_state, donate_argnums=0, out_shardings=shardings),
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None)),
        train_step_with_grads=jax.jit(step, out_shardings=(shardings, None, shardings.params)),
        eval_step=jax.jit(make_eval_step(graph, objective.evaluate, teacher and teacher.graph)),
        abstract_state=jax.tree.map(_with_sharding, abstract_state, shardings),
        abstract_batch=batch,
        abstract_frozen=tuple(frozen),
        num_microbatches=num_microbatches,
        slow=slow,
        num_parameters=_num_parameters(abstract_model) + _num_parameters(untrained),
        num_trained=_num_parameters(abstract_model),
        num_active=_num_active(config.model, nnx.merge_state(abstract_model, untrained)),
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
    """Apply `batch.fit`: set the smallest `train.gradient_accumulation` that fits in memory, or raise ConfigError."""
    if config.batch.fit == "none":
        return
    available = config.batch.memory_gib or throughput.device_capacity_gib()

    def fits(candidate) -> bool:
        count = candidate.train.gradient_accumulation
        needed = preflight.needed_gib(assemble(candidate).compile)
        amount = "more than there is" if needed == math.inf else f"{needed:.3g} GiB"
        announce(f"train.gradient_accumulation={count} needs {amount} of {available:.3g} GiB a device")
        return needed <= available

    fit.fit(config, fits)
    config.train.gradient_accumulation = max(processes.gather("microbatches", config.train.gradient_accumulation))


def layout_differences(config) -> list[str]:
    """Return differences between the results of a scaled-down configuration on its mesh and on one device.

    The copy keeps mesh, kinds of layers, remat, scan, microbatches, optimizer and objective. It computes in float32 and
    without dropout, because the random draws of dropout depend on the layout.
    """
    config = config.copy_and_resolve_references()
    simulation.scale_down(config, {})
    config.model.update(dtype="float32", dropout=0.0)
    if config.train.objective in OF_TWO_MODELS:  # layouts are a property of the model, so the loss of one suffices
        config.train.objective, config.distillation.teacher = "language_modeling", ""
    config.lora.rank = 0
    config.batch.update(ramp="none", first=0, noise_scale=False)  # the parts of a batch depend on the layout too
    alone = config.copy_and_resolve_references()
    alone.mesh.update(dict.fromkeys(MESH_AXES, 1))
    alone.train.gradient_accumulation = 1
    one = assemble(alone, devices=jax.devices()[:1])
    many = assemble(config, devices=jax.devices()[: math.prod(config.mesh.values())])
    batches = [jax.device_get(one.objective.random_batch(jax.random.key(seed))) for seed in range(3)]
    reference = _layout(one)
    with mesh_context(one.mesh):
        state = one.init()
        for batch in batches[:2]:  # two steps, so that the moments are more than the first gradient
            state, *_ = one.train_step_with_grads(*jax.device_put((state, batch), (reference.state, reference.batch)))
    return proof.differences(reference, _layout(many), jax.device_get(state), batches[2])


def _layout(run: Run) -> proof.Layout:
    state, batch = jax.tree.map(lambda leaf: leaf.sharding, (run.abstract_state, run.abstract_batch))
    return proof.Layout(run.mesh, run.train_step_with_grads, state, batch)


def _num_parameters(abstract_model: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model))


def _num_active(model, abstract_model: nnx.State) -> int:
    declared = declared_axes(abstract_model).values()
    of_experts = sum(math.prod(shape) for shape, names in declared if optimizers.EXPERTS in names)
    idle = model.num_experts - model.experts_per_token
    return _num_parameters(abstract_model) - (of_experts * idle // model.num_experts if of_experts else 0)


def _model_module(config):
    return importlib.import_module(f"models.{config.model.name}")


def _trainable(config) -> type[nnx.Param]:
    """Return the type of the trainable parameters: all, or adapters."""
    return nnx.LoRAParam if config.lora.rank else nnx.Param


def _model(config, mesh, teacher: Teacher | None = None) -> tuple[Callable, nnx.GraphDef, nnx.State, nnx.State]:
    """Return (rngs -> model, its graph, its abstract trainable parameters, its other abstract parameters).

    If the loss compares the streams of student and teacher, the student has a `projection` to the teacher's width.
    """

    def make_model(rngs):
        how = dict(
            dtype=platform_defaults.dtype(config, mesh),
            scan=platform_defaults.scan(config, mesh),
            kernel=platform_defaults.kernel(config, mesh),
        )
        if config.lora.rank:
            how["lora"] = LoRA(config.lora.rank, config.lora.alpha, fine_tuning.targets(config.lora.targets))
        model = _model_module(config).make(config.model, **how, rngs=rngs)
        if teacher and config.train.objective == "distillation" and config.distillation.hidden_weight:
            widths = dict(embed_dim=config.model.embed_dim, out_dim=teacher.model.embed_dim)
            model.projection = Projection(**widths, rngs=rngs)
        return model

    # Declare the model on one device, which divides any shape. axis_rules reports by name what the mesh cannot divide.
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), mesh.devices.flat[:1])):
        model = nnx.eval_shape(lambda: make_model(nnx.Rngs(0)))
    return make_model, *nnx.split(model, _trainable(config), ...)


def _teacher(config, mesh) -> Teacher | None:
    """Return the abstract teacher or reference of a configuration.

    A teacher is in its compute type. A reference has the types of a base of adapters, so at the first step it computes
    the same as the run.
    """
    if config.train.objective not in OF_TWO_MODELS:
        return None
    stored = teacher_configuration(config)
    _, graph, abstract, _ = _model(stored, mesh)
    if config.train.objective == "dpo":
        return Teacher(stored.model, graph, _abstract_frozen_params(stored, abstract, mesh))
    dtype = platform_defaults.dtype(stored, mesh)
    return Teacher(stored.model, graph, _abstract_params(abstract, mesh, lambda names: dtype))


def _abstract_frozen_params(config, abstract: nnx.State, mesh) -> dict:
    """Return the abstract frozen base weights of adapters, or of a reference.

    Weights of products are in the compute type and those of norms in float32, so the model computes the same as with
    trainable weights.
    """
    dtype = platform_defaults.dtype(config, mesh)
    return _abstract_params(abstract, mesh, lambda names: dtype if optimizers.kind(names) in PRODUCTS else jnp.float32)


def _abstract_params(abstract: nnx.State, mesh, dtype: Callable) -> dict:
    """Return parameters as shapes with shardings; `dtype` maps the dimension names of a parameter to its type."""
    types = unflatten_dict({path: dtype(names) for path, (_, names) in declared_axes(abstract).items()})
    shardings = axis_rules.weight_shardings(declared_axes(abstract), mesh)
    return jax.tree.map(_with_sharding, nnx.to_pure_dict(abstract), shardings, types)


def _with_sharding(leaf, sharding: NamedSharding, dtype=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, dtype or leaf.dtype, sharding=sharding)


def _state_shardings(abstract_state: TrainState, weights: dict, mesh) -> TrainState:
    """Return the shardings of a state.

    An array with the path and shape of a weight is sharded like the weight, and the carry like the batch. All else is
    small, such as counts and factored second moments, and is replicated.
    """
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    of_weight = flatten_dict(weights)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(abstract_state.params).items()}

    def of_leaf(path, leaf):
        keys = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
        weight = next((keys[n:] for n in range(len(keys)) if keys[n:] in shapes), None)
        return of_weight[weight] if weight and shapes[weight] == leaf.shape else replicated

    shardings = jax.tree_util.tree_map_with_path(of_leaf, abstract_state)
    return dataclasses.replace(shardings, carry=jax.tree.map(lambda _: rows, abstract_state.carry))


def _weights(config, abstract_model: nnx.State) -> optimizers.Weights:
    """Return the axes and the width factor of the parameters, for the optimizer."""
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
