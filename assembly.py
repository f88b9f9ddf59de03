# SPDX-License-Identifier: Apache-2.0
"""Puts a run together from a configuration: mesh, model, objective, optimizer, steps, abstract state.

The one file that knows all lower rooms. What is rehearsed, proved or trained is what `assemble` returns.
"""

import dataclasses
import importlib
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import NamedSharding, PartitionSpec

from configs import simulation
from configs.base import BATCH_AXES, MESH_AXES, batch_shards, by_device
from configs.topologies import COMPILER_OPTIONS
from layers.axes import declared_axes
from parallelism import axis_rules, proof
from parallelism.mesh import make_mesh, mesh_context
from training import guard, offload, optimizers, schedules, throughput
from training.shards import in_shards
from training.state import TrainState
from training.step import make_eval_step, make_gradient, make_train_step

CPU_MICROBATCH_FLOPS = 2e12  # about 10 s on two CPU cores
CPU_UNROLLED_LAYERS = 12  # deeper stacks take longer to compile than unrolling saves
# Of float32 logits per device: on CPU what is fast, elsewhere few chunks, for each sums the head's gradient anew.
LOSS_CHUNK_BYTES = {"cpu": 64 * 2**20, "gpu": 2**30, "tpu": 2**30}
WHOLE_GRADIENT_BYTES = 2**30  # a float32 gradient up to this size is kept whole on a device between microbatches


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a run is made of; nothing is allocated or compiled yet.

    `abstract_state` and `abstract_batch` carry shapes, types and layouts. `train_step`, `observed_step` (which returns
    the gradients too, and keeps its arguments) and `eval_step` are jitted; they, `init` (the state at the start, with
    random parameters or given ones, which it takes over) and `model` are used inside `mesh_context(run.mesh)`. A run is
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
    batch_shards: int
    num_microbatches: int
    slow: bool
    num_parameters: int
    flops_per_token: float

    def model(self, params: dict) -> nnx.Module:
        """Return the model with these parameters."""
        return nnx.merge(self.graph, params)

    def compile(self):
        """Return `train_step` compiled for the run's state and batch."""
        with mesh_context(self.mesh):
            lowered = self.train_step.lower(self.abstract_state, self.abstract_batch)
            return lowered.compile(compiler_options=COMPILER_OPTIONS[_platform(self.mesh)])

    @property
    def batch_sharding(self) -> NamedSharding:
        """How a batch array [batch, length] lies."""
        return axis_rules.batch_sharding(self.mesh)

    @property
    def eval_rows(self) -> int:
        """Sequences evaluated at once: a microbatch, so that evaluating fits where training does."""
        return self.config.train.global_batch // self.num_microbatches

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one update."""
        return self.flops_per_token * self.config.train.global_batch * self.config.train.sequence_length


def assemble(
    config, *, devices=None, on_microbatch: Callable | None = None, wrap_gradient: Callable = lambda gradient: gradient
) -> Run:
    """Return the run that a validated configuration with a resolved mesh describes.

    Args:
      config: with `train.steps` set.
      devices: of the mesh; default all.
      on_microbatch: progress within a step, see training/step.py; wired where steps are slow.
      wrap_gradient: gradient function -> gradient function, to spoil it on purpose.

    Raises:
      ConfigError: a dimension that its mesh axis does not divide.
    """
    mesh = make_mesh({axis: config.mesh[axis] for axis in config.layout.axis_order.split(",")}, devices)
    flops_per_token = _model_module(config).flops_per_token(config.model, config.train.sequence_length)
    num_microbatches = config.train.gradient_accumulation or _automatic_microbatches(config, flops_per_token, mesh)
    slow = num_microbatches > 1 and not config.train.gradient_accumulation
    make_model, graph, abstract_model = _model(config, mesh)
    schedule = vars(schedules)[config.optimizer.schedule](config.optimizer, config.train.steps)
    weights = _weights(config, abstract_model)
    direction = vars(optimizers)[config.optimizer.name](config.optimizer, weights)
    optimizer = optimizers.make(direction, config.optimizer, schedule, weights)
    in_parts = not slow and by_device(config)
    num_chunks = _loss_chunks(config, num_microbatches, mesh, vocab_split=not in_parts)
    objective = importlib.import_module(f"objectives.{config.train.objective}").make(config, num_chunks=num_chunks)
    batch = _abstract_batch(objective, mesh)

    def make_state(params=None):
        model = make_model(nnx.Rngs(config.train.seed))
        params = nnx.to_pure_dict(nnx.state(model)) if params is None else params
        return TrainState(
            step=jnp.int32(0), examples=jnp.uint32(0), params=params, optimizer=optimizer.init(params),
            average=jax.tree.map(jnp.copy, params) if config.optimizer.ema_decay else {},
            carry=objective.init_carry(model, config.train.global_batch, jax.random.key(config.train.seed)),
            guard=guard.init(),
        )  # fmt: skip

    with mesh_context(mesh):
        abstract_state = jax.eval_shape(make_state)
    shardings = _state_shardings(abstract_state, axis_rules.weight_shardings(declared_axes(abstract_model), mesh), mesh)
    once = _summed_once(config, abstract_model)
    gradient = make_gradient(
        graph, objective.loss, num_microbatches=num_microbatches, on_microbatch=on_microbatch if slow else None,
        groups={} if slow or in_parts else once,
    )  # fmt: skip
    if in_parts:
        axes = unflatten_dict({path: names for path, (_, names) in declared_axes(abstract_model).items()})
        specs = jax.tree.map(lambda sharding: sharding.spec, shardings.params)
        gradient = in_shards(
            gradient, axes, specs, summed_once=num_microbatches > 1 and "fsdp" in once,
            sum_dtype=None if config.train.sum_dtype == "auto" else jnp.dtype(config.train.sum_dtype),
        )  # fmt: skip
    step = make_train_step(
        wrap_gradient(gradient), optimizer, schedule, seed=config.train.seed,
        average=optimizers.average(weights, config.optimizer.ema_decay) if config.optimizer.ema_decay else None,
        spike_deviations=config.train.spike_deviations,
    )  # fmt: skip
    if config.train.offload == "optimizer":
        shardings, step = offload.on_host(shardings), offload.brought(step)

    def train_step(state, batch):
        return step(state, batch)[:2]

    return Run(
        config=config,
        mesh=mesh,
        objective=objective,
        graph=graph,
        init=jax.jit(make_state, donate_argnums=0, out_shardings=shardings),
        train_step=jax.jit(train_step, donate_argnums=0, out_shardings=(shardings, None)),
        observed_step=jax.jit(step, out_shardings=(shardings, None, shardings.params)),
        eval_step=jax.jit(make_eval_step(graph, objective.evaluate)),
        abstract_state=jax.tree.map(_with_sharding, abstract_state, shardings),
        abstract_batch=batch,
        batch_shards=batch_shards(config.mesh),
        num_microbatches=num_microbatches,
        slow=slow,
        num_parameters=_num_parameters(abstract_model),
        flops_per_token=flops_per_token,
    )


def layout_differences(config) -> list[str]:
    """Return where a shrunken copy of a configuration computes something else on its mesh than on one device.

    The copy keeps mesh, kinds of layers, remat, scan, microbatches, optimizer and objective; it computes in float32,
    without dropout, whose draws belong to a layout.
    """
    config = config.copy_and_resolve_references()
    simulation.scale_down(config, {})
    config.model.update(dtype="float32", dropout=0.0)
    alone = config.copy_and_resolve_references()
    alone.mesh.update(dict.fromkeys(MESH_AXES, 1))
    alone.train.gradient_accumulation = 1
    one = assemble(alone, devices=jax.devices()[:1])
    many = assemble(config, devices=jax.devices()[: math.prod(config.mesh.values())])
    batches = [jax.device_get(one.objective.random_batch(jax.random.key(seed))) for seed in range(3)]
    with mesh_context(one.mesh):
        state = one.init()
        for batch in batches[:2]:  # moments of a first step would be gradients that two runs can hardly share
            state, *_ = one.observed_step(state, batch)
    return proof.differences(_layout(one), _layout(many), jax.device_get(state), batches[2])


def _layout(run: Run) -> proof.Layout:
    state, batch = jax.tree.map(lambda leaf: leaf.sharding, (run.abstract_state, run.abstract_batch))
    return proof.Layout(run.mesh, run.observed_step, state, batch)


def _num_parameters(abstract_model: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model))


def _model_module(config):
    return importlib.import_module(f"models.{config.model.name}")


def _model(config, mesh) -> tuple[Callable, nnx.GraphDef, nnx.State]:
    """Return (rngs -> model, the model without its parameters, the shapes of those)."""
    on_cpu = _platform(mesh) == "cpu"

    def make_model(rngs):
        how = dict(dtype=_dtype(config, on_cpu), scan=_scan(config, on_cpu), kernel=_kernel(config, mesh))
        return _model_module(config).make(config.model, **how, rngs=rngs)

    # On one device, where any shape is divisible: what the mesh does not divide is told by axis_rules, by name.
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), mesh.devices.flat[:1])):
        graph, state = nnx.split(nnx.eval_shape(lambda: make_model(nnx.Rngs(0))))
    return make_model, graph, state


def _kernel(config, mesh) -> str:
    """Return by whose kernels to attend, "" for none: a CPU has none."""
    return "" if config.model.attention == "reference" or _platform(mesh) == "cpu" else _platform(mesh)


def _platform(mesh) -> str:
    return mesh.devices.flat[0].platform


def _with_sharding(shape, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _abstract_batch(objective, mesh) -> dict:
    def spec(shape):
        return jax.ShapeDtypeStruct(shape, jnp.int32, sharding=axis_rules.batch_sharding(mesh, len(shape)))

    return {name: spec(shape) for name, shape in objective.batch().items()}


def _state_shardings(abstract_state: TrainState, weights: dict, mesh) -> TrainState:
    """Weights, their average and what the optimizer keeps of a weight's shape lie as the weights, a carry as the batch.

    Everything else is small, a count or a factor of second moments, and copied to every device.
    """
    copied = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(BATCH_AXES))
    of_weight = flatten_dict(weights)
    shapes = {path: leaf.shape for path, leaf in flatten_dict(abstract_state.params).items()}

    def of_optimizer(path, leaf):
        keys = tuple(part.key for part in path if isinstance(part, jax.tree_util.DictKey))
        weight = next((keys[n:] for n in range(len(keys)) if keys[n:] in shapes), None)
        return of_weight[weight] if weight and shapes[weight] == leaf.shape else copied

    return TrainState(
        step=copied, examples=copied, params=weights, average=weights if abstract_state.average else {},
        optimizer=jax.tree_util.tree_map_with_path(of_optimizer, abstract_state.optimizer),
        carry=jax.tree.map(lambda _: rows, abstract_state.carry),
        guard=jax.tree.map(lambda _: copied, abstract_state.guard),
    )  # fmt: skip


def _weights(config, abstract_model: nnx.State) -> optimizers.Weights:
    """Return what the optimizer knows of the model's parameters."""
    base_dim = config.model.mup_base_dim
    axes = {path: names for path, (_, names) in declared_axes(abstract_model).items()}
    return optimizers.Weights(axes, config.model.embed_dim / base_dim if base_dim else 1.0)


def _summed_once(config, abstract_model: nnx.State) -> dict[str, int]:
    """Return the mesh axes that gradients cross once a step, by size; fsdp where a device can hold a whole gradient."""
    whole_bytes = 4 * _num_parameters(abstract_model) / config.mesh.model
    axes = ("dcn_data", "data", "fsdp") if whole_bytes <= WHOLE_GRADIENT_BYTES else ("dcn_data", "data")
    return {axis: config.mesh[axis] for axis in axes if config.mesh[axis] > 1}


def _dtype(config, on_cpu: bool):
    slow_bfloat16 = on_cpu and not throughput.has_native_bfloat16()
    automatic = "float32" if slow_bfloat16 else "bfloat16"
    return jnp.dtype(automatic if config.model.dtype == "auto" else config.model.dtype)


def _scan(config, on_cpu: bool) -> bool:
    if config.model.layer_loop == "auto":
        # XLA's CPU backend drops the barriers that keep rematerialised work late: unrolled, remat would save nothing.
        return not on_cpu or config.model.num_layers > CPU_UNROLLED_LAYERS or config.model.remat != "none"
    return config.model.layer_loop == "scan"


def _automatic_microbatches(config, flops_per_token: float, mesh) -> int:
    """1; on CPU the fewest that keep a microbatch under CPU_MICROBATCH_FLOPS, or as small as the mesh allows."""
    rows = config.train.global_batch // batch_shards(config.mesh)
    flops = flops_per_token * config.train.global_batch * config.train.sequence_length
    if _platform(mesh) != "cpu":
        return 1
    fitting = (m for m in range(1, rows + 1) if rows % m == 0 and flops / m <= CPU_MICROBATCH_FLOPS)
    return next(fitting, rows)


def _loss_chunks(config, num_microbatches: int, mesh, *, vocab_split: bool) -> int:
    """Return the fewest parts of the length whose logits stay within the limit per device.

    The axis `model` splits the vocabulary of the logits, or their length.
    """
    by_vocab, by_length = (config.mesh.model, 1) if vocab_split else (1, config.mesh.model)
    length = config.train.sequence_length // (config.mesh.context * by_length)
    rows = config.train.global_batch // (batch_shards(config.mesh) * num_microbatches)
    automatic = LOSS_CHUNK_BYTES[_platform(mesh)] // (4 * config.model.vocab_size // by_vocab)
    limit = config.train.loss_chunk_tokens or automatic
    fitting = (n for n in range(1, length + 1) if length % n == 0 and rows * length / n <= limit)
    return next(fitting, length)
