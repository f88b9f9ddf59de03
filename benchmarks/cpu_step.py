# SPDX-License-Identifier: Apache-2.0
"""How fast is a training step on this CPU, relative to its matmul peak and to plain PyTorch?

Times whole updates (forward, backward, AdamW) of the tiny recipe and of a 6-layer, 256-wide model (vocabulary 4,096,
batch 8 x 256) in each combination of compute type and layer loop. If torch is installed (pip install torch==2.13.0),
the second model is also built in plain PyTorch: float32, a GELU MLP of four times the width,
scaled_dot_product_attention, fused AdamW. The model of Torus has a SwiGLU MLP with slightly more weights. Rounds
alternate, and medians are reported.
"""

import functools
import importlib.util
from collections.abc import Callable

import support

import updates
from configs import tiny
from reporting.throughput import measured_matmul_peak

ROUNDS, STEPS = (1, 2) if support.QUICK else (5, 4)
SIX_LAYERS = {
    "model.num_layers": 6, "model.embed_dim": 256, "model.num_heads": 4, "model.num_kv_heads": 4,
    "model.mlp_dim": 704, "model.vocab_size": 4096, "model.tie_embeddings": False,
    "train.global_batch": 8, "train.sequence_length": 256,
}  # fmt: skip
VARIANTS = {
    f"{dtype}_{loop}": {"model.dtype": dtype, "model.layer_loop": loop}
    for dtype in ("float32", "bfloat16")
    for loop in ("scan", "unroll")
} | {"default": {}}


def torus_step(changes: dict) -> tuple[Callable[[], float], float]:
    """Return (a function that runs STEPS updates and returns tokens/s, model FLOPs per token)."""
    config = tiny.get_config()
    config.update_from_flattened_dict(changes)
    update, flops_per_token = updates.torus(config)
    tokens = config.train.global_batch * config.train.sequence_length
    return functools.partial(updates.rate, update, STEPS, tokens), flops_per_token


def torch_step() -> Callable[[], float]:
    """Return a function that runs STEPS updates of the six-layer model in plain PyTorch and returns tokens/s."""
    batch, length = SIX_LAYERS["train.global_batch"], SIX_LAYERS["train.sequence_length"]
    names = ("num_layers", "embed_dim", "num_heads", "vocab_size")
    sizes = {name: SIX_LAYERS[f"model.{name}"] for name in names}
    update = updates.pytorch(**sizes, mlp_dim=1024, batch=batch, length=length)
    return functools.partial(updates.rate, update, STEPS, batch * length)


def main() -> None:
    """Time all variants in alternating rounds, then print medians."""
    runs = {f"six_layer_{name}": torus_step(SIX_LAYERS | changes) for name, changes in VARIANTS.items()}
    runs["tiny_default"] = torus_step({})
    flops = {name: per_token for name, (_, per_token) in runs.items()}
    measures = {"matmul_peak": measured_matmul_peak} | {name: measure for name, (measure, _) in runs.items()}
    if importlib.util.find_spec("torch"):
        measures["torch"] = torch_step()
    rates = updates.medians(measures, ROUNDS)
    peak = rates["matmul_peak"]
    figures = {
        "tiny_tokens_per_second": rates["tiny_default"],
        "six_layer_tokens_per_second": rates["six_layer_default"],
        "peak_fraction": rates["six_layer_default"] * flops["six_layer_default"] / peak,
        "tiny_peak_fraction": rates["tiny_default"] * flops["tiny_default"] / peak,
        "matmul_peak_gflops": peak / 1e9,
    } | {f"six_layer_{name}_tokens_per_second": rates[f"six_layer_{name}"] for name in VARIANTS if name != "default"}
    if "torch" in rates:
        figures["torch_tokens_per_second"] = rates["torch"]
        figures["speedup_over_torch"] = rates["six_layer_default"] / rates["torch"]
    support.finish("cpu_step", {name: round(value, 3) for name, value in figures.items()})


if __name__ == "__main__":
    main()
