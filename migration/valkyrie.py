# SPDX-License-Identifier: Apache-2.0
"""The functions and the command of the Valkyrie guide: process start-up, mesh, model, train step, train.py with YAML.

jax is only imported inside functions, because `setup_multi_host_environment` sets variables that jax reads when it is
imported. src/ has the modules that the guide imports them from.
"""

import dataclasses
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
from core import joining
from migration import guides
from settings import loading, validation

FILE = "configs/tpu_v4_32.yaml"
EARLIER_MESH = (4, 4, 2)  # data, model, fsdp of 32 chips; other numbers of chips get the nearest shape
TPU = {"tpu.mesh_config": "TPU_MESH_CONFIG", "tpu.axis_names": "TPU_AXIS_NAMES"}
MAX_SEQ_LEN = 2048  # the guide's default; its others are those of configs/llama2_7b.py
KEYS = guides.Keys(
    renamed=guides.COMMON | {
        "model.dropout_rate": "model.dropout", "training.batch_size": "train.global_batch",
        "training.gradient_accumulation_steps": "train.gradient_accumulation",
    },
    fixed={
        "model.use_flash_attention": (True, "on a TPU the kernel is always used where it supports the shapes"),
        "model.attention_dropout": (0.0, "dropout_rate drops parts of embeddings and sublayers, not of scores"),
        "model.use_mamba": (False, "Torus has no state-space layers"),
        "model.use_s5": (False, "Torus has no state-space layers"),
        "step.use_2d_sharding": (True, "the mesh determines how weights are sharded; set mesh.model or mesh.fsdp to 1"),
        "step.use_3d_mesh": (True, "the mesh determines the number of axes; pass another mesh"),
    },
    noted=dict.fromkeys(TPU, ""),
)  # fmt: skip


def setup_multi_host_environment() -> dict:
    """Join the other processes of the run, as core/joining.py does; call it before jax is used.

    Returns numbers of this process, of processes and of devices, and "coordinator": "host:port", "" when alone.
    """
    simulate_without_tpu()
    coordinator = joining.join()
    import jax

    return {
        "process_index": processes.index(), "process_count": processes.count(), "coordinator": coordinator,
        "local_devices": jax.local_device_count(), "global_devices": jax.device_count(),
    }  # fmt: skip


def setup_tpu_mesh(device_count: int = 32, use_global: bool = True, validate: bool = True):
    """Return the mesh of TPU_MESH_CONFIG, else one like (4, 4, 2); ConfigError, with what would fit, if none fits.

    Args:
      device_count: used if TPU_MESH_CONFIG is not set; JAX shows a chip as one device, so a v4-32 has 16.
      use_global: use the devices of all processes, else only those of this one.
      validate: the mesh has to use every device; else it uses the first ones.
    """
    import jax

    from parallelism.mesh import make_mesh

    if device_count < 1:
        raise ConfigError(f"device_count={device_count} must be 1 or more")
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
    """
    return configuration({"model": sizes}, "ValkyrieConfig")


def configuration(given: Mapping, source: str) -> ConfigDict:
    """Return the configuration of Torus that sections of KEYS mean; `source` begins error messages."""
    ours = {"model.max_length": MAX_SEQ_LEN} | KEYS.ours(KEYS.read(given, source))
    ours = {"train.sequence_length": ours["model.max_length"]} | ours
    if "model.num_heads" in ours:
        ours = {"model.num_kv_heads": ours["model.num_heads"]} | ours
    return guides.configured(llama2_7b.get_config(), ours, source)


@dataclasses.dataclass(frozen=True)
class ValkyrieModel:
    """The model of a configuration, for `create_train_step`; its parameters exist from `init` of the step on."""

    config: ConfigDict


def create_train_step(
    model="decoder_lm", optimizer="adamw", *, config: ConfigDict, mesh, mixed_precision: bool = True,
    use_2d_sharding: bool = True, use_3d_mesh: bool = True,
):  # fmt: skip
    """Return the core/stepping.py: Steps of a configuration on a mesh; `config` is updated to what is trained.

    Args:
      model: a `ValkyrieModel` of `config`, or the value of config.model.name.
      optimizer: an optax.GradientTransformation, which is used as it is; or the value of config.optimizer.name, for
        the optimizer of config.optimizer, with its schedule, clipping and decay.
      config: as `ValkyrieConfig` returns it.
      mesh: as `setup_tpu_mesh` returns it.
      mixed_precision: compute in bfloat16; parameters and moments are float32 either way.

    Raises ConfigError if something does not fit; then `config` is as it was.
    """
    import jax
    import optax

    from core import assembly, stepping

    KEYS.read({"step": {"use_2d_sharding": use_2d_sharding, "use_3d_mesh": use_3d_mesh}}, "create_train_step")
    for name, given, kind in (("model", model, ValkyrieModel), ("optimizer", optimizer, optax.GradientTransformation)):
        if not isinstance(given, str | kind):
            raise ConfigError(f"{name}={type(given).__name__} is not supported: give a {kind.__name__}, or a name")
    for name, given, kind, maker in (
        ("config", config, ConfigDict, ValkyrieConfig), ("mesh", mesh, jax.sharding.Mesh, setup_tpu_mesh),
    ):  # fmt: skip
        if not isinstance(given, kind):
            raise ConfigError(f"{name}={type(given).__name__} is not supported: give what {maker.__name__} returned")
    trained = config.copy_and_resolve_references()
    if isinstance(model, str):
        trained.model.name = model
    elif model.config.model != config.model:
        raise ConfigError("model was made with a configuration of other sizes than config; use the same one for both")
    if isinstance(optimizer, str):
        trained.optimizer.name, optimizer = optimizer, None
    trained.model.dtype = "bfloat16" if mixed_precision else "float32"
    trained.mesh.update({axis: size for axis, size in mesh.shape.items() if axis in trained.mesh})
    trained.layout.axis_order = ",".join(mesh.axis_names)
    validation.validate(trained, mesh.size)
    steps = stepping.Steps(assembly.assemble(trained, devices=list(mesh.devices.flat), optimizer=optimizer))
    config.update(trained)
    return steps


def simulate_without_tpu() -> None:
    """Simulate the devices of TPU_MESH_CONFIG if JAX_PLATFORMS=tpu, as in the guide, and there is no TPU."""
    if os.environ.get("JAX_PLATFORMS") == "tpu" and os.environ.get("TPU_MESH_CONFIG"):
        try:
            startup.attached_accelerator()
        except ConfigError:
            os.environ["JAX_PLATFORMS"] = "cpu"
            print("Note: JAX_PLATFORMS=tpu, but this machine has no TPU; its devices are simulated", file=sys.stderr)


def log_to_tmp() -> None:
    """Append the log of this process to training.log in /tmp or TMPDIR; if that fails, print so and continue."""
    path = pathlib.Path(os.environ.get("TMPDIR") or "/tmp") / "training.log"
    how = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK  # no link or pipe of another user
    try:
        handler = logging.StreamHandler(os.fdopen(os.open(path, how, 0o644), "a"))
    except OSError as error:
        print(f"Note: {path} is not written ({error.strerror}); the run's folder has logs", file=sys.stderr)
        return
    handler.setFormatter(logging.Formatter("%(asctime)s - %(levelname)s - %(message)s", "%Y-%m-%d %H:%M:%S"))
    logging.getLogger("torus").addHandler(handler)


def arguments(words: list[str]) -> list[str]:
    """Return the arguments of train.py; a YAML file decides on the mesh if nothing else does."""
    file, _ = guides.take(words, "--config")
    if file.endswith(guides.SUFFIXES):
        given = KEYS.read(guides.read_file(file, FILE), file)
        is_chosen = guides.take(words, "--topology")[0] or os.environ.get("TPU_MESH_CONFIG")
        for key in () if is_chosen else TPU.keys() & given.keys():
            value = given[key]
            os.environ[TPU[key]] = ",".join(map(str, value)) if isinstance(value, list) else str(value)
    simulate_without_tpu()
    return words
