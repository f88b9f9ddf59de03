# SPDX-License-Identifier: Apache-2.0
"""How fast is a training step of a 1B model on one GPU, relative to its peak and to plain PyTorch?

Times whole updates (forward, backward, AdamW) of configs/llama_1b.py with 8 sequences of 2,048 tokens, without
rematerialization, computed in bfloat16 with weights and moments in float32. If a torch that supports the GPU is
installed, the same is timed in plain PyTorch: same depth, widths and vocabulary, torch.compile, autocast to bfloat16,
flash attention through scaled_dot_product_attention, fused AdamW. Its GELU MLP has as many weights as the SwiGLU, so
the FLOPs are equal; with LayerNorm and without rotary positions it has less other work. Each side has its own process,
because JAX reserves most of a GPU's memory. Rounds alternate, and medians are reported. Without a GPU it measures
nothing. --quick computes a toy on both sides, also on a CPU, and records no figure.
"""

import functools
import importlib.util
import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor

import support

import jax

import updates
from configs import llama_1b
from models import decoder_lm
from reporting import preflight

ROUNDS, STEPS = (1, 2) if support.QUICK else (3, 20)


def recipe():
    """Return the configuration that both sides compute."""
    config = llama_1b.get_config()
    config.model.update(remat="none", dtype="bfloat16")
    config.train.global_batch = 8  # with all that is kept for the backward pass it fits 80 GB
    if support.QUICK:
        config.model.update(num_layers=2, embed_dim=128, num_heads=2, num_kv_heads=2, mlp_dim=256, vocab_size=512)
        config.train.update(global_batch=2, sequence_length=128)
    return config


def torus_rate() -> float:
    """Return tokens/s of Torus."""
    config = recipe()
    update, _ = updates.torus(config)
    return _rate(update, config)


def torch_rate() -> float:
    """Return tokens/s of plain PyTorch."""
    config = recipe()
    model = config.model
    update = updates.pytorch(
        num_layers=model.num_layers, embed_dim=model.embed_dim, num_heads=model.num_heads,
        mlp_dim=3 * model.mlp_dim // 2, vocab_size=model.vocab_size, batch=config.train.global_batch,
        length=config.train.sequence_length, device=torch_device(), compiled=True,
    )  # fmt: skip
    return _rate(update, config)


def _rate(update: Callable[[int], None], config) -> float:
    update(2)
    return updates.rate(update, STEPS, config.train.global_batch * config.train.sequence_length)


def torch_device() -> str:
    """Return the device of PyTorch: the GPU if it supports one."""
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def device() -> tuple[str, str]:
    """Return the platform and the name of JAX's device."""
    first = jax.devices()[0]
    return first.platform, first.device_kind


def peak_flops() -> float:
    """Return the GPU's bfloat16 peak from configs/topologies.py; for an unknown chip the measured peak."""
    return preflight.peak_flops(None, 1)[0]


def alone(function: Callable):
    """Return the result of a function that runs in its own process."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
        return process.submit(function).result()


def main() -> None:
    """Time both sides in alternating rounds, then print medians."""
    platform, name = alone(device)
    if platform != "gpu" and not support.QUICK:
        return support.finish("gpu_step", {"run": "not run: no GPU on this machine"})
    sides = {"torus": functools.partial(alone, torus_rate)}
    if importlib.util.find_spec("torch") and (support.QUICK or alone(torch_device) == "cuda"):
        sides["torch"] = functools.partial(alone, torch_rate)
    rates = updates.medians(sides, ROUNDS)
    if support.QUICK:
        return support.finish("gpu_step", {"run": f"a toy, on {name}"})
    config = recipe()
    flops, peak = decoder_lm.flops_per_token(config.model, config.train.sequence_length), alone(peak_flops)
    figures = {"run": name, "peak_tflops": round(peak / 1e12)}
    for side, rate in rates.items():
        figures |= {f"{side}_tokens_per_second": round(rate), f"{side}_mfu": round(rate * flops / peak, 3)}
    if "torch" in rates:
        figures["speedup_over_torch"] = round(rates["torus"] / rates["torch"], 3)
    return support.finish("gpu_step", figures)


if __name__ == "__main__":
    main()
