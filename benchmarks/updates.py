# SPDX-License-Identifier: Apache-2.0
"""Whole updates (forward, backward, AdamW) of a model in Torus, and in plain PyTorch for comparison."""

import statistics
import time
from collections.abc import Callable

import jax
import numpy as np

from core import assembly
from parallelism.mesh import mesh_context


def torus(config) -> tuple[Callable[[int], None], float]:
    """Return (the result of `updating` for a language model on one device, model FLOPs per token).

    Tokens are random, a document per row.
    """
    config.mesh.fsdp = 1
    run = assembly.assemble(config, devices=jax.devices()[:1])
    return updating(run, random_batch(config)), run.flops_per_token


def random_batch(config) -> dict[str, np.ndarray]:
    """Return a batch of random tokens, a document in each row."""
    shape = (config.train.global_batch, config.train.sequence_length)
    rng = np.random.default_rng(0)
    batch = {name: rng.integers(0, config.model.vocab_size, shape, np.int32) for name in ("tokens", "targets")}
    positions = np.tile(np.arange(shape[1], dtype=np.int32), (shape[0], 1))
    return batch | {"segments": np.ones(shape, np.int32), "positions": positions}


def updating(run: assembly.Run, batch: dict) -> Callable[[int], None]:
    """Return a function that makes this number of updates with one batch; it is compiled and warmed up."""
    with mesh_context(run.mesh):
        state = run.init()
    step = run.compile()

    def update(count: int) -> None:
        nonlocal state
        for _ in range(count):
            state, scalars = step(state, batch, {})
        jax.block_until_ready(scalars)

    update(1)
    return update


def rate(update: Callable[[int], None], steps: int, amount: int) -> float:
    """Return what some updates do in a second; `amount` is what one does: its tokens, or 1 for updates/s."""
    start = time.perf_counter()
    update(steps)
    return steps * amount / (time.perf_counter() - start)


def _short(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.3g}"


def medians(measures: dict[str, Callable[[], float]], rounds: int) -> dict[str, float]:
    """Return the median of each measure; they take turns."""
    found = {name: [] for name in measures}
    for index in range(rounds):
        for name, measure in measures.items():
            found[name].append(measure())
        last = "  ".join(f"{name} {_short(values[-1])}" for name, values in found.items())
        print(f"round {index + 1}/{rounds}: {last}", flush=True)
    return {name: statistics.median(values) for name, values in found.items()}


def pytorch(
    *, num_layers: int, embed_dim: int, num_heads: int, mlp_dim: int, vocab_size: int, batch: int, length: int,
    device: str = "cpu", compiled: bool = False,
) -> Callable[[int], None]:  # fmt: skip
    """Return a function that makes this number of updates of a decoder in plain PyTorch.

    It has LayerNorm, a GELU MLP and no rotary positions; float32 weights, scaled_dot_product_attention, fused AdamW.

    Args:
      compiled: whether to use torch.compile and bfloat16 (autocast).
    """
    import torch
    from torch import nn
    from torch.nn import functional

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm1, self.norm2 = nn.LayerNorm(embed_dim), nn.LayerNorm(embed_dim)
            self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=False)
            self.out = nn.Linear(embed_dim, embed_dim, bias=False)
            self.up = nn.Linear(embed_dim, mlp_dim, bias=False)
            self.down = nn.Linear(mlp_dim, embed_dim, bias=False)

        def forward(self, x):
            heads = (t.unflatten(2, (num_heads, -1)).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=2))
            y = functional.scaled_dot_product_attention(*heads, is_causal=True)
            x = x + self.out(y.transpose(1, 2).flatten(2))
            return x + self.down(functional.gelu(self.up(self.norm2(x))))

    torch.manual_seed(0)
    with torch.device(device):
        model = nn.Sequential(
            nn.Embedding(vocab_size, embed_dim), *[Block() for _ in range(num_layers)], nn.LayerNorm(embed_dim),
            nn.Linear(embed_dim, vocab_size, bias=False),
        )  # fmt: skip
        tokens, targets = torch.randint(0, vocab_size, (2, batch, length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)

    def loss():
        with torch.autocast(device, torch.bfloat16, enabled=compiled):
            return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())

    loss = torch.compile(loss) if compiled else loss

    def update(count: int) -> None:
        for _ in range(count):
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        if device == "cuda":
            torch.cuda.synchronize()

    update(1)
    return update
