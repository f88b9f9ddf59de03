# SPDX-License-Identifier: Apache-2.0
"""The one mapping of Hugging Face's config.json and tensors to ours, for each family of models.

A family is an entry of FAMILIES. Names and defaults are those of the `transformers` library. Its versions from 5 on
write rotary keys in another form; `_classic` converts them to the older form, which all tools read.
"""

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import NamedTuple

from configs.errors import ConfigError, shown


class Rule(NamedTuple):
    """The place of their tensors in our tree; a rule does not apply to a model without our array.

    Attributes:
        theirs: their name, with {} for each leading dim of our array that counts them (layers, experts).
        ours: dotted name of our array.
        inputs: the number of dims of our array, after the leading ones, that a product sums over; theirs is [out, in].
            0: theirs is ours flattened; None: both have the same shape.
    """

    theirs: str
    ours: str
    inputs: int | None = 0


LAYER, OURS = "model.layers.{}.", "stack.blocks."
RULES = (
    Rule("model.embed_tokens.weight", "embed.embedding", None),
    Rule(LAYER + "input_layernorm.weight", OURS + "attention_norm.scale"),
    Rule(LAYER + "self_attn.q_proj.weight", OURS + "attention.query", 1),
    Rule(LAYER + "self_attn.q_proj.bias", OURS + "attention.query_bias"),
    Rule(LAYER + "self_attn.k_proj.weight", OURS + "attention.key", 1),
    Rule(LAYER + "self_attn.k_proj.bias", OURS + "attention.key_bias"),
    Rule(LAYER + "self_attn.v_proj.weight", OURS + "attention.value", 1),
    Rule(LAYER + "self_attn.v_proj.bias", OURS + "attention.value_bias"),
    Rule(LAYER + "self_attn.o_proj.weight", OURS + "attention.out", 2),
    Rule(LAYER + "self_attn.q_norm.weight", OURS + "attention.query_norm.scale"),
    Rule(LAYER + "self_attn.k_norm.weight", OURS + "attention.key_norm.scale"),
    Rule("model.norm.weight", "norm.scale"),
    Rule("lm_head.weight", "head.kernel", 1),
)
SWIGLU = (
    Rule(LAYER + "mlp.gate_proj.weight", OURS + "mlp.gate", 1),
    Rule(LAYER + "mlp.up_proj.weight", OURS + "mlp.up", 1),
    Rule(LAYER + "mlp.down_proj.weight", OURS + "mlp.down", 1),
)
EXPERTS = (
    Rule(LAYER + "block_sparse_moe.gate.weight", OURS + "mlp.router", 1),
    Rule(LAYER + "block_sparse_moe.experts.{}.w1.weight", OURS + "mlp.gate", 1),
    Rule(LAYER + "block_sparse_moe.experts.{}.w3.weight", OURS + "mlp.up", 1),
    Rule(LAYER + "block_sparse_moe.experts.{}.w2.weight", OURS + "mlp.down", 1),
)
NORMS_BEFORE = (Rule(LAYER + "post_attention_layernorm.weight", OURS + "mlp_norm.scale"),)
NORMS_AROUND = (
    Rule(LAYER + "post_attention_layernorm.weight", OURS + "attention_post_norm.scale"),
    Rule(LAYER + "pre_feedforward_layernorm.weight", OURS + "mlp_norm.scale"),
    Rule(LAYER + "post_feedforward_layernorm.weight", OURS + "mlp_post_norm.scale"),
)
# Some published files have these tensors, which follow from the configuration; they are not read.
UNREAD = (".rotary_emb.inv_freq",)

KEYS = {  # of every family: key of config.json -> key of config.model
    "hidden_size": "embed_dim", "num_hidden_layers": "num_layers", "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads", "head_dim": "head_dim", "intermediate_size": "mlp_dim",
    "vocab_size": "vocab_size", "max_position_embeddings": "max_length", "rms_norm_eps": "norm_epsilon",
    "tie_word_embeddings": "tie_embeddings", "rope_theta": "rope_theta",
}  # fmt: skip
CAPS = {
    "final_logit_softcapping": "logit_soft_cap", "attn_logit_softcapping": "attention_soft_cap",
    "query_pre_attn_scalar": "query_scalar",
}  # fmt: skip
MODEL = {  # values of other keys of config.model, unless a family or its config.json says otherwise
    "norm_from_one": False, "post_norms": False, "embed_scale": 1.0, "biases": "none", "qk_norm": False,
    "query_scalar": 0.0, "logit_soft_cap": 0.0, "attention_soft_cap": 0.0, "local_rope_theta": 0.0, "mup_base_dim": 0,
    "num_experts": 0,
}  # fmt: skip
GEMMA = {"norm_from_one": True, "post_norms": True, "embed_scale": 0.0}
MIXTURE = {"router": "softmax", "gate_scale": 1.0, "shared_experts": 0, "expert_capacity": 0.0}
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


@dataclasses.dataclass(frozen=True)
class Family:
    """A kind of model that `transformers` knows.

    Attributes:
      architecture: name of its class in `transformers`.
      model: keys of config.model that its config.json does not change.
      keys: {key of config.json: key of config.model}, in addition to KEYS; null there is 0 here.
      defaults: values of keys that its config.json may lack.
      required: {key of config.json: its one allowed value}, because Torus supports no other.
      least: {key of config.json: its smallest allowed value}, because Torus would compute smaller ones differently.
      rules: for its norms and its MLP or experts, in addition to RULES.
      zeros: our arrays that it lacks, and that are therefore 0.
      settings: other configuration keys of a run that begins from it.
      activation: its key of config.json for the activation.
      whole_heads: whether `transformers` refuses a hidden_size that the number of heads does not divide.
    """

    architecture: str
    model: dict = dataclasses.field(default_factory=dict)
    keys: dict = dataclasses.field(default_factory=dict)
    defaults: dict = dataclasses.field(default_factory=dict)
    required: dict = dataclasses.field(default_factory=dict)
    least: dict = dataclasses.field(default_factory=dict)
    rules: tuple[Rule, ...] = NORMS_BEFORE + SWIGLU
    zeros: tuple[str, ...] = ()
    settings: dict = dataclasses.field(default_factory=dict)
    activation: str = "hidden_act"
    whole_heads: bool = False


NO_BIASES = {"attention_bias": False}
UNTIED = {"tie_word_embeddings": False, "rope_theta": 10_000.0}
OF_QWEN = UNTIED | {"use_sliding_window": False, "max_window_layers": 28}
OF_GEMMA = {
    "tie_word_embeddings": True, "rope_theta": 10_000.0, "head_dim": 256, "query_pre_attn_scalar": 256,
    "sliding_window": 4096, "sliding_window_pattern": 2,
}  # fmt: skip
FAMILIES = {  # by model_type
    "llama": Family(
        "LlamaForCausalLM", defaults=UNTIED, required=NO_BIASES | {"mlp_bias": False, "sliding_window": None},
        whole_heads=True,
    ),
    "mistral": Family("MistralForCausalLM", defaults=UNTIED | {"sliding_window": 4096}),
    "qwen2": Family("Qwen2ForCausalLM", model={"biases": "qkv"}, defaults=OF_QWEN),
    "qwen3": Family(
        "Qwen3ForCausalLM", model={"qk_norm": True}, defaults=OF_QWEN | {"head_dim": 128}, required=NO_BIASES,
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM", model=GEMMA, keys=CAPS, rules=NORMS_AROUND + SWIGLU, activation="hidden_activation",
        whole_heads=True,
        required=NO_BIASES | {"use_bidirectional_attention": False},
        defaults=OF_GEMMA | {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    ),
    "gemma3_text": Family(
        "Gemma3ForCausalLM", model=GEMMA | {"qk_norm": True}, rules=NORMS_AROUND + SWIGLU,
        keys=CAPS | {"rope_local_base_freq": "local_rope_theta"},
        activation="hidden_activation", whole_heads=True,
        # Their configuration has a cap on scores, but their code does not apply it.
        required=NO_BIASES | {"use_bidirectional_attention": False, "attn_logit_softcapping": None},
        defaults=OF_GEMMA | {"rope_theta": 1e6, "rope_local_base_freq": 10_000.0, "sliding_window_pattern": 6},
    ),
    "mixtral": Family(
        "MixtralForCausalLM", model=MIXTURE, rules=NORMS_BEFORE + EXPERTS, zeros=(OURS + "mlp.bias",),
        keys={"num_local_experts": "num_experts", "num_experts_per_tok": "experts_per_token"},
        defaults={
            "tie_word_embeddings": False, "rope_theta": 1e6, "num_local_experts": 8, "num_experts_per_tok": 2,
            "sliding_window": None,
        },
        # Their code does not read it: all layers have the window.
        required={"layer_types": None, "sliding_window_pattern": None},
        # The gate of a single expert is 1 in theirs and its score in ours (layers/experts/experts.py).
        least={"num_local_experts": 2, "num_experts_per_tok": 2},
        settings={"optimizer.bias_step": 0.0},  # a changed bias could not be exported
    ),
}  # fmt: skip


def family_of(values: dict) -> Family:
    """Return the family of a config.json; ConfigError if there is none."""
    kind = values.get("model_type")
    if kind not in FAMILIES:
        raise ConfigError(f"model_type={shown(kind)} cannot be converted; supported: {', '.join(FAMILIES)}")
    return FAMILIES[kind]


def model_section(values: dict) -> dict:
    """Return the keys of config.model that a config.json determines.

    Raises:
      ConfigError: names a key whose value is missing or not supported by our models.
    """
    family = family_of(values)
    values = family.defaults | _classic(values)
    for key, wanted in family.required.items():
        if values.get(key) not in (None, wanted):
            found = shown(values[key])
            raise ConfigError(f"{key}={found} is not supported for {values['model_type']}, only {wanted}")
    for key, least in family.least.items():
        if (values[key] or 0) < least:
            raise ConfigError(f"{key}={values[key]} is not supported for {values['model_type']}, only {least} or more")
    values["num_key_value_heads"] = values.get("num_key_value_heads") or values.get("num_attention_heads")
    if missing := [key for key in KEYS if values.get(key) is None and key != "head_dim"]:
        raise ConfigError(f"{missing[0]} is missing")
    values["head_dim"] = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
    activation = values.get(family.activation) or values.get("hidden_act")
    if activation not in ACTIVATIONS:
        raise ConfigError(f"{family.activation}={shown(activation)} is not supported, only {', '.join(ACTIVATIONS)}")
    model = MODEL | family.model | {ours: values[theirs] for theirs, ours in KEYS.items()}
    model |= {ours: values.get(theirs) or 0 for theirs, ours in family.keys.items()}
    model["rope_theta"] = float(model["rope_theta"])
    model |= _window(values) | _rope(values)
    if not model["sliding_window"]:
        model["local_rope_theta"] = 0.0
    return model | {"activation": ACTIVATIONS[activation]}


def config_json(model: dict) -> dict | None:
    """Return a config.json of the first family that has such a model; None if there is none.

    Args:
      model: the section of the configuration, head_dim not 0.
    """
    return next((values for values, others in _candidates(model) if not others), None)


def nearest(model: dict) -> str:
    """Return the family nearest to an unsupported model, and the keys that would have to change."""
    values, others = min(_candidates(model), key=lambda found: ("num_experts" in found[1], len(found[1])))
    wanted = ", ".join(f"model.{key}={value}" for key, value in others.items())
    return f"the nearest is {values['model_type']}, which has {wanted}"


def _candidates(model: dict) -> Iterator[tuple[dict, dict]]:
    """Yield each family's config.json for a model, and the keys of the model that it would change."""
    model = _explicit(model)
    for kind, family in FAMILIES.items():
        values = _values(kind, family, model)
        with contextlib.suppress(ConfigError):
            found = _explicit(model_section(values))
            if family.whole_heads:
                found["embed_dim"] = max(1, model["embed_dim"] // model["num_heads"]) * model["num_heads"]
            yield values, {key: value for key, value in found.items() if model[key] != value}


def _explicit(model: dict) -> dict:
    """Return a model with the values that 0 means: queries scaled by head_dim, one rope_theta for all layers."""
    of_all = model["rope_theta"] if model["sliding_window"] and model["rope_scaling"] == "none" else 0.0
    return model | {
        "query_scalar": model["query_scalar"] or model["head_dim"],
        "local_rope_theta": model["local_rope_theta"] or of_all,
    }


def _values(kind: str, family: Family, model: dict) -> dict:
    """Return the config.json that a family would have for a model; it may be of a slightly different model."""
    values = {"architectures": [family.architecture], "model_type": kind, "torch_dtype": "float32"}
    values |= {theirs: model[ours] for theirs, ours in KEYS.items()}
    values |= {theirs: model[ours] or None for theirs, ours in family.keys.items()}
    if values.get("rope_local_base_freq", 0) is None:  # theirs has none that is scaled as in other layers
        del values["rope_local_base_freq"]
    if "query_pre_attn_scalar" in values:  # transformers refuses a value that is not an integer
        values["query_pre_attn_scalar"] = round(model["query_scalar"])
    values |= {family.activation: {ours: theirs for theirs, ours in ACTIVATIONS.items()}[model["activation"]]}
    return values | family.required | _window_values(family, model) | _rope_values(model)


def _window_values(family: Family, model: dict) -> dict:
    """Return the part of a config.json about sliding windows, as the family writes it."""
    values, window, size = {}, model["sliding_window"], model["num_layers"]
    every = 0 if "layer_types" in family.required else model["global_every"]
    alternates = "sliding_window_pattern" in family.defaults  # Gemma, whose code needs a window that no layer has
    if window or ("sliding_window" in family.defaults and not alternates):
        values["sliding_window"] = window or None
    if every:
        values["sliding_window_pattern"] = every
    of_qwen = "use_sliding_window" in family.defaults
    if every or of_qwen or "sliding_window_pattern" in family.defaults:
        local = [bool(window) and not (every and (layer + 1) % every == 0) for layer in range(size)]
        values |= {"layer_types": ["sliding_attention" if is_local else "full_attention" for is_local in local]}
    if of_qwen:
        values |= {"use_sliding_window": bool(window), "max_window_layers": 0 if window else size}
    return values


def _rope_values(model: dict) -> dict:
    """Return the part of a config.json about scaled rotary positions; {} without a scaling."""
    kind = model["rope_scaling"]
    if kind == "none":
        return {}
    scaling = {"rope_type": kind, "factor": model["rope_factor"]} | FIXED_OF_ROPE[kind]
    if model["rope_original_length"]:
        scaling["original_max_position_embeddings"] = model["rope_original_length"]
    return {"rope_scaling": scaling}


def _classic(values: dict) -> dict:
    """Return a config.json with rope_theta, rope_scaling and rope_local_base_freq in place of rope_parameters."""
    if not values.get("rope_parameters"):
        return values
    if values.get("rope_scaling"):  # transformers computes this one
        raise ConfigError("rope_scaling and rope_parameters are both there; leave one of them out")
    rope, classic = values["rope_parameters"], dict(values)
    if "full_attention" in rope:
        local = rope.get("sliding_attention", {})
        if (kind := local.get("rope_type", "default")) != "default":
            raise ConfigError(f"rope_parameters of sliding_attention: rope_type={shown(kind)} is not supported")
        rope, classic["rope_local_base_freq"] = rope["full_attention"], _theta(local)
    classic["rope_theta"] = _theta(rope)
    classic["rope_scaling"] = {key: value for key, value in rope.items() if key != "rope_theta"}
    return classic


def _theta(rope: dict) -> float:
    if rope.get("rope_theta") is None:
        raise ConfigError("rope_theta is missing in rope_parameters")
    return rope["rope_theta"]


def _local_layers(values: dict, size: int) -> list[bool]:
    """Return which layers have the sliding window, for a config.json without layer_types."""
    if every := values.get("sliding_window_pattern"):  # Gemma's: all but every n-th
        return [(layer + 1) % every != 0 for layer in range(size)]
    if "use_sliding_window" in values:  # Qwen's: the upper ones
        first = values.get("max_window_layers") or 0
        return [bool(values["use_sliding_window"]) and layer >= first for layer in range(size)]
    return [bool(values.get("sliding_window"))] * size


def _window(values: dict) -> dict:
    """Return sliding_window and global_every; ConfigError if the layers alternate in a way that ours cannot."""
    size, kinds = values["num_hidden_layers"], values.get("layer_types")
    if unknown := set(kinds or ()) - {"sliding_attention", "full_attention"}:
        raise ConfigError(f"layer_types has {shown(min(unknown))}, which is not supported")
    if kinds and len(kinds) != size:
        raise ConfigError(f"layer_types has {len(kinds)} entries, but num_hidden_layers={size}")
    local = [kind == "sliding_attention" for kind in kinds] if kinds else _local_layers(values, size)
    if not any(local):
        return {"sliding_window": 0, "global_every": 0}
    every = 0 if all(local) else local.index(False) + 1
    if every == 1 or (every and local != [(layer + 1) % every != 0 for layer in range(size)]):
        raise ConfigError("layer_types: only every n-th layer can be full_attention, the others sliding_attention")
    if not values.get("sliding_window"):
        raise ConfigError("sliding_window is missing, but some layers need it")
    return {"sliding_window": values["sliding_window"], "global_every": every}


FIXED_OF_ROPE = {  # keys of rope_scaling for which our layers support one value
    "linear": {},
    "llama3": {"low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "yarn": {"beta_fast": 32.0, "beta_slow": 1.0},
}


def _rope(values: dict) -> dict:
    """Return the scaling of rotary positions; ConfigError names an unsupported key or value."""
    key_of_file = "rope_parameters" if values.get("rope_parameters") else "rope_scaling"
    scaling = dict(values.get("rope_scaling") or {})
    older = scaling.pop("type", None)
    kind = scaling.pop("rope_type", None) or older or "default"
    if kind == "default":
        return {"rope_scaling": "none", "rope_factor": 1.0, "rope_original_length": 0}
    if kind not in FIXED_OF_ROPE:
        raise ConfigError(
            f"{key_of_file}: rope_type={shown(kind)} is not supported, only default, {', '.join(FIXED_OF_ROPE)}"
        )
    if not (factor := scaling.pop("factor", None)):
        raise ConfigError(f"{key_of_file}: factor is missing for rope_type={kind}")
    fixed = FIXED_OF_ROPE[kind] | {"partial_rotary_factor": 1.0}
    length = scaling.pop("original_max_position_embeddings", None)
    if kind == "yarn":
        fixed |= {"attention_factor": 0.1 * math.log(factor) + 1, "truncate": True}
    for key, value in scaling.items():
        if value is not None and value != fixed.get(key):
            raise ConfigError(f"{key_of_file}: {shown(key)}={shown(value)} is not supported for rope_type={kind}")
    if kind == "linear":
        return {"rope_scaling": kind, "rope_factor": factor, "rope_original_length": 0}
    length = length or values["max_position_embeddings"]
    return {"rope_scaling": kind, "rope_factor": factor, "rope_original_length": length}
