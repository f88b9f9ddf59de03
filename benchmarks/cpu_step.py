# SPDX-License-Identifier: Apache-2.0
"""How fast is a training step on this CPU, as a share of its matmul peak and beside plain PyTorch?

Times whole updates (forward, backward, AdamW) of the tiny recipe and of a 6-layer, 256-wide model (vocabulary
4,096, batch 8 x 256) in each combination of compute type and layer loop. Where torch is installed
(pip install torch==2.13.0) the second is built in plain PyTorch too: float32, GELU MLP of four times the width,
scaled_dot_product_attention, fused AdamW. Ours has a SwiGLU MLP with a few more weights. Rounds alternate and the
medians count.
"""

import importlib.util
import statistics
import time

import support

import jax
import numpy as np

import assembly
from configs import tiny
from configs.loading import assign
from parallelism.mesh import mesh_context
from training.throughput import measured_matmul_peak

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


def torus_step(changes: dict):
    """Return (a function that runs STEPS updates and returns tokens/s, model FLOPs per token)."""
    config = tiny.get_config()
    for key, value in changes.items():
        assign(config, key, value)
    config.mesh.fsdp = 1
    run = assembly.assemble(config)
    shape = (config.train.global_batch, config.train.sequence_length)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, config.model.vocab_size, shape, np.int32) for name in ("tokens", "targets")}
    batch |= {
        "segments": np.ones(shape, np.int32),
        "positions": np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1)),
    }
    with mesh_context(run.mesh):
        state = run.init()
        step = run.train_step.lower(run.abstract_state, run.abstract_batch).compile()
    state, _ = step(state, batch)

    def measure():
        nonlocal state
        start = time.perf_counter()
        for _ in range(STEPS):
            state, scalars = step(state, batch)
        jax.block_until_ready(scalars)
        return STEPS * batch["tokens"].size / (time.perf_counter() - start)

    return measure, run.flops_per_token


def torch_step():
    """Return a function that runs STEPS updates of the six-layer model in plain PyTorch and returns tokens/s."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(256), nn.LayerNorm(256)
            self.qkv, self.out = nn.Linear(256, 768, bias=False), nn.Linear(256, 256, bias=False)
            self.up, self.down = nn.Linear(256, 1024, bias=False), nn.Linear(1024, 256, bias=False)

        def forward(self, x):
            q, k, v = (t.unflatten(2, (4, 64)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=2))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Embedding(4096, 256), *[Block() for _ in range(6)], nn.LayerNorm(256), nn.Linear(256, 4096, bias=False)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens, targets = torch.randint(0, 4096, (8, 256)), torch.randint(0, 4096, (8, 256))

    def update():
        loss = functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def measure():
        start = time.perf_counter()
        for _ in range(STEPS):
            update()
        return STEPS * tokens.numel() / (time.perf_counter() - start)

    update()
    return measure


def main() -> None:
    """Alternate rounds of everything, then print medians."""
    runs = {f"six_layer_{name}": torus_step(SIX_LAYERS | changes) for name, changes in VARIANTS.items()}
    runs["tiny_default"] = torus_step({})
    flops = {name: per_token for name, (_, per_token) in runs.items()}
    measures = {name: measure for name, (measure, _) in runs.items()}
    if importlib.util.find_spec("torch"):
        measures["torch"] = torch_step()
    rates, peaks = {name: [] for name in measures}, []
    for index in range(ROUNDS):
        peaks.append(measured_matmul_peak())
        for name, measure in measures.items():
            rates[name].append(measure())
        print(f"round {index + 1}/{ROUNDS}: " + "  ".join(f"{n} {r[-1]:,.0f}" for n, r in rates.items()), flush=True)
    rates = {name: statistics.median(values) for name, values in rates.items()}
    peak = statistics.median(peaks)
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
