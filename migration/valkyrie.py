# SPDX-License-Identifier: Apache-2.0
"""The functions of the Valkyrie guide: process start-up, mesh, model configuration, train step.

jax is only imported inside functions, because `setup_multi_host_environment` sets variables that jax reads when it is
imported. src/ has the modules that the guide imports them from.
"""

import atexit
import dataclasses
import functools
import logging
import math
import os
import pathlib
import sys
from collections.abc import Mapping

from ml_collections import ConfigDict

from cluster import processes, startup
from configs import llama2_7b
from configs.errors import ConfigError
from migration import guides
from settings import loading, validation
from settings.resolving import environment_mesh

FILE = "configs/tpu_v4_32.yaml"
JOIN_SECONDS = 300
EARLIER_MESH = (4, 4, 2)  # data, model, fsdp of 32 chips; other numbers of chips get the nearest shape
MAX_SEQ_LEN = 2048  # the guide's default; its others are those of configs/llama2_7b.py
KEYS = guides.Keys(
    renamed=guides.COMMON | {
        "model.max_seq_len": "model.max_length", "model.dropout_rate": "model.dropout",
        "training.batch_size": "train.global_batch",
        "training.gradient_accumulation_steps": "train.gradient_accumulation",
    },
    fixed={
        "model.use_flash_attention": (True, "on a TPU the kernel is always used where it supports the shapes"),
        "model.use_bias": (False, "set config.model.biases"),
        "model.attention_dropout": (0.0, "dropout_rate drops parts of embeddings and sublayers, not of scores"),
        "model.rope_scaling": (None, "set config.model.rope_scaling and rope_factor"),
        "model.use_mamba": (False, "Torus has no state-space layers"),
        "model.use_s5": (False, "Torus has no state-space layers"),
        "step.use_2d_sharding": (True, "the mesh determines how weights are sharded; set mesh.model or mesh.fsdp to 1"),
        "step.use_3d_mesh": (True, "the mesh determines the number of axes; pass another mesh"),
    },
    noted={"tpu.mesh_config": "", "tpu.axis_names": ""},
)  # fmt: skip


def setup_multi_host_environment() -> dict:
    """Join the other processes of the run, if any; call it before jax is used. A second call changes nothing.

    Returns:
      process_index, process_count, local_devices, global_devices (numbers), coordinator ("host:port", "" when alone).

    Raises:
      ConfigError: variables that place a process contradict each other, or one is missing.
      RunError: not all processes joined in time; names those that are late.
    """
    coordinator = _join()
    import jax

    return {
        "process_index": processes.index(),
        "process_count": processes.count(),
        "local_devices": jax.local_device_count(),
        "global_devices": jax.device_count(),
        "coordinator": coordinator,
    }


def setup_tpu_mesh(device_count: int = 32, use_global: bool = True, validate: bool = True):
    """Return the mesh of TPU_MESH_CONFIG and TPU_AXIS_NAMES, else one of `device_count` like (4, 4, 2); all axes.

    Args:
      device_count: used if TPU_MESH_CONFIG is not set; JAX shows a chip as one device, so a v4-32 has 16.
      use_global: use the devices of all processes, else only those of this one.
      validate: the mesh has to use every device; else it uses the first ones.

    Raises:
      ConfigError: the number of devices does not fit; says what would fit.
    """
    import jax

    from parallelism.mesh import make_mesh

    devices = jax.devices() if use_global else jax.local_devices()
    default = ",".join(map(str, validation.nearest_shape(EARLIER_MESH, device_count)))
    environment = os.environ if os.environ.get("TPU_MESH_CONFIG") else {"TPU_MESH_CONFIG": default}
    loaded = loading.load("configs/base.py", "", {}, environment)
    needed = math.prod(loaded.environment_mesh.values())
    validation.resolve_mesh(loaded.config, len(devices) if validate else min(needed, len(devices)), loaded)
    axes = {axis: loaded.config.mesh[axis] for axis in loaded.config.layout.axis_order.split(",")}
    return make_mesh(axes, devices[:needed])


def ValkyrieConfig(**sizes) -> ConfigDict:
    """Return a configuration of Torus: that of configs/llama2_7b.py with these sizes, trained at its full length.

    Args:
      sizes: vocab_size (32,000), hidden_size (4,096), num_layers (32), num_heads (32), intermediate_size (11,008),
        max_seq_len (2,048), dropout_rate (0), rope_theta (10,000); and the names of KEYS.fixed with their one value.

    Raises:
      ConfigError: Torus does not support an argument, or the sizes are inconsistent.
    """
    return configuration({"model": sizes}, "ValkyrieConfig")


def configuration(given: Mapping, source: str) -> ConfigDict:
    """Return the configuration of Torus that sections of KEYS mean; `source` begins error messages."""
    ours = KEYS.ours(KEYS.read({"model": {"max_seq_len": MAX_SEQ_LEN}}, source) | KEYS.read(given, source))
    ours = {"train.sequence_length": ours["model.max_length"]} | ours
    if "model.num_heads" in ours:
        ours = {"model.num_kv_heads": ours["model.num_heads"]} | ours
    return guides.configured(llama2_7b.get_config(), ours, source)


@dataclasses.dataclass(frozen=True)
class ValkyrieModel:
    """The model of a configuration, for `create_train_step`; its parameters exist from `TrainStep.init` on."""

    config: ConfigDict


@dataclasses.dataclass(frozen=True)
class TrainStep:
    """step(state, batch) -> (state, metrics) of `run`; the input state is donated."""

    run: object

    def init(self):
        """Return the first state, on the devices."""
        with self._context():
            return self.run.init()

    def __call__(self, state, batch: dict) -> tuple:
        """Take a batch of int32 [global_batch, length] arrays: tokens, targets, segments and positions."""
        import jax

        batch = {name: jax.device_put(array, self.run.abstract_batch[name].sharding) for name, array in batch.items()}
        with self._context():
            return self.run.train_step(state, batch)

    def _context(self):
        from parallelism.mesh import mesh_context

        return mesh_context(self.run.mesh)


def create_train_step(
    model="decoder_lm", optimizer="adamw", *, config: ConfigDict, mesh, mixed_precision: bool = True,
    use_2d_sharding: bool = True, use_3d_mesh: bool = True,
) -> TrainStep:  # fmt: skip
    """Return the train step of a configuration on a mesh; `config` is updated to the trained configuration.

    Args:
      model: a `ValkyrieModel` of `config`, or the value of config.model.name.
      optimizer: an optax.GradientTransformation, which is used as it is; or the value of config.optimizer.name, for
        the optimizer of config.optimizer, with its schedule, clipping and decay.
      config: as `ValkyrieConfig` returns it.
      mesh: as `setup_tpu_mesh` returns it.
      mixed_precision: compute in bfloat16; parameters and moments are float32 either way.

    Raises:
      ConfigError: an argument is another object, or the mesh does not divide a size.
    """
    from core import assembly

    KEYS.read({"step": {"use_2d_sharding": use_2d_sharding, "use_3d_mesh": use_3d_mesh}}, "create_train_step")
    config.model.update(name=_name_of(model, config), dtype="bfloat16" if mixed_precision else "float32")
    if isinstance(optimizer, str):
        config.optimizer.name = optimizer
    config.mesh.update(dict(mesh.shape))
    config.layout.axis_order = ",".join(mesh.axis_names)
    validation.validate(config, mesh.size)
    devices = list(mesh.devices.flat)
    if isinstance(optimizer, str):
        return TrainStep(assembly.assemble(config, devices=devices))
    from migration import valkyrie_optimizer

    return TrainStep(valkyrie_optimizer.assemble(config, devices, optimizer))


def simulate_without_tpu() -> None:
    """Where JAX_PLATFORMS=tpu, as the guide sets it, and there is none: simulate the devices of TPU_MESH_CONFIG."""
    if os.environ.get("JAX_PLATFORMS") != "tpu" or not os.environ.get("TPU_MESH_CONFIG"):
        return
    del os.environ["JAX_PLATFORMS"]
    found = startup.attached_accelerator()
    os.environ["JAX_PLATFORMS"] = "tpu" if found == "tpu" else "cpu"
    if found != "tpu":
        print("Note: JAX_PLATFORMS=tpu, but this machine has no TPU; its devices are simulated", file=sys.stderr)


def log_to_tmp() -> None:
    """Append the log of this process to /tmp/training.log, or that of TMPDIR; if that fails, say so and go on."""
    path = pathlib.Path(os.environ.get("TMPDIR") or "/tmp") / "training.log"
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # no link or pipe of another user
    try:
        handler = logging.StreamHandler(os.fdopen(os.open(path, how, 0o644), "a"))
    except OSError as error:
        print(f"Note: {path} is not written ({error.strerror}); the run's folder has logs", file=sys.stderr)
        return
    handler.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger("torus").addHandler(handler)


@functools.cache
def _join() -> str:
    """Choose the platform, join the group that the environment names, and return its coordinator."""
    simulate_without_tpu()
    accelerator = guides.choose_platform()
    group = processes.find(os.environ, accelerator, JOIN_SECONDS)
    if accelerator == "cpu":
        startup.simulate(math.prod(environment_mesh(os.environ).values() or [0]), group.count if group else 1)
    if group is None:
        return ""
    processes.start(group, JOIN_SECONDS, _end)
    atexit.register(_part)
    return f"{group.host}:{group.port}"


def _part() -> None:
    """Wait until the other processes are done; after an exception notify them, so that they end too."""
    error = vars(sys).get("last_value")  # set once an exception has ended the program
    if error is None:
        processes.leave()
    else:
        processes.fail(f"{type(error).__name__}: {error}", 1)


def _end(line: str, status: int) -> None:
    """End this process with the message and status of another one of the group."""
    print(line, file=sys.stderr, flush=True)
    os._exit(status)  # called from a thread, because the main thread may hang in a collective


def _name_of(model, config: ConfigDict) -> str:
    if isinstance(model, str):
        return model
    if not isinstance(model, ValkyrieModel):
        kind = type(model).__name__
        raise ConfigError(f"model={kind} is not made here; give ValkyrieModel(config) of src.model.config, or a name")
    if model.config.model != config.model:
        raise ConfigError("model was made with a configuration of other sizes than config; use the same one for both")
    return config.model.name
