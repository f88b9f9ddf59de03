# SPDX-License-Identifier: Apache-2.0
"""A training step of the Tiny Recursive Model in plain PyTorch, to compare with; not a benchmark itself.

Written from the paper (arXiv:2510.04871) and the documentation of the public code. Weights have its names and layout,
are float32 and are cast at use. All states have one type, and the loss is in float64. Only the last cycle of the
recursion has a gradient. AdamATan2 updates everything except the puzzle table, whose rows move by the sign of their
gradient. `disagreement` compares it with recorded numbers of the public code.

python benchmarks/trm_reference_torch.py [--quick] prints steps/s on this machine, and whether the numbers agree.
"""

import functools
import importlib.util
import itertools
import math
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

import support

TORCH = importlib.util.find_spec("torch") is not None
if TORCH:
    import torch
    from torch.nn import functional

FIXTURES = pathlib.Path(os.environ.get("TRM_FIXTURES", support.ROOT / "tests" / "fixtures"))
IGNORED = -100
EPSILON = 1e-5
LAYER = "inner.L_level.layers."
CONSTANTS = ("inner.H_init", "inner.L_init", "inner.puzzle_emb.weights")  # the optimizer of weights leaves them alone
TOLERANCES = {"att": (1e-4, 1e-4), "mlp": (3e-3, 5e-4)}  # of logits, absolute, and of gradients, relative


class Settings(NamedTuple):
    """Sizes of a model, with the names of the public code; the defaults are its Sudoku recipe."""

    hidden_size: int = 512
    num_heads: int = 8
    expansion: float = 4.0
    L_layers: int = 2
    H_cycles: int = 3
    L_cycles: int = 6
    seq_len: int = 81
    vocab_size: int = 11
    puzzle_emb_ndim: int = 512
    puzzle_emb_len: int = 16
    num_puzzle_identifiers: int = 1
    pos_encodings: str = "rope"
    mlp_t: bool = False
    halt_max_steps: int = 16
    halt_exploration_prob: float = 0.1

    @property
    def prefix(self) -> int:
        """The number of positions before the cells."""
        return self.puzzle_emb_len or -(-self.puzzle_emb_ndim // self.hidden_size)


class Step:
    """A model, its optimizer and the state of every slot of the batch; a call is one update.

    Args:
      weights: {name: float32 array}, [out, in] for products.
      dtype: of states, activations and logits: float32 or bfloat16.
      compiled: whether torch.compile compiles the network and the loss, each alone.
    """

    def __init__(
        self, settings: Settings, weights: dict[str, np.ndarray], *, dtype: str = "float32", compiled: bool = False,
        lr: float = 1e-4, weight_decay: float = 1.0,
    ):  # fmt: skip
        self.settings, self.dtype = settings, getattr(torch, dtype)
        tensors = {name: torch.tensor(array, dtype=torch.float32) for name, array in weights.items()}
        self.constants = {name: tensors.pop(name) for name in CONSTANTS if name in tensors}
        self.params = {name: tensor.requires_grad_() for name, tensor in tensors.items()}
        self.lr, self.weight_decay, self.updates = lr, weight_decay, 0
        self.moments = {name: (torch.zeros_like(p), torch.zeros_like(p)) for name, p in self.params.items()}
        self.angles = _angles(settings)
        self.carry = None
        compile = functools.partial(torch.compile, dynamic=False) if compiled else lambda function: function
        self.network, self.losses = compile(self._network), compile(_losses)

    def __call__(self, batch: dict) -> dict:
        """Update weights, table and carry with a batch of inputs, labels and puzzle_identifiers; see `gradients`."""
        step = self.gradients(batch)
        self._update(step)
        return step

    def gradients(self, batch: dict) -> dict:
        """Return logits, halt logits, loss, and the table's rows with their ids; weights and rows get gradients.

        The carry is updated; weights and table are not.
        """
        self._refill(batch)
        carry, (B, *_) = self.carry, batch["inputs"].shape
        for param in self.params.values():
            param.grad = None
        rows = None
        if self.settings.puzzle_emb_ndim:
            table = self.constants["inner.puzzle_emb.weights"]
            rows = table[carry["puzzle_identifiers"]].requires_grad_()
        logits, halts, carry["high"], carry["low"] = self._forward(carry["inputs"], rows, carry["high"], carry["low"])
        loss = self.losses(logits, halts[:, 0], carry["labels"])
        (loss / B).backward()
        self._halt(halts[:, 0].detach())
        return {
            "logits": logits.detach(), "halts": halts.detach(), "loss": loss.item(), "rows": rows,
            "ids": carry["puzzle_identifiers"],
        }  # fmt: skip

    def _refill(self, batch: dict) -> None:
        """Give each halted slot its row of the batch, and reset both its states."""
        s, B = self.settings, len(batch["inputs"])
        if self.carry is None:
            state = torch.zeros(B, s.prefix + s.seq_len, s.hidden_size, dtype=self.dtype)
            self.carry = {name: torch.zeros_like(array) for name, array in batch.items()}
            self.carry |= {"high": state, "low": state, "steps": torch.zeros(B, dtype=torch.int32)}
            self.carry["halted"] = torch.ones(B, dtype=torch.bool)
        new = self.carry | batch | {"steps": torch.zeros_like(self.carry["steps"])}
        new |= {"high": self.constants["inner.H_init"], "low": self.constants["inner.L_init"]}
        for name in ("high", "low", "steps", *batch):
            old = self.carry[name]
            halted = self.carry["halted"].view(-1, *[1] * (old.ndim - 1))
            self.carry[name] = torch.where(halted, new[name].to(old.dtype), old)

    def _halt(self, logits) -> None:
        s, carry = self.settings, self.carry
        carry["steps"] = carry["steps"] + 1
        halted = carry["steps"] >= s.halt_max_steps
        if s.halt_max_steps > 1:
            explores = torch.rand(len(logits)) < s.halt_exploration_prob
            least = torch.where(explores, torch.randint(2, s.halt_max_steps + 1, (len(logits),)), 0)
            halted = (halted | (logits > 0)) & (carry["steps"] >= least)
        carry["halted"] = halted

    def _forward(self, inputs, rows, high, low):
        """Return (logits [B, S, V], float32 halt logits [B, 2], both states); only the last cycle has a gradient."""
        s, x = self.settings, self._embed(inputs, rows)
        with torch.no_grad():
            for _ in range(s.H_cycles - 1):
                high, low = self._cycle(high, low, x)
        high, low = self._cycle(high, low, x)
        logits = _linear(high, self.params["inner.lm_head.weight"])[:, s.prefix :]
        halts = _linear(high[:, 0], self.params["inner.q_head.weight"], self.params["inner.q_head.bias"])
        return logits, halts.float(), high.detach(), low.detach()

    def _cycle(self, high, low, x):
        for _ in range(self.settings.L_cycles):
            low = self.network(low, high + x)
        return self.network(high, low), low

    def _embed(self, inputs, rows):
        s = self.settings
        x = functional.embedding(inputs, self.params["inner.embed_tokens.embedding_weight"].to(self.dtype))
        if rows is not None:
            padded = functional.pad(rows.to(self.dtype), (0, s.prefix * s.hidden_size - s.puzzle_emb_ndim))
            x = torch.cat([padded.view(-1, s.prefix, s.hidden_size), x], dim=1)
        if s.pos_encodings == "learned":
            x = 0.707106781 * (x + self.params["inner.embed_pos.embedding_weight"].to(self.dtype))
        return math.sqrt(s.hidden_size) * x

    def _network(self, state, injection):
        x = state + injection
        for number in range(self.settings.L_layers):
            weights = {
                name.removeprefix(f"{LAYER}{number}."): param
                for name, param in self.params.items()
                if name.startswith(f"{LAYER}{number}.")
            }
            if self.settings.mlp_t:
                x = x.transpose(1, 2)
                x = _normalized(x + _swiglu(x, weights, "mlp_t")).transpose(1, 2)
            else:
                x = _normalized(x + self._attention(x, weights))
            x = _normalized(x + _swiglu(x, weights, "mlp"))
        return x

    def _attention(self, x, weights: dict):
        N = self.settings.num_heads
        heads = _linear(x, weights["self_attn.qkv_proj.weight"]).unflatten(2, (3 * N, -1)).transpose(1, 2)
        query, key, value = heads.split(N, dim=1)
        if self.settings.pos_encodings == "rope":
            query, key = _rotated(query, *self.angles), _rotated(key, *self.angles)
        y = functional.scaled_dot_product_attention(query, key, value)
        return _linear(y.transpose(1, 2).flatten(2), weights["self_attn.o_proj.weight"])

    def _update(self, step: dict) -> None:
        self.updates += 1
        rates = {"lr": self.lr, "weight_decay": self.weight_decay}
        for name, param in self.params.items():
            adam_atan2(param.detach(), param.grad, *self.moments[name], self.updates, **rates)
        if step["rows"] is not None:
            sign_descent(self.constants[CONSTANTS[2]], step["ids"], step["rows"].grad, **rates)


def adam_atan2(
    param,
    gradient,
    mean,
    square,
    count: int,
    *,
    lr: float,
    weight_decay: float,
    betas: tuple[float, float] = (0.9, 0.95),
) -> None:
    """Update a parameter and its two moments in place; `count` is the number of updates with this one."""
    mean.lerp_(gradient, 1 - betas[0])
    square.lerp_(gradient.square(), 1 - betas[1])
    root = square.sqrt().div_(math.sqrt(1 - betas[1] ** count))
    param.mul_(1 - lr * weight_decay).sub_(torch.atan2(mean, root), alpha=lr / (1 - betas[0] ** count))


def sign_descent(table, ids, gradients, *, lr: float, weight_decay: float) -> None:
    """Move, in place, each row of a table that the batch uses by the sign of the sum of its gradients."""
    rows, of_gradients = ids.unique(return_inverse=True)
    sums = torch.zeros(len(rows), table.shape[1]).index_add_(0, of_gradients, gradients)
    table[rows] = table[rows] * (1 - lr * weight_decay) - lr * sums.sign()


def _linear(x, weight, bias=None):
    return functional.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _normalized(x):
    """Return x over its root mean square along the last axis, computed in float32, without a gain."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)).to(x.dtype)


def _swiglu(x, weights: dict, name: str):
    gate, value = _linear(x, weights[f"{name}.gate_up_proj.weight"]).chunk(2, dim=-1)
    return _linear(functional.silu(gate) * value, weights[f"{name}.down_proj.weight"])


def _angles(settings: Settings):
    """Return cosines and sines [L, H]; both halves of a head have the same angles."""
    head_dim = settings.hidden_size // settings.num_heads
    rates = 10000.0 ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)
    angles = torch.outer(torch.arange(settings.prefix + settings.seq_len, dtype=torch.float32), rates).repeat(1, 2)
    return angles.cos(), angles.sin()


def _rotated(x, cosine, sine):
    first, second = x.chunk(2, dim=-1)
    return (x * cosine + torch.cat([-second, first], dim=-1) * sine).to(x.dtype)


def _losses(logits, halts, labels):
    """Return the sum over sequences of the stablemax loss plus half of the halting loss."""
    mask = labels != IGNORED
    wide = logits.double()
    grown = torch.where(wide < 0, 1 / (1 - wide + 1e-30), wide + 1)
    log_probability = (grown / grown.sum(-1, keepdim=True)).log()
    of_labels = log_probability.gather(-1, torch.where(mask, labels, 0).long().unsqueeze(-1)).squeeze(-1)
    cells = mask.sum(-1)
    tokens = -(torch.where(mask, of_labels, 0) / cells.clamp_min(1).unsqueeze(-1)).sum()
    exact = (((logits.argmax(-1) == labels) & mask).sum(-1) == cells).to(halts.dtype)
    return tokens + 0.5 * functional.binary_cross_entropy_with_logits(halts, exact, reduction="sum")


def initial_weights(settings: Settings, seed: int = 0) -> dict[str, np.ndarray]:
    """Return initial weights with standard deviation 1 / sqrt(inputs of a product); the table is zeros."""
    rng, s, width = np.random.default_rng(seed), settings, settings.hidden_size

    def draw(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) / math.sqrt(columns)).astype(np.float32)

    def swiglu(name: str, size: int) -> dict[str, np.ndarray]:
        inner = -(-round(s.expansion * size * 2 / 3) // 256) * 256
        return {f"{name}.gate_up_proj.weight": draw(2 * inner, size), f"{name}.down_proj.weight": draw(size, inner)}

    weights = {f"inner.{state}_init": draw(1, width)[0] * np.float32(math.sqrt(width)) for state in "HL"}
    weights |= {
        f"inner.{name}": draw(s.vocab_size, width) for name in ("embed_tokens.embedding_weight", "lm_head.weight")
    }
    weights |= {
        "inner.q_head.weight": np.zeros((2, width), np.float32),
        "inner.q_head.bias": np.full(2, -5, np.float32),
    }
    if s.pos_encodings == "learned":
        weights["inner.embed_pos.embedding_weight"] = draw(s.prefix + s.seq_len, width)
    if s.puzzle_emb_ndim:
        weights[CONSTANTS[2]] = np.zeros((s.num_puzzle_identifiers, s.puzzle_emb_ndim), np.float32)
    attention = {"self_attn.qkv_proj.weight": draw(3 * width, width), "self_attn.o_proj.weight": draw(width, width)}
    for number in range(s.L_layers):
        mixer = swiglu("mlp_t", s.prefix + s.seq_len) if s.mlp_t else attention
        weights |= {f"{LAYER}{number}.{name}": array for name, array in (mixer | swiglu("mlp", width)).items()}
    return weights


def random_batch(settings: Settings, batch: int, seed: int = 0) -> dict:
    """Return a batch of random boards and answers, as tensors."""
    rng = np.random.default_rng(seed)
    boards = {name: rng.integers(1, settings.vocab_size, (batch, settings.seq_len)) for name in ("inputs", "labels")}
    boards["puzzle_identifiers"] = np.zeros(batch, np.int64)
    return {name: torch.from_numpy(array) for name, array in boards.items()}


def sudoku_step(
    *, batch: int = 64, mlp_t: bool = False, dtype: str = "float32", compiled: bool = False
) -> Callable[[int], None]:
    """Return a function that makes this number of updates of the Sudoku recipe, after one warm-up update."""
    torch.compiler.reset()  # what other ways compiled counts as recompiling, and past a limit nothing is compiled
    settings = Settings(mlp_t=mlp_t, pos_encodings="none" if mlp_t else "rope")
    step = Step(settings, initial_weights(settings), dtype=dtype, compiled=compiled)
    boards = random_batch(settings, batch)

    def update(count: int) -> None:
        for _ in range(count):
            step(boards)

    update(1)
    return update


def disagreement(case: str) -> tuple[float, float]:
    """Return the differences from a recorded case: (logits and losses, absolute; gradients, relative).

    Raises:
      AssertionError: other slots halt, or slots have other examples, than recorded.
    """
    weights, steps, grads = (
        dict(np.load(FIXTURES / f"trm_public_{case}_{part}.npz", allow_pickle=False))
        for part in ("weights", "steps", "grads")
    )
    settings = Settings(**{name: weights[f"config/{name}"].item() for name in Settings._fields})
    step = Step(settings, {name: array for name, array in weights.items() if not name.startswith("config/")})
    logits, relative = 0.0, 0.0
    for number in range(5):
        key = f"train/step{number}/"
        names = ("inputs", "labels", "puzzle_identifiers")
        found = step.gradients({name: torch.from_numpy(steps[f"{key}batch/{name}"]).long() for name in names})
        for name in names:
            np.testing.assert_array_equal(step.carry[name], steps[f"{key}current_data/{name}"])
        np.testing.assert_array_equal(step.carry["halted"], steps[f"{key}halted"])
        logits = max(logits, np.abs(found["logits"].numpy() - steps[f"{key}logits"]).max())
        logits = max(logits, np.abs(found["halts"].numpy()[:, 0] - steps[f"{key}q_halt_logits"]).max())
        logits = max(logits, abs(found["loss"] - steps[f"{key}loss"].item()))
        if number == grads["grad_step"]:
            gradients = {f"grad/{name}": param.grad for name, param in step.params.items()}
            gradients |= {} if found["rows"] is None else {"grad/puzzle_emb_per_example": found["rows"].grad}
            relative = max(
                np.linalg.norm(g.numpy() - grads[name]) / np.linalg.norm(grads[name]) for name, g in gradients.items()
            )
    return float(logits), float(relative)


def main() -> None:
    """Compare with the recorded cases, then print steps/s of every variant."""
    if not TORCH:
        print("torch is not installed, so nothing is measured; pip install torch==2.13.0")
        return
    for case in ("att_p16", "mlp_p16"):
        found, allowed = disagreement(case), TOLERANCES[case.partition("_")[0]]
        print(f"{case}: logits within {found[0]:.1e}, gradients within {found[1]:.1e}", flush=True)
        if any(error > limit for error, limit in zip(found, allowed, strict=True)):
            sys.exit(f"{case}: over {allowed}; this is not the model that was recorded")
    batch, steps = (4, 1) if support.QUICK else (64, 3)
    dtypes = ("float32", "bfloat16") if torch.ops.mkldnn._is_mkldnn_bf16_supported() else ("float32",)
    figures = {"batch": batch, "threads": torch.get_num_threads()}
    for mlp_t, dtype, compiled in itertools.product((False, True), dtypes, (False, True)):
        start = time.perf_counter()
        update = sudoku_step(batch=batch, mlp_t=mlp_t, dtype=dtype, compiled=compiled)
        ready = time.perf_counter()
        update(steps)
        rate = steps / (time.perf_counter() - ready)
        name = f"{'mlp_t' if mlp_t else 'attention'}_{dtype}{'_compiled' if compiled else ''}_steps_per_second"
        figures[name] = float(f"{rate:.3g}")
        print(f"{name}: {rate:.3g}, the first step after {ready - start:.0f} s", flush=True)
    support.finish("trm_reference_torch", figures)


if __name__ == "__main__":
    main()
