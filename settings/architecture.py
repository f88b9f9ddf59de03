# SPDX-License-Identifier: Apache-2.0
"""Checks that the sizes of a model are consistent."""

import math

from ml_collections import ConfigDict

from configs.errors import ConfigError

MOST_EXPERTS = 1_000_000  # of all layers
MOST_UNROLLED = 64  # layers; the time to assemble them grows with the cube of their number, 15 s for 100


def attends(model: ConfigDict) -> bool:
    """Return whether a model has attention, and so reads `model.head_dim`."""
    return model.name in ("decoder_lm", "vector_decoder") or (model.name == "trm" and model.mixer == "attention")


def head_dim(model: ConfigDict) -> int:
    """Return the width of a head."""
    return model.head_dim or model.embed_dim // model.num_heads


def has_remat(model: ConfigDict) -> bool:
    """Return whether a model reads `model.remat`."""
    return model.name in ("decoder_lm", "trm")


def recompute_flags(model: ConfigDict) -> list[str]:
    """Return the flag with which the step needs the least memory; none if it is set, or if the model has no remat."""
    return ["--config.model.remat=full"] if has_remat(model) and model.remat != "full" else []


def check(config: ConfigDict) -> None:
    """Raise ConfigError if the sizes of a model, or the length of a recursive model, are inconsistent."""
    model = config.model
    if attends(model):
        _check_heads(model)
    every, layers = model.global_every, model.num_layers
    if every and layers < 2:
        raise ConfigError(
            f"model.global_every={every} makes layers of two kinds and needs at least 2 layers; set it to 0"
        )
    if every == 1 or every > layers:
        raise ConfigError(
            f"model.global_every={every} must lie between 2 and model.num_layers={layers}, "
            "so that there are layers of both kinds; set it to 0 where all are alike"
        )
    if model.num_experts and model.experts_per_token > model.num_experts:
        most = model.num_experts
        raise ConfigError(f"model.experts_per_token={model.experts_per_token} must be at most model.num_experts={most}")
    if model.num_layers * model.num_experts > MOST_EXPERTS:
        raise ConfigError(
            f"model.num_layers={model.num_layers} with model.num_experts={model.num_experts} have more than "
            f"{MOST_EXPERTS:,} experts together, the most that can be named; use fewer"
        )
    if model.name == "trm":
        _check_recursion(model, config.train.sequence_length)
        _check_parallel(config.supervision)


def _check_heads(model: ConfigDict) -> None:
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads} is not a multiple of model.num_kv_heads={model.num_kv_heads}; "
            f"num_kv_heads could be {divisors_text(model.num_heads, model.num_kv_heads)}"
        )
    if not model.head_dim:
        advice = ", or set --config.model.head_dim"
        divisible("model.embed_dim", model.embed_dim, "model.num_heads", model.num_heads, advice)
    if head_dim(model) % 2:
        raise ConfigError("the head dim (model.head_dim, or embed_dim / num_heads) must be even for rotary positions")


def _check_recursion(model: ConfigDict, length: int) -> None:
    if model.num_layers > MOST_UNROLLED:
        raise ConfigError(
            f"model.num_layers={model.num_layers} must be at most {MOST_UNROLLED} with model.name=trm, whose layers "
            "are compiled one by one; recursion is what makes it deep"
        )
    if length != model.max_length:
        raise ConfigError(
            f"train.sequence_length={length} must be model.max_length={model.max_length}: the cells of a puzzle"
        )
    if model.gradient_cycles > model.high_cycles:
        raise ConfigError(
            f"model.gradient_cycles={model.gradient_cycles} exceeds model.high_cycles={model.high_cycles}; "
            f"use at most {model.high_cycles}"
        )
    if model.low_latents and not model.low_cycles:
        raise ConfigError(f"model.low_cycles=0 must be greater than 0 with model.low_latents={model.low_latents}")
    divisible("model.low_cycles", model.low_cycles, "model.low_latents", model.low_latents or 1)
    room = model.prefix_length * model.embed_dim
    if model.prefix_length and model.puzzle_dim > room:
        raise ConfigError(
            f"model.puzzle_dim={model.puzzle_dim} does not fit model.prefix_length={model.prefix_length} positions of "
            f"model.embed_dim={model.embed_dim}; use at most {room}"
        )


def _check_parallel(supervision: ConfigDict) -> None:
    if supervision.parallel > 1 and not supervision.random_start and not supervision.path_noise:
        raise ConfigError(
            f"supervision.parallel={supervision.parallel} needs supervision.random_start or supervision.path_noise: "
            "without either, all latents of a puzzle are the same; use --config.supervision.random_start=1"
        )


def divisible(key: str, value: int, by: str, unit: int, otherwise: str = "") -> None:
    """Raise ConfigError if the value of a key is not a multiple of `unit`; the message suggests valid values."""
    if value % unit:
        raise ConfigError(
            f"{key}={value} is not a multiple of {by}={unit}; use {multiples_text(value, unit)}{otherwise}"
        )


def multiples_text(value: int, unit: int) -> str:
    """Return the multiples of a unit that are nearest to a value, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def divisors_text(value: int, near: int) -> str:
    """Return the two divisors of a value that are nearest to another, in words."""
    nearest = sorted(divisors(value), key=lambda divisor: abs(divisor - near))
    return " or ".join(str(divisor) for divisor in sorted(nearest[:2]))


def divisors(value: int) -> list[int]:
    """Return the divisors of a number in ascending order, in O(sqrt(value)) time."""
    small = [divisor for divisor in range(1, math.isqrt(value) + 1) if value % divisor == 0]
    return sorted({*small, *(value // divisor for divisor in small)})
