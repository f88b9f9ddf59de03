# SPDX-License-Identifier: Apache-2.0
"""What must be consistent in a model: its section alone, and of a recursive one what goes with it."""

import math

from ml_collections import ConfigDict

from configs.base import ConfigError


def check(model: ConfigDict) -> None:
    """Raise ConfigError where the keys of a `model` section do not go together."""
    if model.num_heads % model.num_kv_heads:
        raise ConfigError(
            f"model.num_heads={model.num_heads} is not a multiple of model.num_kv_heads={model.num_kv_heads}; "
            f"num_kv_heads could be {divisors_text(model.num_heads, model.num_kv_heads)}"
        )
    if not model.head_dim and model.embed_dim % model.num_heads:
        raise ConfigError(
            f"model.embed_dim={model.embed_dim} is not a multiple of model.num_heads={model.num_heads}; "
            f"use {multiples_text(model.embed_dim, model.num_heads)}, or set model.head_dim"
        )
    if (model.head_dim or model.embed_dim // model.num_heads) % 2:
        raise ConfigError("the head dim (model.head_dim, or embed_dim / num_heads) must be even for rotary positions")
    _check_layer_kinds(model)
    _check_rope(model)
    _check_experts(model)


def _check_experts(model: ConfigDict) -> None:
    count = model.num_experts
    if not count:
        return
    if model.experts_per_token > count:
        raise ConfigError(
            f"model.experts_per_token={model.experts_per_token} must be at most model.num_experts={count}"
        )
    wanted = {"name": "decoder_lm", "activation": "silu", "quantization": "none", "biases": "none", "mup_base_dim": 0}
    for key, dense in wanted.items():
        if model[key] != dense:
            raise ConfigError(f"model.{key}={model[key]} does not go with model.num_experts={count}; use {dense}")


def _check_layer_kinds(model: ConfigDict) -> None:
    every = model.global_every
    if every and not model.sliding_window:
        raise ConfigError(
            f"model.global_every={every} needs model.sliding_window, which the other layers have; "
            "set it to a number of tokens, or model.global_every=0"
        )
    if every == 1 or every > model.num_layers:
        raise ConfigError(
            f"model.global_every={every} must lie between 2 and model.num_layers={model.num_layers}, "
            "so that there are layers of both kinds; set it to 0 where all are alike"
        )


def _check_rope(model: ConfigDict) -> None:
    scaling, factor, length = model.rope_scaling, model.rope_factor, model.rope_original_length
    if model.local_rope_theta and (model.local_rope_theta <= 1 or not model.sliding_window):
        raise ConfigError(
            f"model.local_rope_theta={model.local_rope_theta} must be greater than 1, and is read by layers with "
            "model.sliding_window alone; set both, or neither"
        )
    if not 1 <= factor < math.inf:
        raise ConfigError(f"model.rope_factor={factor} must be 1 or greater")
    if factor != 1 and scaling == "none":
        raise ConfigError(f"model.rope_factor={factor} needs model.rope_scaling: linear, llama3 or yarn")
    if length and scaling not in ("llama3", "yarn"):
        raise ConfigError(
            f"model.rope_original_length={length} is not read by model.rope_scaling={scaling}; use llama3 or yarn, or 0"
        )
    if not length and scaling in ("llama3", "yarn"):
        raise ConfigError(
            f"model.rope_original_length=0 must be greater than 0 for model.rope_scaling={scaling}: "
            "the tokens that the weights were first trained on"
        )


def check_recursion(config: ConfigDict) -> None:
    """Raise ConfigError where a recursive model does not go with its objective, mesh, length or cycles."""
    model, mesh = config.model, config.mesh
    if (model.name == "trm") != (config.train.objective == "recursive"):
        raise ConfigError(
            f"model.name={model.name} does not go with train.objective={config.train.objective}; "
            "trm has recursive, and recursive has trm"
        )
    if model.name != "trm":
        return
    for axis in ("context", "expert", "model"):
        if mesh[axis] > 1:
            raise ConfigError(f"mesh.{axis}={mesh[axis]} must be 1 for model.name=trm; use mesh.data or mesh.fsdp")
    if config.train.sequence_length != model.max_length:
        raise ConfigError(
            f"train.sequence_length={config.train.sequence_length} must be model.max_length={model.max_length}: "
            "the cells of a puzzle"
        )
    if model.low_latents and (not model.low_cycles or model.low_cycles % model.low_latents):
        raise ConfigError(
            f"model.low_cycles={model.low_cycles} must be a positive multiple of "
            f"model.low_latents={model.low_latents}; use {multiples_text(model.low_cycles, model.low_latents)}"
        )
    room = model.prefix_length * model.embed_dim
    if model.prefix_length and model.puzzle_dim > room:
        raise ConfigError(
            f"model.puzzle_dim={model.puzzle_dim} does not fit model.prefix_length={model.prefix_length} positions of "
            f"model.embed_dim={model.embed_dim}; use at most {room}"
        )


def multiples_text(value: int, unit: int) -> str:
    """Return the multiples of a unit next to a value, in words."""
    below = value // unit * unit
    return f"{below} or {below + unit}" if below else f"{unit}"


def divisors_text(value: int, near: int) -> str:
    """Return the two divisors of a value that are nearest to another, in words."""
    divisors = sorted((d for d in range(1, value + 1) if value % d == 0), key=lambda d: abs(d - near))
    return " or ".join(str(d) for d in sorted(divisors[:2]))
