# SPDX-License-Identifier: Apache-2.0
"""The Tiny Recursive Model (arXiv:2510.04871, section 4), and the models that it is compared with.

A small network refines its answer recursively. It has two latents of one vector a position: `high`, from which heads
read the answer, and `low`, the intermediate state. Letters: B puzzles, T positions (a prefix, then the cells), S cells,
D embed, V tokens.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from layers.attention.attention import Attention, attend, through_cache
from layers.attention.rotary import rotary_angles, rotary_frequencies
from layers.axes import constrain, truncated_weight, zeros
from layers.block import REMAT
from layers.convolution import ConvolvedSwiGLU
from layers.fsdp import all_gather_params, all_gather_state
from layers.latents import Path
from layers.mlp import SILU_PRODUCT_SQUARE, SwiGLU
from layers.normalization import normalized
from layers.products import add_bias, einsum
from layers.puzzles import PuzzleTable
from layers.units import Units
from models.decoder_lm import head_dim

CONSTANT = "constant"  # names the dimension of constants, which are drawn once and never trained
EPSILON = 1e-5
HALT_BIAS = -5.0  # at first nothing halts
STRAIGHT = Path()  # without noise
NUM_HALT = 2  # halt, and continue, which arXiv:2506.21734 trains and the published recipes do not

States = tuple[jax.Array, tuple[jax.Array, ...]]  # high [B, T, D], low latents of the same shape


def prefix_length(config) -> int:
    """Return the number of positions before the cells; they hold the puzzle's embedding."""
    return config.puzzle_dim and (config.prefix_length or math.ceil(config.puzzle_dim / config.embed_dim))


def mixer_dim(length: int) -> int:
    """Return the hidden width of the SwiGLU that mixes `length` positions: 4 * 2/3 of it, in steps of 256."""
    return 256 * math.ceil(round(4 * length * 2 / 3) / 256)


def num_gradient_cycles(config) -> int:
    """Return the number of last cycles with a gradient: all, if a curriculum has not reached that many cycles yet."""
    return min(config.gradient_cycles, config.high_cycles)


def flops_per_token(config, num_cells: int) -> float:
    """Return floating-point operations to train on one cell for one supervision step.

    There are 2 per weight of a product for each call of the network. Calls in a cycle with a gradient add 4.
    """
    length = prefix_length(config) + num_cells
    mlp = (3 * config.embed_dim + config.convolution) * config.mlp_dim
    size = head_dim(config)
    attention = 2 * size * (config.embed_dim * (config.num_heads + config.num_kv_heads) + length * config.num_heads)
    mixer = attention if config.mixer == "attention" else 3 * config.embed_dim * mixer_dim(length)
    calls = (config.low_cycles + 1) * (config.high_cycles + 2 * num_gradient_cycles(config))
    of_position = 2.0 * config.num_layers * (mixer + mlp) * calls
    return of_position * length / num_cells + 6.0 * config.embed_dim * config.vocab_size


def hidden_units(config) -> tuple[Units, ...]:
    """Return none: the activations of a network that is applied many times in a step are not measured."""
    return ()


class TRM(nnx.Module):
    """Token embedding, a prefix for the puzzle, the recursion of one network (or two), and heads for cells and halting.

    Variants of the published model: `low_latents` = 0 for a single latent, more than 1 for several low latents that
    take turns; `networks` = 2 for a separate network that updates `high`, as in HRM (arXiv:2506.21734).

    Args:
      config: the `model` section of a configuration.
      dtype: compute type.
      scan: whether to scan over the updates of a cycle without gradient; else they are unrolled.
      kernel: unused; all positions see all, and sequences are short.
    """

    def __init__(self, config, *, dtype, scan: bool, kernel: str = "", rngs: nnx.Rngs):
        self.dtype, self.scan, self.remat = dtype, scan, config.remat
        self.high_cycles, self.low_cycles, self.low_latents = config.high_cycles, config.low_cycles, config.low_latents
        self.gradient_cycles, self.update_rate = num_gradient_cycles(config), config.update_rate
        self.prefix = prefix_length(config)
        self.length, self.embed_dim = self.prefix + config.max_length, config.embed_dim
        self.rope = (head_dim(config), config.rope_theta) if config.positions == "rope" else None
        self.embedding = Table((config.vocab_size, self.embed_dim), ("vocab", "embed"), rngs=rngs)
        learned = config.positions == "learned"
        self.positions = Table((self.length, self.embed_dim), (None, "embed"), rngs=rngs) if learned else None
        self.sinusoidal = config.positions == "sinusoidal"
        if config.puzzle_dim:
            self.puzzles = PuzzleTable(num_puzzles=config.num_puzzles, puzzle_dim=config.puzzle_dim)
        self.initial = InitialStates(self.embed_dim, rngs=rngs)
        self.network = Network(config, self.length, rngs=rngs)
        self.high_network = Network(config, self.length, rngs=rngs) if config.networks == 2 else None
        self.head = Head(self.embed_dim, config.vocab_size, rngs=rngs)
        self.halt = HaltHead(self.embed_dim)

    def start(self, num_puzzles: int) -> States:
        """Return the initial states of `num_puzzles` puzzles, the same vector at all positions."""

        def everywhere(vector_D):
            return jnp.broadcast_to(vector_D[...].astype(self.dtype), (num_puzzles, self.length, self.embed_dim))

        return everywhere(self.initial.high), (everywhere(self.initial.low),) * self.low_latents

    def __call__(
        self, states: States, inputs: jax.Array, puzzles_B: jax.Array, path: Path = STRAIGHT
    ) -> tuple[States, jax.Array, jax.Array]:
        """Take one supervision step.

        Only the last `gradient_cycles` of `high_cycles` cycles have a gradient; `states` have none.

        Args:
          inputs: int [B, S].
          puzzles_B: int, rows of the puzzle table.
          path: noise after each update of a latent; none by default.

        Returns:
          (states without gradient, logits [B, S, V] in the compute type, float32 halt logits [B, 2]).
        """
        x_BTD = self._embed(inputs, puzzles_B)
        networks = self._networks()
        free = jax.tree.map(jax.lax.stop_gradient, (networks, x_BTD))
        cycle = functools.partial(self._cycle, scan=self.scan)
        begun = states, dataclasses.replace(path, rate=self.update_rate)
        num_free = self.high_cycles - self.gradient_cycles
        states, path = _repeat(lambda reached: cycle(reached, *free), begun, num_free, self.scan)
        reached = jax.lax.stop_gradient(states), path
        for _ in range(self.gradient_cycles):
            # A loop would copy the residuals of all updates into one array: 7 % of a step on a v4-64.
            reached = self._cycle(reached, networks, x_BTD, scan=False)
        states, _ = reached
        high_BTD = states[0]
        logits = einsum("BSD,DV->BSV", high_BTD[:, self.prefix :], self.head())
        halt = self.halt(high_BTD[:, 0])
        return jax.lax.stop_gradient(states), logits, halt

    def _embed(self, inputs: jax.Array, puzzles_B: jax.Array) -> jax.Array:
        """Return [B, T, D] of unit variance."""
        chosen_BSV = jax.nn.one_hot(inputs, self.embedding.shape[0], dtype=self.dtype)  # a product's gradient is fast
        x_BTD = einsum("BSV,VD->BSD", chosen_BSV, self.embedding())
        if self.prefix:
            rows_BE = self.puzzles(puzzles_B).astype(self.dtype)
            room = self.prefix * self.embed_dim - rows_BE.shape[1]
            prefix = jnp.pad(rows_BE, ((0, 0), (0, room))).reshape(-1, self.prefix, self.embed_dim)
            x_BTD = jnp.concatenate([prefix, x_BTD], axis=1)
        if self.positions or self.sinusoidal:
            positions_TD = self.positions() if self.positions else _sinusoids(self.length, self.embed_dim)
            sum_BTD = x_BTD.astype(jnp.float32) + positions_TD  # whose gradient is a sum over puzzles
            x_BTD = (math.sqrt(0.5) * sum_BTD).astype(self.dtype)
        return constrain(math.sqrt(self.embed_dim) * x_BTD, "batch", "length", "act_embed")

    def _networks(self) -> tuple[Callable, Callable]:
        """Return the update functions of the low latents and of `high`, as trees of gathered weights."""
        angles = None
        if self.rope:
            angles = rotary_angles(jnp.arange(self.length)[None], *rotary_frequencies(*self.rope))
        low = self.network.updating(angles, self.remat)
        return low, self.high_network.updating(angles, self.remat) if self.high_network else low

    def _cycle(
        self, reached: tuple[States, Path], networks: tuple[Callable, Callable], x_BTD: jax.Array, *, scan: bool
    ) -> tuple[States, Path]:
        """Update the low latents `low_cycles` times, each from all others, then `high` from them."""
        update_low, update_high = networks

        def turn(reached):
            (high, (latent, *others)), path = reached
            latent, path = path.follow(latent, update_low(latent, sum(others, high + x_BTD)))
            return (high, (*others, latent)), path

        def turn_of_one(reached):
            high, path = reached
            return path.follow(high, update_low(high, x_BTD))

        if not self.low_latents:
            (high, _), path = reached
            high, path = _repeat(turn_of_one, (high, path), self.low_cycles + 1, scan)
            return (high, ()), path
        (high, low), path = _repeat(turn, reached, self.low_cycles, scan)
        high, path = path.follow(high, update_high(high, sum(low[1:], low[0])))
        return (high, low), path


class Table(nnx.Module):
    """An embedding matrix with entries of variance 1 / D."""

    def __init__(self, shape: tuple[int, int], axes: tuple, *, rngs: nnx.Rngs):
        self.embedding = truncated_weight(rngs, shape, axes, shape[1] ** -0.5)
        self.shape, self.axes = shape, axes

    def __call__(self) -> jax.Array:
        return all_gather_params(self.embedding[...], self.axes, jnp.float32)


class InitialStates(nnx.Module):
    """The initial vectors [D] of every position: constants, drawn once."""

    def __init__(self, embed_dim: int, *, rngs: nnx.Rngs):
        self.high = truncated_weight(rngs, (embed_dim,), (CONSTANT,), 1.0)
        self.low = truncated_weight(rngs, (embed_dim,), (CONSTANT,), 1.0)


class Head(nnx.Module):
    """The weight [D, V] from `high` to logits."""

    def __init__(self, embed_dim: int, vocab_size: int, *, rngs: nnx.Rngs):
        self.kernel = truncated_weight(rngs, (embed_dim, vocab_size), ("embed", "vocab"), embed_dim**-0.5)

    def __call__(self) -> jax.Array:
        return all_gather_params(self.kernel[...], ("embed", "vocab"), jnp.float32)


class HaltHead(nnx.Module):
    """Float32 halt logits [B, 2] of the first position."""

    def __init__(self, embed_dim: int):
        self.kernel = zeros((embed_dim, NUM_HALT), ("embed", None))
        self.bias = nnx.Param(jnp.full((NUM_HALT,), HALT_BIAS), out_sharding=(None,))

    def __call__(self, x_BD: jax.Array) -> jax.Array:
        kernel = all_gather_params(self.kernel[...], ("embed", None), jnp.float32)
        return add_bias(einsum("BD,DV->BV", x_BD, kernel), self.bias).astype(jnp.float32)


class Network(nnx.Module):
    """Blocks that update a latent: blocks(latent + input)."""

    def __init__(self, config, length: int, *, rngs: nnx.Rngs):
        blocks = {str(layer): Block(config, length, rngs=rngs) for layer in range(config.num_layers)}
        self.blocks = nnx.Dict(blocks)

    def updating(self, angles: tuple | None, remat: str) -> Callable:
        """Return the update (latent, input) -> latent, a tree of the weights, which are all-gathered once."""
        graph, state = nnx.split(self.blocks)
        weights = all_gather_state(state, jnp.float32)
        return jax.tree_util.Partial(functools.partial(_updated, graph, remat), weights, angles)


def _updated(graph, remat: str, weights: dict, angles: tuple | None, latent_BTD, new_BTD) -> jax.Array:
    def apply(weights, h_BTD):
        for block in nnx.merge(graph, weights).values():
            h_BTD = block(h_BTD, angles)
        return h_BTD

    if remat != "none":
        apply = jax.checkpoint(apply, policy=jax.checkpoint_policies.save_only_these_names(*REMAT[remat]))
    return apply(weights, latent_BTD + new_BTD)


class Block(nnx.Module):
    """Compute norm(h + mixer(h)), then norm(h + mlp(h)), with norms without a scale.

    The mixer is attention, or an MLP over T with its norm over T too.
    """

    def __init__(self, config, length: int, *, rngs: nnx.Rngs):
        plain = dict(quantization="none", declare=truncated_weight, rngs=rngs)
        swiglu = plain | dict(biased=False, out_scale=SILU_PRODUCT_SQUARE**0.5)
        self.attends = config.mixer == "attention"
        if self.attends:
            self.mixer = Attention(
                embed_dim=config.embed_dim, num_heads=config.num_heads, num_kv_heads=config.num_kv_heads,
                head_dim=head_dim(config), qk_norm=False, epsilon=EPSILON, biases="none", out_scale=1.0, **plain,
            )  # fmt: skip
        else:
            self.mixer = LengthMixer(embed_dim=length, mlp_dim=mixer_dim(length), over="cells", **swiglu)
        of_cells = swiglu | dict(embed_dim=config.embed_dim, mlp_dim=config.mlp_dim)
        width = config.convolution
        self.mlp = ConvolvedSwiGLU(width=width, **of_cells) if width else SwiGLU(**of_cells)

    def __call__(self, h_BTD: jax.Array, angles: tuple | None) -> jax.Array:
        """Return [B, T, D]."""
        if self.attends:
            mixed_BTD, _ = self.mixer(h_BTD, angles, functools.partial(through_cache, attend, mask_BTS=None), None)
            h_BTD = _normalized(h_BTD + mixed_BTD)
        else:
            h_TBD = jnp.swapaxes(h_BTD, 0, 1)
            h_BTD = jnp.swapaxes(_normalized(h_TBD + self.mixer(h_TBD), axis=0), 0, 1)
        return _normalized(h_BTD + self.mlp(h_BTD))


class LengthMixer(SwiGLU):
    """Gated feed-forward over positions, [T, B, D]; with T first, each product is one of two matrices."""

    INTO, OUT = "TBD,TF->FBD", "FBD,FT->TBD"
    HIDDEN = ("mlp", "batch", "act_embed")


def _normalized(x: jax.Array, axis: int = -1) -> jax.Array:
    return normalized(x, EPSILON, axis).astype(x.dtype)


def _repeat(update: Callable, value, count: int, scan: bool):
    """Return update(update(...(value))), `count` times; as a loop if `scan`."""
    if scan:
        return jax.lax.scan(lambda value, _: (update(value), None), value, length=count)[0]
    for _ in range(count):
        value = update(value)
    return value


def _sinusoids(length: int, embed_dim: int) -> jax.Array:
    """Return sines and cosines of positions [T, D] (arXiv:1706.03762, section 3.5), of variance 1 / D."""
    frequencies, _ = rotary_frequencies(embed_dim, 10_000.0)
    angles = jnp.arange(length, dtype=jnp.float32)[:, None] * frequencies
    return math.sqrt(2 / embed_dim) * jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=1)


make = TRM  # call it with a mesh in context
