# SPDX-License-Identifier: Apache-2.0
"""Puts a run together from a configuration: mesh, model, objective, optimizer, steps, abstract state.

The one file that knows all lower rooms. What is rehearsed, proved or trained is what `assemble` returns.
"""

import dataclasses
import importlib
import inspect
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from configs.base import MESH_AXES, ConfigError
from configs.loading import nearest
from layers.axes import declared_axes
from parallelism import axis_rules
from parallelism.mesh import make_mesh, mesh_context
from training import optimizers, schedules, throughput
from training.state import TrainState
from training.step import make_eval_step, make_train_step

CPU_MICROBATCH_FLOPS = 2e12  # about 10 s on two CPU cores
CPU_UNROLLED_LAYERS = 12  # deeper stacks take longer to compile than unrolling saves
LOSS_CHUNK_BYTES = 64 * 2**20  # of float32 logits per device


@dataclasses.dataclass(frozen=True)
class Run:
    """Everything that a run is made of; nothing is allocated or compiled yet.

    `abstract_state` and `abstract_batch` carry shapes, types and layouts. `train_step` and `eval_step` are
    jitted; they, `init` and `model` are used inside `mesh_context(run.mesh)`. A run is `slow` where a CPU takes
    so long for a step that `assemble` cut it into microbatches.
    """

    config: object
    mesh: jax.sharding.Mesh
    graph: nnx.GraphDef
    init: Callable[[], TrainState]
    train_step: Callable
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

    @property
    def eval_rows(self) -> int:
        """Sequences evaluated at once: a microbatch, so that evaluating fits where training does."""
        return self.config.train.global_batch // self.num_microbatches

    @property
    def flops_per_step(self) -> float:
        """Model FLOPs of one update."""
        return self.flops_per_token * self.config.train.global_batch * self.config.train.sequence_length


def assemble(config, *, devices=None, on_microbatch: Callable | None = None) -> Run:
    """Return the run that a validated configuration with a resolved mesh describes.

    Args:
      config: with `train.steps` set.
      devices: of the mesh; default all.
      on_microbatch: progress within a step, see training/step.py; wired where steps are slow.

    Raises:
      ConfigError: an unknown name of an optimizer or schedule, or a dimension that its mesh axis does not divide.
    """
    mesh = make_mesh({axis: config.mesh[axis] for axis in MESH_AXES}, devices)
    objective = importlib.import_module(f"objectives.{config.train.objective}")
    flops_per_token = _model_module(config).flops_per_token(config.model, config.train.sequence_length)
    num_microbatches = config.train.gradient_accumulation or _automatic_microbatches(config, flops_per_token, mesh)
    slow = num_microbatches > 1 and not config.train.gradient_accumulation
    make_model, graph, abstract_model = _model(config, mesh)
    schedule = _named(schedules, "optimizer.schedule", config)(config.optimizer, config.train.steps)
    optimizer = _named(optimizers, "optimizer.name", config)(config.optimizer, schedule)
    optimizer = optimizers.clipped(optimizer, config.optimizer.clip_norm)
    loss = objective.make_loss(num_chunks=_loss_chunks(config, num_microbatches), z_loss=config.train.z_loss)
    batch = _abstract_batch(config, mesh)

    def make_state():
        params = nnx.to_pure_dict(nnx.state(make_model(nnx.Rngs(config.train.seed))))
        return TrainState(
            step=jnp.int32(0), examples=jnp.uint32(0), params=params, optimizer=optimizer.init(params),
            carry=objective.init_carry(batch),
        )  # fmt: skip

    shardings = _state_shardings(abstract_model, optimizer, objective.init_carry, batch, mesh)
    with mesh_context(mesh):
        abstract_state = jax.tree.map(_with_sharding, jax.eval_shape(make_state), shardings)
    step = make_train_step(
        graph, loss, optimizer, schedule, num_microbatches=num_microbatches, seed=config.train.seed,
        on_microbatch=on_microbatch if slow else None,
    )  # fmt: skip
    return Run(
        config=config,
        mesh=mesh,
        graph=graph,
        init=jax.jit(make_state, out_shardings=shardings),
        train_step=jax.jit(step, donate_argnums=0, out_shardings=(shardings, None)),
        eval_step=jax.jit(make_eval_step(graph, loss, objective.init_carry)),
        abstract_state=abstract_state,
        abstract_batch=batch,
        batch_shards=_batch_shards(config),
        num_microbatches=num_microbatches,
        slow=slow,
        num_parameters=_num_parameters(abstract_model),
        flops_per_token=flops_per_token,
    )


def check(config) -> int:
    """Return the number of parameters of the model that a configuration describes; allocates nothing.

    Raises:
      ConfigError: as in `assemble`, before any data is read.
    """
    mesh = make_mesh({axis: config.mesh[axis] for axis in MESH_AXES})
    _, _, abstract_model = _model(config, mesh)
    axis_rules.weight_shardings(declared_axes(abstract_model), mesh)
    _named(schedules, "optimizer.schedule", config)
    _named(optimizers, "optimizer.name", config)
    return _num_parameters(abstract_model)


def _num_parameters(abstract_model: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(abstract_model))


def _model_module(config):
    return importlib.import_module(f"models.{config.model.name}")


def _model(config, mesh) -> tuple[Callable, nnx.GraphDef, nnx.State]:
    """Return (rngs -> model, the model without its parameters, the shapes of those)."""
    on_cpu = _is_cpu(mesh)

    def make_model(rngs):
        dtype, scan = _dtype(config, on_cpu), _scan(config, on_cpu)
        return _model_module(config).make(config.model, dtype=dtype, scan=scan, rngs=rngs)

    # On one device, where any shape is divisible: what the mesh does not divide is told by axis_rules, by name.
    with mesh_context(make_mesh(dict.fromkeys(MESH_AXES, 1), mesh.devices.flat[:1])):
        graph, state = nnx.split(nnx.eval_shape(lambda: make_model(nnx.Rngs(0))))
    return make_model, graph, state


def _is_cpu(mesh) -> bool:
    return mesh.devices.flat[0].platform == "cpu"


def _with_sharding(shape, sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _abstract_batch(config, mesh) -> dict:
    shape = (config.train.global_batch, config.train.sequence_length)
    spec = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=axis_rules.batch_sharding(mesh))
    return dict.fromkeys(("tokens", "targets", "segments", "positions"), spec)


def _state_shardings(abstract_model, optimizer, init_carry: Callable, batch: dict, mesh) -> TrainState:
    """Moments lie as their parameters do, counters everywhere, the carry's rows as the batch's."""
    replicated = NamedSharding(mesh, PartitionSpec())
    rows = NamedSharding(mesh, PartitionSpec(axis_rules.BATCH_AXES))
    weights = axis_rules.weight_shardings(declared_axes(abstract_model), mesh)
    moments = optax.tree.map_params(
        optimizer, lambda _, sharding: sharding, jax.eval_shape(optimizer.init, nnx.to_pure_dict(abstract_model)),
        weights, transform_non_params=lambda _: replicated,
    )  # fmt: skip
    carry = jax.tree.map(lambda _: rows, jax.eval_shape(lambda: init_carry(batch)))
    return TrainState(step=replicated, examples=replicated, params=weights, optimizer=moments, carry=carry)


def _named(module, key: str, config) -> Callable:
    """Return the public function of `module` that a configuration key names."""
    section, leaf = key.split(".")
    chosen = config[section][leaf]
    functions = inspect.getmembers(module, inspect.isfunction)
    functions = {name: f for name, f in functions if next(iter(inspect.signature(f).parameters)) == "config"}
    if chosen not in functions:
        near = nearest(chosen, functions)
        raise ConfigError(f"{key}={chosen} is unknown; nearest: {near} (all: {', '.join(functions)})")
    return functions[chosen]


def _dtype(config, on_cpu: bool):
    slow_bfloat16 = on_cpu and not throughput.has_native_bfloat16()
    automatic = "float32" if slow_bfloat16 else "bfloat16"
    return jnp.dtype(automatic if config.model.dtype == "auto" else config.model.dtype)


def _scan(config, on_cpu: bool) -> bool:
    if config.model.layer_loop == "auto":
        # XLA's CPU backend drops the barriers that keep rematerialised work late: unrolled, remat would save nothing.
        return not on_cpu or config.model.num_layers > CPU_UNROLLED_LAYERS or config.model.remat != "none"
    return config.model.layer_loop == "scan"


def _batch_shards(config) -> int:
    return math.prod(config.mesh[axis] for axis in axis_rules.BATCH_AXES)


def _automatic_microbatches(config, flops_per_token: float, mesh) -> int:
    """1; on CPU the fewest that keep a microbatch under CPU_MICROBATCH_FLOPS, or as small as the mesh allows."""
    rows = config.train.global_batch // _batch_shards(config)
    flops = flops_per_token * config.train.global_batch * config.train.sequence_length
    if not _is_cpu(mesh):
        return 1
    fitting = (m for m in range(1, rows + 1) if rows % m == 0 and flops / m <= CPU_MICROBATCH_FLOPS)
    return next(fitting, rows)


def _loss_chunks(config, num_microbatches: int) -> int:
    """Return the fewest parts of the length whose logits stay within the limit per device."""
    length = config.train.sequence_length // config.mesh.context
    rows = config.train.global_batch // (_batch_shards(config) * num_microbatches)
    automatic = LOSS_CHUNK_BYTES // (4 * config.model.vocab_size // config.mesh.model)
    limit = config.train.loss_chunk_tokens or automatic
    fitting = (n for n in range(1, length + 1) if length % n == 0 and rows * length / n <= limit)
    return next(fitting, length)
