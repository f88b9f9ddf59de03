# SPDX-License-Identifier: Apache-2.0
"""What makes a configuration consistent; checked before any device or file is touched."""

import ast
import math
import pathlib
from collections.abc import Iterator

from ml_collections import ConfigDict

from configs import architecture, fine_tuning, heldout, layouts, preference, ramp, topologies, unread
from configs.architecture import multiples_text
from configs.base import BATCH_AXES, MESH_AXES, ConfigError, batch_shards, by_device
from configs.loading import ROOT, Loaded, assign, one_of

CHOICES = {
    "model.remat": ("none", "dots", "mlp", "up", "attention", "query", "attended", "full"),
    "model.dtype": ("auto", "bfloat16", "float32"),
    "model.quantization": ("none", "int8", "fp8"),
    "model.attention": ("auto", "reference"),
    "model.layer_loop": ("auto", "scan", "unroll"),
    "model.rope_scaling": ("none", "linear", "llama3", "yarn"),
    "model.activation": ("silu", "gelu_tanh"),
    "model.biases": ("none", "qkv", "all"),
    "model.mixer": ("attention", "mlp"),
    "model.positions": ("rope", "learned", "sinusoidal", "none"),
    "model.networks": (1, 2),
    "model.router": ("softmax", "sigmoid"),
    "supervision.loss": ("stablemax", "softmax"),
    "optimizer.decayed": ("matrices", "all"),
    "distillation.divergence": ("forward", "reverse"),
    "batch.fit": ("none", "auto"),
    "batch.ramp": ("none", "steps", "noise_scale"),
    "batch.learning_rate": tuple(ramp.RATES),
    "data.bad_documents": ("error", "skip"),
    "data.puzzle_set": ("arc1", "arc2"),
    "train.offload": ("none", "optimizer"),
    "train.sum_dtype": ("auto", "float32"),
    "checkpoint.restore": ("read", "broadcast"),
}
MODULES = {"model.name": "models", "train.objective": "objectives"}  # in these rooms
FUNCTIONS = {"optimizer.name": "training/optimizers.py", "optimizer.schedule": "training/schedules.py"}
POSITIVE = (
    "model.num_layers", "model.embed_dim", "model.num_heads", "model.num_kv_heads", "model.mlp_dim",
    "model.vocab_size", "model.max_length", "train.global_batch", "train.sequence_length", "checkpoint.keep",
    "evaluation.batches", "train.log_every", "train.bad_steps",
    "data.puzzle_size", "data.puzzle_count", "data.puzzle_heldout",
    "optimizer.learning_rate", "optimizer.epsilon", "model.norm_epsilon", "model.high_cycles",
    "model.num_puzzles", "supervision.max_steps", "model.experts_per_token", "model.gate_scale",
    "batch.increase_step", "distillation.temperature", "lora.alpha", "preference.beta",
)  # fmt: skip
FRACTIONS = ("optimizer.final_fraction", "optimizer.cooldown_fraction", "supervision.exploration")
LESS_THAN_1 = ("optimizer.beta1", "optimizer.beta2", "optimizer.ema_decay", "model.dropout")
NOT_NEGATIVE = (
    "model.head_dim", "model.logit_soft_cap", "model.attention_soft_cap", "model.sliding_window", "model.global_every",
    "model.num_experts", "model.shared_experts", "model.expert_capacity", "optimizer.bias_step",
    "train.balance_loss", "train.router_z_loss",
    "model.embed_scale", "model.query_scalar", "model.local_rope_theta",
    "model.low_cycles", "model.low_latents", "model.puzzle_dim", "model.prefix_length",
    "optimizer.table_learning_rate", "optimizer.table_weight_decay", "evaluation.every_epochs",
    "model.rope_original_length", "model.mup_base_dim", "data.readers", "data.prefetch",
    "data.puzzle_augmentations", "data.puzzle_min_difficulty", "data.puzzle_clues",
    "optimizer.warmup_steps", "optimizer.weight_decay", "optimizer.clip_norm", "train.steps", "train.tokens",
    "train.epochs", "train.gradient_accumulation", "train.z_loss", "train.loss_chunk_tokens",
    "train.eval_every", "train.save_every", "train.hang_seconds", "evaluation.sample_tokens",
    "train.spike_deviations", "train.roll_backs", "train.recheck_every", "checkpoint.keep_every",
    "checkpoint.keep_best", "batch.memory_gib", "batch.first", "evaluation.chunk_tokens", "lora.rank",
    "distillation.soft_weight", "distillation.hard_weight", "distillation.hidden_weight",
)  # fmt: skip

PUZZLES = ("sudoku", "maze", "arc", "puzzles")  # of data.source

RANGES = (  # what is right, the rule in words, and where it holds
    (lambda value: 0 < value < math.inf, "be greater than 0", POSITIVE),
    (lambda value: 0 <= value < math.inf, "be 0 or greater", NOT_NEGATIVE),
    (lambda value: 1 < value < math.inf, "be greater than 1", ("model.rope_theta", "batch.increase_factor")),
    (lambda value: 0 <= value <= 1, "lie between 0 and 1", FRACTIONS),
    (lambda value: 0 <= value < 1, "be 0 or greater and less than 1", LESS_THAN_1),
)


def validate(config: ConfigDict, num_devices: int, loaded: Loaded | None = None) -> None:
    """Raise ConfigError with the key, its value, the rule and what would work; resolve a mesh axis of -1."""
    check_keys(config)
    resolve_mesh(config, num_devices, loaded)
    _check_ramp(config)
    _check_distillation(config)
    for step, on_mesh in layouts.on_each_mesh(config).items():
        with layouts.named(step):
            _check_mesh(on_mesh)
    if loaded:
        unread.check(loaded)


def _check_mesh(config: ConfigDict) -> None:
    _check_batch(config)
    _check_noise_scale(config)
    _check_sums(config)
    architecture.check_recursion(config)
    _check_exchange(config)
    heldout.check(config)


def check_keys(config: ConfigDict) -> None:
    """Raise ConfigError for what is wrong whatever the devices."""
    _check_values(config)
    _check_data(config.data)
    architecture.check(config.model)
    _check_axis_order(config.layout.axis_order)
    layouts.changes(config.layout.changes)
    fine_tuning.check(config)
    preference.check(config)


def changed(config: ConfigDict, keys: dict[str, object], num_devices: int) -> ConfigDict | None:
    """Return a copy of a configuration with other values of some dotted keys; None where it is not consistent."""
    copy = config.copy_and_resolve_references()
    for key, value in keys.items():
        assign(copy, key, value)
    try:
        validate(copy, num_devices)
    except ConfigError:
        return None
    return copy


def _value(config: ConfigDict, key: str):
    section, name = key.split(".")
    return config[section][name]


def _check_values(config: ConfigDict) -> None:
    for key, choices in CHOICES.items():
        one_of(key, _value(config, key), choices)
    for key, room in MODULES.items():
        modules = sorted(p.stem for p in pathlib.Path(ROOT / room).glob("*.py") if p.stem != "__init__")
        one_of(key, _value(config, key), modules)
    for key, file in FUNCTIONS.items():
        one_of(key, _value(config, key), functions_of_config(ROOT / file))
    for is_right, rule, keys in RANGES:
        for key in keys:
            if not is_right(_value(config, key)):
                raise ConfigError(f"{key}={_value(config, key)} must {rule}")
    if not 0 <= config.train.seed < 2**32:
        raise ConfigError(f"train.seed={config.train.seed} must be 0 or greater and less than 2^32")
    train = config.train
    if sum(length > 0 for length in (train.steps, train.tokens, train.epochs)) != 1:
        raise ConfigError("exactly one of train.steps, train.tokens, train.epochs must be greater than 0")


def functions_of_config(file: pathlib.Path) -> list[str]:
    """Return the public functions of a file that take `config` first, without importing it."""
    functions = (node for node in ast.parse(file.read_text()).body if isinstance(node, ast.FunctionDef))
    return sorted(f.name for f in functions if f.name[0] != "_" and f.args.args and f.args.args[0].arg == "config")


def _check_data(data: ConfigDict) -> None:
    for key in ("path", "mixture", "validation_path"):
        if data[key] and data.source in ("python", "synthetic"):
            raise ConfigError(f"data.{key}={data[key]} is not read by data.source={data.source}; use auto or text")
        if key != "path" and data[key] and data.source in PUZZLES:
            raise ConfigError(f"data.{key}={data[key]} is not read by data.source={data.source}; use data.path")
    if data.path and data.mixture:
        both = f"data.path={data.path} and data.mixture={data.mixture} are both given"
        raise ConfigError(f"{both}; empty one of them, as with --config.data.mixture=")
    if not 0 < data.holdout_fraction < 1:
        raise ConfigError(f"data.holdout_fraction={data.holdout_fraction} must lie between 0 and 1")


def _check_axis_order(order: str) -> None:
    first, *others = order.split(",")
    if first != MESH_AXES[0] or sorted(others) != sorted(MESH_AXES[1:]):
        raise ConfigError(
            f"layout.axis_order={order} must be {MESH_AXES[0]} and then {', '.join(MESH_AXES[1:])} in any order, "
            f"each once and without spaces, as in {','.join(MESH_AXES)}"
        )


def resolve_mesh(config: ConfigDict, num_devices: int, loaded: Loaded | None = None) -> None:
    """Replace the -1 in config.mesh by what the other axes leave; its product must be the device count.

    So must those of the meshes that layout.changes names.

    Args:
      loaded: where the configuration is from, for an error to say so.
    """
    mesh = config.mesh
    free = [axis for axis, size in mesh.items() if size == -1]
    wrong = [axis for axis, size in mesh.items() if size < 1 and size != -1]
    if wrong:
        raise ConfigError(f"mesh.{wrong[0]}={mesh[wrong[0]]} must be 1 or greater, or -1 for all that is left")
    if len(free) > 1:
        raise ConfigError(f"mesh.{free[0]} and mesh.{free[1]} are both -1; only one axis can take what is left")
    product = math.prod(size for size in mesh.values() if size != -1)
    sizes = " * ".join(f"{axis}={size}" for axis, size in mesh.items() if size != 1)
    if product > num_devices or num_devices % product or (not free and product != num_devices):
        if loaded and loaded.environment_mesh and not any(f"mesh.{axis}" in loaded.typed for axis in MESH_AXES):
            raise ConfigError(_environment_misfit(loaded, num_devices))
        raise ConfigError(
            f"mesh {sizes} needs {product} devices{' or a multiple' if free else ''}, there are {num_devices}; "
            f"set the axes to a product of {num_devices}, one of them to -1, or give --topology"
        )
    if free:
        mesh[free[0]] = num_devices // product
    layouts.check(config)


def _environment_misfit(loaded: Loaded, num_devices: int) -> str:
    """Say what TPU_MESH_CONFIG needs, which slice has as much, and what would fit these devices."""
    sizes, topology, reasons = tuple(loaded.environment_mesh.values()), loaded.topology, []
    wanted, needed, fits = _shape_text(sizes), math.prod(sizes), _shape_text(nearest_shape(sizes, num_devices))
    if topology and topology.chips == num_devices:
        where, there = topology.name, f"{topology.name} has {num_devices} chips"
        if other := topologies.of_size(topology, needed):
            reasons.append(f"{wanted} is for a {other} ({needed} chips)")
        if needed == topology.cores_per_chip * num_devices:
            reasons.append(f"a {where} has {needed} TensorCores, but JAX shows a chip as one device")
    else:
        where, there = f"{num_devices} devices", f"there are {num_devices}"
        if needed == 2 * num_devices:
            reasons.append("a chip of v4 or v5p has 2 TensorCores, but JAX shows it as one device")
    why = "".join(f"; {reason}" for reason in reasons)
    return f"TPU_MESH_CONFIG={wanted} needs {needed} devices, {there}{why}; on {where} use {fits}"


def nearest_shape(sizes: tuple[int, ...], num_devices: int) -> tuple[int, ...]:
    """Return the mesh of so many devices that is most like `sizes`.

    Axes above 1 stay so where they can; then the factors by which sizes change are small, and of the last axes.
    """

    def unlike(shape: tuple[int, ...]) -> tuple:
        pairs = list(zip(sizes, shape, strict=True))
        factors = [round(abs(math.log(old / new)), 6) for old, new in pairs]
        return sum((old > 1) != (new > 1) for old, new in pairs), round(sum(factors), 6), factors

    return min(_shapes(num_devices, len(sizes)), key=unlike)


def _shapes(num_devices: int, num_axes: int) -> Iterator[tuple[int, ...]]:
    """Yield every tuple of so many numbers whose product is the number of devices."""
    if num_axes == 1:
        yield (num_devices,)
        return
    for size in range(1, num_devices + 1):
        if num_devices % size == 0:
            yield from ((size, *rest) for rest in _shapes(num_devices // size, num_axes - 1))


def _shape_text(sizes: tuple[int, ...]) -> str:
    return ",".join(map(str, sizes))


def _check_batch(config: ConfigDict) -> None:
    train, mesh = config.train, config.mesh
    shards = batch_shards(mesh)
    microbatches = max(1, train.gradient_accumulation)
    if train.global_batch % (shards * microbatches):
        parts = f"{shards} shards (mesh {' * '.join(BATCH_AXES)})"
        parts += f" * {microbatches} microbatches" if microbatches > 1 else ""
        raise ConfigError(
            f"train.global_batch={train.global_batch} is not a multiple of its {parts}; "
            f"use {multiples_text(train.global_batch, shards * microbatches)}"
        )
    if train.sequence_length > config.model.max_length:
        raise ConfigError(
            f"train.sequence_length={train.sequence_length} is longer than model.max_length="
            f"{config.model.max_length}; shorten the one or raise the other"
        )
    if train.sequence_length % mesh.context:
        raise ConfigError(
            f"train.sequence_length={train.sequence_length} is not a multiple of mesh.context={mesh.context}; "
            f"use {multiples_text(train.sequence_length, mesh.context)}"
        )


def _check_exchange(config: ConfigDict) -> None:
    count, mesh = config.model.num_experts, config.mesh
    if count and mesh.context > 1:
        raise ConfigError(f"mesh.context={mesh.context} must be 1 with model.num_experts; use mesh.fsdp")
    if count % (mesh.expert * mesh.model):
        raise ConfigError(
            f"model.num_experts={count} is not a multiple of mesh.expert * mesh.model={mesh.expert * mesh.model}; "
            f"use {multiples_text(count, mesh.expert * mesh.model)}"
        )


def _check_ramp(config: ConfigDict) -> None:
    batch, train = config.batch, config.train
    if batch.fit == "auto" and train.gradient_accumulation:
        raise ConfigError(
            f"train.gradient_accumulation={train.gradient_accumulation} and batch.fit=auto both say how many "
            "microbatches; leave one of them out"
        )
    if batch.ramp == "none" and batch.first:
        raise ConfigError(f"batch.first={batch.first} is not read by batch.ramp=none; set that to steps or noise_scale")
    if batch.ramp == "none":
        return
    if not 1 <= batch.first <= train.global_batch:
        raise ConfigError(
            f"batch.first={batch.first} must lie between 1 and train.global_batch={train.global_batch}, "
            f"to which batch.ramp={batch.ramp} lets it grow"
        )
    if train.objective == "recursive":
        raise ConfigError(f"batch.ramp={batch.ramp} must be none for train.objective=recursive: its rows hold puzzles")
    if config.evaluation.every_epochs:
        raise ConfigError(
            f"evaluation.every_epochs={config.evaluation.every_epochs} is no number of steps with "
            f"batch.ramp={batch.ramp}; use train.eval_every"
        )
    if batch.ramp == "noise_scale" and not train.steps:
        raise ConfigError("batch.ramp=noise_scale says too late how many steps a number of tokens is; use train.steps")


def _check_noise_scale(config: ConfigDict) -> None:
    if ramp.measures_noise(config) and config.batch.fit == "none" and ramp.num_parts(config) < 2:
        raise ConfigError(
            "the noise scale is measured between parts of a batch, of which there has to be more than one: use "
            "mesh.data, or train.gradient_accumulation of at least 2 (and of batch.first at least 2 microbatches)"
        )


def _check_sums(config: ConfigDict) -> None:
    if config.train.sum_dtype != "auto" and math.prod(config.mesh.values()) > 1 and not by_device(config):
        raise ConfigError(
            f"train.sum_dtype={config.train.sum_dtype} needs mesh.context=1 and a train.sequence_length that "
            "mesh.model divides; elsewhere the compiler sums, use auto"
        )


def _check_distillation(config: ConfigDict) -> None:
    keys = config.distillation
    if (config.train.objective == "distillation") != bool(keys.teacher):
        raise ConfigError(
            f"train.objective={config.train.objective} does not go with distillation.teacher={keys.teacher!r}; "
            "distillation has a teacher, the folder of a run, and nothing else has"
        )
    if keys.teacher and not keys.soft_weight + keys.hidden_weight:
        raise ConfigError("distillation.soft_weight=0 and hidden_weight=0 leave the teacher unheard; raise one of them")
