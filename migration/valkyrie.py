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

from ml_collections import ConfigDict

from cluster import processes, startup
from configs import llama2_7b
from configs.errors import ConfigError
from input_pipeline.cache import cache_path
from settings import loading, validation
from settings.resolving import environment_mesh

JOIN_SECONDS = 300
EARLIER_MESH = (4, 4, 2)  # data, model, fsdp of 32 chips; other numbers of chips get the nearest shape
WITHOUT = {  # arguments with one supported value, and the reason
    "use_flash_attention": (True, "on a TPU the kernel is always used where it supports the shapes"),
    "use_bias": (False, "set config.model.biases"),
    "attention_dropout": (0.0, "dropout_rate drops parts of embeddings and sublayers; scores are not dropped"),
    "rope_scaling": (None, "set config.model.rope_scaling and rope_factor"),
    "use_mamba": (False, "Torus has no state-space layers"),
    "use_s5": (False, "Torus has no state-space layers"),
    "use_2d_sharding": (True, "the mesh determines how weights are sharded; set mesh.model or mesh.fsdp to 1"),
    "use_3d_mesh": (True, "the mesh determines the number of axes; pass another mesh"),
}


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


def ValkyrieConfig(
    vocab_size: int = 32000, hidden_size: int = 4096, num_layers: int = 32, num_heads: int = 32,
    intermediate_size: int = 11008, max_seq_len: int = 2048, use_flash_attention: bool = True,
    dropout_rate: float = 0.0, rope_theta: float = 10_000.0, rope_scaling: None = None, use_bias: bool = False,
    attention_dropout: float = 0.0, use_mamba: bool = False, use_s5: bool = False,
) -> ConfigDict:  # fmt: skip
    """Return a configuration of Torus: that of configs/llama2_7b.py with these sizes, trained at its full length.

    Raises:
      ConfigError: Torus does not support an argument, or the sizes are inconsistent.
    """
    _check_fixed(
        use_flash_attention=use_flash_attention, rope_scaling=rope_scaling, use_bias=use_bias,
        attention_dropout=attention_dropout, use_mamba=use_mamba, use_s5=use_s5,
    )  # fmt: skip
    config = llama2_7b.get_config()
    config.model.update(
        vocab_size=vocab_size, embed_dim=hidden_size, num_layers=num_layers, num_heads=num_heads,
        num_kv_heads=num_heads, mlp_dim=intermediate_size, max_length=max_seq_len, dropout=dropout_rate,
        rope_theta=rope_theta,
    )  # fmt: skip
    config.train.sequence_length = max_seq_len
    validation.check_keys(config)
    return config


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

    _check_fixed(use_2d_sharding=use_2d_sharding, use_3d_mesh=use_3d_mesh)
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
    accelerator = startup.attached_accelerator()
    startup.choose_platform(None, accelerator, cache_path(""))
    if "jax" in sys.modules:  # it read the variable when it was imported, as optax does
        sys.modules["jax"].config.update("jax_platforms", os.environ.get("JAX_PLATFORMS") or None)
    group = processes.find(os.environ, accelerator, JOIN_SECONDS)
    if accelerator == "cpu":
        wanted = environment_mesh(os.environ).values()
        startup.simulate(math.prod(wanted) if wanted else 0, group.count if group else 1)
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


def _check_fixed(**given) -> None:
    for name, value in given.items():
        only, why = WITHOUT[name]
        if value != only:
            raise ConfigError(f"{name}={value} is not supported: {why}")


def _name_of(model, config: ConfigDict) -> str:
    if isinstance(model, str):
        return model
    if not isinstance(model, ValkyrieModel):
        kind = type(model).__name__
        raise ConfigError(f"model={kind} is not made here; give ValkyrieModel(config) of src.model.config, or a name")
    if model.config.model != config.model:
        raise ConfigError("model was made with a configuration of other sizes than config; use the same one for both")
    return config.model.name
