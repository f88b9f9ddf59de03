# SPDX-License-Identifier: Apache-2.0
"""The schema of a config.json in Hugging Face's format: the keys that are read, of all families together.

hugging_face_families.py maps the keys to those of Torus. What depends on several keys is checked with the model.
"""

from typing import Annotated

import pydantic

from configs.base import KEYS
from configs.key import LARGEST_INT
from files.json_reader import Object

Count = Annotated[int, pydantic.Field(ge=1, le=LARGEST_INT)] | None
Window = Annotated[int, pydantic.Field(ge=0, le=LARGEST_INT)] | None  # 0: none
Number = Annotated[float, pydantic.Field(gt=0, allow_inf_nan=False)] | None
Flag, Name = bool | None, str | None


class Rope(Object, total=False):
    """Rotary positions; hugging_face_families.py checks the other keys."""

    type: Name
    rope_type: Name
    rope_theta: Number
    factor: Number
    original_max_position_embeddings: Count


class RopeOfLayers(Rope, total=False):
    """The same for all layers, or for each kind of layer."""

    full_attention: Rope
    sliding_attention: Rope


class Config(Object, total=False):
    """The keys of a config.json that are read."""

    model_type: Name
    hidden_size: Count
    num_hidden_layers: Annotated[int, pydantic.Field(ge=1, le=KEYS["model.num_layers"].largest)] | None
    num_attention_heads: Count
    num_key_value_heads: Count
    head_dim: Count
    intermediate_size: Count
    vocab_size: Count
    max_position_embeddings: Count
    num_local_experts: Count
    num_experts_per_tok: Count
    rms_norm_eps: Number
    tie_word_embeddings: Flag
    hidden_act: Name
    hidden_activation: Name
    rope_theta: Number
    rope_local_base_freq: Number
    rope_scaling: Rope | None
    rope_parameters: RopeOfLayers | None
    final_logit_softcapping: Number
    attn_logit_softcapping: Number
    query_pre_attn_scalar: Number
    layer_types: list[str] | None
    sliding_window: Window
    sliding_window_pattern: Window
    use_sliding_window: Flag
    max_window_layers: Window
