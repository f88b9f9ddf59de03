# SPDX-License-Identifier: Apache-2.0
"""An independent reader of Hugging Face's format, to check exports: computes logits in numpy from the files.

It shares no code with the conversion. The formulas are those of the `transformers` library's models, in float32, with
the weights of one layer in memory. Letters: T length, D embed, N and K heads, H head dim, V vocabulary.
"""

import math
import pathlib

import numpy as np
import safetensors

from files.json_reader import Object, read_json

MILLION = ("gemma3_text", "mixtral")  # values of model_type whose default base of rotary positions is a million
WITH_ONE = ("gemma2", "gemma3_text")  # values of model_type whose norms scale by 1 + weight, two for each sublayer


class Unreadable(ValueError):
    """The folder is not a model, or not one of a known family."""

    exit_status = 1


class _Index(Object):
    weight_map: dict[str, str]


LACKING = {  # values of keys that a config.json may lack, by model_type
    "gemma2": {
        "attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "query_pre_attn_scalar": 256, "head_dim": 256,
        "sliding_window": 4096, "sliding_window_pattern": 2,
    },
    "gemma3_text": {
        "query_pre_attn_scalar": 256, "head_dim": 256, "sliding_window": 4096, "sliding_window_pattern": 6,
    },
    "qwen2": {"max_window_layers": 28},
    "qwen3": {"head_dim": 128, "max_window_layers": 28},
}  # fmt: skip


def logits(folder: pathlib.Path, tokens_BT: np.ndarray) -> np.ndarray:
    """Return float32 [B, T, V] of int [B, T], each row a document.

    Raises:
      Unreadable: files are missing or damaged, or a key or a tensor is missing or of the wrong kind.
    """
    try:
        config = read_json(folder / "config.json", dict[str, object])
        return np.stack([_Reader(folder, config).logits(tokens_T) for tokens_T in tokens_BT])
    except (OSError, ArithmeticError, LookupError, TypeError, ValueError, safetensors.SafetensorError) as error:
        why = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise Unreadable(f"{folder}: cannot be read back: {why}") from error


class _Reader:
    def __init__(self, folder: pathlib.Path, config: dict):
        config = LACKING.get(config["model_type"], {}) | config
        self.folder, self.config, self.gemma = folder, config, config["model_type"] in WITH_ONE
        index, alone = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            self.where = read_json(index, _Index, max_bytes=100_000_000)["weight_map"]
        else:
            with safetensors.safe_open(alone, "numpy") as tensors:
                self.where = dict.fromkeys(tensors.keys(), alone.name)
        self.epsilon = config["rms_norm_eps"]

    def tensor(self, name: str) -> np.ndarray:
        """Return a tensor in float32."""
        with safetensors.safe_open(self.folder / self.where[name], "numpy") as tensors:
            return tensors.get_tensor(name).astype(np.float32)

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = self.tensor(name) + (1 if self.gemma else 0)
        return x / np.sqrt((x * x).mean(-1, keepdims=True, dtype=np.float32) + np.float32(self.epsilon)) * scale

    def linear(self, x: np.ndarray, name: str) -> np.ndarray:
        y = x @ self.tensor(f"{name}.weight").T
        return y + self.tensor(f"{name}.bias") if f"{name}.bias" in self.where else y

    def logits(self, tokens_T: np.ndarray) -> np.ndarray:
        """Return float32 [T, V]."""
        embedding = self.tensor("model.embed_tokens.weight")
        x = embedding[tokens_T] * np.float32(self.config["hidden_size"] ** 0.5 if self.gemma else 1)
        for number in range(self.config["num_hidden_layers"]):
            x = self.layer(x, number)
        head = embedding if self.config.get("tie_word_embeddings", self.gemma) else self.tensor("lm_head.weight")
        return _capped(self.norm(x, "model.norm.weight") @ head.T, self.config.get("final_logit_softcapping"))

    def layer(self, x: np.ndarray, number: int) -> np.ndarray:
        at = f"model.layers.{number}."
        y = self.attention(self.norm(x, at + "input_layernorm.weight"), at + "self_attn.", self.is_local(number))
        if not self.gemma:
            x = x + y
            x_normed = self.norm(x, at + "post_attention_layernorm.weight")
            if self.config["model_type"] == "mixtral":
                return x + self.mixture(x_normed, at + "block_sparse_moe.")
            return x + self.mlp(x_normed, at + "mlp.")
        x = x + self.norm(y, at + "post_attention_layernorm.weight")
        y = self.mlp(self.norm(x, at + "pre_feedforward_layernorm.weight"), at + "mlp.")
        return x + self.norm(y, at + "post_feedforward_layernorm.weight")

    def mixture(self, x: np.ndarray, at: str) -> np.ndarray:
        """Return the sum of a token's experts, weighted by the softmax over the logits of these experts only."""
        logits_TE = self.linear(x, at + "gate")
        chosen_TK = np.argsort(-logits_TE, axis=-1)[:, : self.config.get("num_experts_per_tok", 2)]
        logits_TK = np.take_along_axis(logits_TE, chosen_TK, axis=-1)
        weights_TK = np.exp(logits_TK - logits_TK.max(-1, keepdims=True))
        weights_TK /= weights_TK.sum(-1, keepdims=True)
        y = np.zeros_like(x)
        for expert in range(logits_TE.shape[1]):
            tokens, places = np.nonzero(chosen_TK == expert)
            out = self.mlp(x[tokens], at + f"experts.{expert}.", ("w1", "w3", "w2"))
            y[tokens] += weights_TK[tokens, places, None] * out
        return y

    def mlp(self, x: np.ndarray, at: str, names=("gate_proj", "up_proj", "down_proj")) -> np.ndarray:
        gate_name, up_name, down_name = names
        gate = self.linear(x, at + gate_name)
        if (self.config.get("hidden_activation") or self.config.get("hidden_act")) == "silu":
            with np.errstate(over="ignore"):  # exp(-gate) may be infinite, and the result 0
                gate = gate / (1 + np.exp(-gate))
        else:
            gate = 0.5 * gate * (1 + np.tanh(np.float32(math.sqrt(2 / math.pi)) * (gate + 0.044715 * gate**3)))
        return self.linear(gate * self.linear(x, at + up_name), at + down_name)

    def attention(self, x: np.ndarray, at: str, is_local: bool) -> np.ndarray:
        config, length = self.config, len(x)
        heads = config["num_attention_heads"]
        kv_heads = config.get("num_key_value_heads") or heads
        width = config.get("head_dim") or config["hidden_size"] // heads
        q_TNH = self.linear(x, at + "q_proj").reshape(length, heads, width)
        k_TKH = self.linear(x, at + "k_proj").reshape(length, kv_heads, width)
        v_TKH = self.linear(x, at + "v_proj").reshape(length, kv_heads, width)
        if at + "q_norm.weight" in self.where:
            q_TNH, k_TKH = self.norm(q_TNH, at + "q_norm.weight"), self.norm(k_TKH, at + "k_norm.weight")
        cos, sin = _rotations(length, width, self.rope(is_local), config["max_position_embeddings"])
        q_TNH, k_TKH = _rotated(q_TNH, cos, sin), _rotated(k_TKH, cos, sin)
        k_TNH, v_TNH = (np.repeat(a, heads // kv_heads, axis=1) for a in (k_TKH, v_TKH))
        scale = (config.get("query_pre_attn_scalar") or width) ** -0.5
        scores = np.einsum("tnh,snh->nts", q_TNH, k_TNH) * np.float32(scale)
        if config["model_type"] == "gemma2":  # other families may have the key but do not read it
            scores = _capped(scores, config.get("attn_logit_softcapping"))
        back = np.arange(length)[:, None] - np.arange(length)[None]
        seen = (back >= 0) & (back < config["sliding_window"] if is_local else True)
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        y = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v_TNH)
        return self.linear(y.reshape(length, -1), at + "o_proj")

    def is_local(self, number: int) -> bool:
        """Return whether a layer has the sliding window."""
        config = self.config
        if config.get("layer_types") and config["model_type"] != "mixtral":
            return config["layer_types"][number] == "sliding_attention"
        if config["model_type"].startswith("qwen"):
            return bool(config.get("use_sliding_window")) and number >= config["max_window_layers"]
        if self.gemma:
            return (number + 1) % config["sliding_window_pattern"] != 0
        return bool(config.get("sliding_window"))

    def rope(self, is_local: bool) -> dict:
        """Return the rotary parameters of a layer, from either of the two forms of config.json."""
        config = self.config
        if config.get("rope_parameters"):
            rope = config["rope_parameters"]
            return rope["sliding_attention" if is_local else "full_attention"] if "full_attention" in rope else rope
        if is_local and config["model_type"] == "gemma3_text":
            return {"rope_theta": config.get("rope_local_base_freq", 10_000.0)}
        theta = config.get("rope_theta", 1e6 if config["model_type"] in MILLION else 10_000.0)
        return {"rope_theta": theta} | (config.get("rope_scaling") or {})


def _capped(x: np.ndarray, cap: float | None) -> np.ndarray:
    return np.float32(cap) * np.tanh(x / np.float32(cap)) if cap else x


def _rotations(length: int, width: int, rope: dict, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Return cos and sin, float32 [T, H / 2]."""
    theta, factor = rope["rope_theta"], rope.get("factor", 1.0)
    kind = rope.get("rope_type", rope.get("type", "default"))
    original, magnitude = rope.get("original_max_position_embeddings") or longest, 1.0
    frequencies = []
    for pair in range(width // 2):
        frequency = theta ** (-2 * pair / width)
        turns = original * frequency / (2 * math.pi)
        slow = frequency / factor
        if kind == "linear":
            frequency = slow
        elif kind == "llama3":
            smooth = min(max((turns - 1) / 3, 0), 1)
            frequency = smooth * frequency + (1 - smooth) * slow
        elif kind == "yarn":
            first, last = (
                width * math.log(original / (2 * math.pi * n)) / (2 * math.log(theta)) for n in (32, 1)
            )  # fmt: skip
            first, last = max(math.floor(first), 0), min(math.ceil(last), width - 1)
            ramp = min(max((pair - first) / max(last - first, 1e-3), 0), 1)
            frequency, magnitude = ramp * slow + (1 - ramp) * frequency, 0.1 * math.log(factor) + 1
        frequencies.append(frequency)
    angles = np.arange(length)[:, None] * np.array(frequencies)
    return (magnitude * np.cos(angles)).astype(np.float32), (magnitude * np.sin(angles)).astype(np.float32)


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    first, second = np.split(x, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
