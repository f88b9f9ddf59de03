# SPDX-License-Identifier: Apache-2.0
"""Defaults that depend on the platform: values of keys that are `auto`, or 0 for as many as fit."""

import jax.numpy as jnp

from configs.base import batch_shards
from reporting import throughput
from settings import meta_learning

AMPERE = "8.0"  # compute capability
CPU_MICROBATCH_FLOPS = 2e12  # about 10 s on two CPU cores
UNROLLED_LAYERS = {"cpu": 12, "gpu": 32}  # at most; deeper stacks take longer to compile than unrolling saves
# Limit of float32 logits per device. On CPU this size is fastest. Elsewhere few chunks are best: each chunk adds to the
# head's gradient once more.
LOSS_CHUNK_BYTES = {"cpu": 64 * 2**20, "gpu": 2**30, "tpu": 2**30}


def execution(config, mesh) -> dict:
    """Return how a model is executed: `dtype`, `scan` and `kernel`, arguments of `make` of a file of models/."""
    return {"dtype": dtype(config, mesh), "scan": scan(config, mesh), "kernel": kernel(config, mesh)}


def kernel(config, mesh) -> str:
    """Return the platform whose attention kernels are used where they support the shapes; "" if none are used.

    The GPU kernel needs Triton, which XLA supports from Ampere on (compute capability 8.0).
    """
    capability = getattr(mesh.devices.flat[0], "compute_capability", AMPERE)  # only GPUs have one
    return "" if config.model.attention == "reference" or float(capability) < float(AMPERE) else platform(mesh)


def platform(mesh) -> str:
    """Return the platform of a mesh: cpu, gpu or tpu."""
    return mesh.devices.flat[0].platform


def dtype(config, mesh) -> jnp.dtype:
    """Return the compute type of a model."""
    slow_bfloat16 = platform(mesh) == "cpu" and not throughput.has_native_bfloat16()
    usual = "float32" if slow_bfloat16 else "bfloat16"
    return jnp.dtype(usual if config.model.dtype == "auto" else config.model.dtype)


def scan(config, mesh) -> bool:
    """Return whether to scan over layers; else they are unrolled."""
    model, on = config.model, platform(mesh)
    if model.layer_loop != "auto":
        return model.layer_loop == "scan"
    if model.num_layers > UNROLLED_LAYERS.get(on, 0):
        return True
    # On a GPU a scan copies what each layer keeps for the backward pass. Several GPUs need a scan to all-gather early.
    # XLA's CPU backend drops the barriers that delay recomputation: without a scan, remat would save nothing.
    return mesh.size > 1 if on == "gpu" else model.remat != "none"


def microbatches(config, flops_per_token: float, mesh) -> int:
    """Return the number of microbatches: 1, and on CPU the fewest within CPU_MICROBATCH_FLOPS that the mesh allows."""
    if platform(mesh) != "cpu":
        return 1
    rows = config.train.global_batch // batch_shards(config.mesh)
    flops = flops_per_token * config.train.global_batch * config.train.sequence_length
    counts = [m for m in range(1, rows + 1) if rows % m == 0 and meta_learning.leaves_rows(config, rows // m)] or [1]
    return next((m for m in counts if flops / m <= CPU_MICROBATCH_FLOPS), counts[-1])


def loss_chunks(config, num_microbatches: int, mesh, *, vocab_split: bool) -> int:
    """Return the fewest chunks of the length whose logits stay within the limit per device.

    The axis `model` shards the vocabulary of the logits, or their length.
    """
    by_vocab, by_length = (config.mesh.model, 1) if vocab_split else (1, config.mesh.model)
    length = config.train.sequence_length // (config.mesh.context * by_length)
    rows = config.train.global_batch // (batch_shards(config.mesh) * num_microbatches)
    limit = config.train.loss_chunk_tokens or LOSS_CHUNK_BYTES[platform(mesh)] // (
        4 * config.model.vocab_size // by_vocab
    )
    fitting = (n for n in range(1, length) if length % n == 0 and rows * length / n <= limit)
    return next(fitting, length)
