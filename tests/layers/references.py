# SPDX-License-Identifier: Apache-2.0
"""The layers once more, in float64 numpy, written from the papers with plain loops; slow and obvious."""

import numpy as np


def attention(q, k, v, mask, score_cap=0.0):
    """softmax(q k^T / sqrt(H)) v, one query head at a time; head n reads key head n // (N / K) (arXiv:2305.13245)."""
    num_heads, num_kv_heads, head_dim = q.shape[2], k.shape[2], q.shape[3]
    heads = []
    for head in range(num_heads):
        kv_head = head // (num_heads // num_kv_heads)
        scores = q[:, :, head] @ k[:, :, kv_head].swapaxes(1, 2) / np.sqrt(head_dim)
        if score_cap:
            scores = score_cap * np.tanh(scores / score_cap)
        scores = np.exp(np.where(mask, scores, -np.inf))
        heads.append(scores / scores.sum(-1, keepdims=True) @ v[:, :, kv_head])
    return np.stack(heads, axis=2)


def mask(query_segments, key_segments, query_positions, key_positions, window=0):
    """Which key each query may see, pair by pair."""
    (batch, queries), keys = query_segments.shape, key_segments.shape[1]
    seen = np.zeros((batch, queries, keys), bool)
    for b, t, s in np.ndindex(seen.shape):
        back = query_positions[b, t] - key_positions[b, s]
        same = query_segments[b, t] == key_segments[b, s]
        seen[b, t, s] = same and back >= 0 and (not window or back < window)
    return seen


def rotary(x, positions, frequencies, magnitude=1.0):
    """Multiply the complex number x_i + j x_(i + H/2) by exp(j m f_i) (arXiv:2104.09864, equation 34)."""
    half = x.shape[-1] // 2
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, :, None, None] * frequencies)
    return magnitude * np.concatenate([turned.real, turned.imag], axis=-1)


def rotary_frequencies(head_dim, theta, scaling="none", factor=1.0, original_length=0):
    """(frequencies, magnitude), one pair of the head dim at a time."""
    plain = [theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)]
    if scaling == "none":
        return np.array(plain), 1.0
    if scaling == "linear":  # arXiv:2306.15595, equation 4
        return np.array([frequency / factor for frequency in plain]), 1.0
    if scaling == "llama3":
        return np.array([llama3_frequency(frequency, factor, original_length) for frequency in plain]), 1.0
    first, last = (yarn_pair(turns, head_dim, theta, original_length) for turns in (32, 1))
    scaled = []
    for pair, frequency in enumerate(plain):
        ramp = np.clip((pair - np.floor(first)) / (np.ceil(last) - np.floor(first)), 0, 1)
        scaled.append(ramp * frequency / factor + (1 - ramp) * frequency)
    return np.array(scaled), 0.1 * np.log(factor) + 1  # arXiv:2309.00071, equation 22


def llama3_frequency(frequency, factor, original_length, low_freq_factor=1, high_freq_factor=4):
    """As published with Llama 3.1: by the wavelength, in tokens."""
    wavelength = 2 * np.pi / frequency
    if wavelength < original_length / high_freq_factor:
        return frequency
    if wavelength > original_length / low_freq_factor:
        return frequency / factor
    smooth = (original_length / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor)
    return (1 - smooth) * frequency / factor + smooth * frequency


def yarn_pair(turns, head_dim, theta, original_length):
    """The pair, as a real number, that turns so often: L theta^(-2 pair / H) / (2 pi) = turns, solved for the pair."""
    pairs = np.linspace(0, head_dim, 1_000_001)
    return pairs[np.argmin(np.abs(original_length * theta ** (-2 * pairs / head_dim) / (2 * np.pi) - turns))]


def rms_norm(x, scale, epsilon):
    """x / sqrt(mean(x^2) + epsilon) * scale (arXiv:1910.07467, equation 4)."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def gelu_tanh(x):
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) (arXiv:1606.08415, section 2)."""
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def swiglu(x, w, activation="silu"):
    """(silu(x gate) * x up) down (arXiv:2002.05202, equation 6), each product with its bias where it has one."""
    gated = x @ w["gate"] + w.get("gate_bias", 0)
    activated = gelu_tanh(gated) if activation == "gelu_tanh" else gated / (1 + np.exp(-gated))
    hidden = activated * (x @ w["up"] + w.get("up_bias", 0))
    return hidden @ w["down"] + w.get("down_bias", 0)


def attention_layer(x, w, positions, seen, rope, epsilon, score_cap=0.0, query_scale=1.0):
    """Project, normalise queries and keys where they have a scale, rotate, attend, project.

    `rope`: (frequencies, magnitude).
    """
    q, k, v = (np.einsum("btd,dnh->btnh", x, w[name]) + w.get(f"{name}_bias", 0) for name in ("query", "key", "value"))
    if "query_norm" in w:
        q = rms_norm(q, w["query_norm"]["scale"], epsilon)
        k = rms_norm(k, w["key_norm"]["scale"], epsilon)
    q, k = query_scale * rotary(q, positions, *rope), rotary(k, positions, *rope)
    return np.einsum("btnh,nhd->btd", attention(q, k, v, seen, score_cap), w["out"]) + w.get("out_bias", 0)


def block(x, w, positions, seen, rope, epsilon, score_cap=0.0, query_scale=1.0, activation="silu"):
    """x + attention(norm(x)), then x + mlp(norm(x)); what is added is normalised too where there is a scale for it."""

    def after(y, name):
        return rms_norm(y, w[name]["scale"], epsilon) if name in w else y

    y = rms_norm(x, w["attention_norm"]["scale"], epsilon)
    y = attention_layer(y, w["attention"], positions, seen, rope, epsilon, score_cap, query_scale)
    x = x + after(y, "attention_post_norm")
    y = rms_norm(x, w["mlp_norm"]["scale"], epsilon)
    return x + after(swiglu(y, w["mlp"], activation), "mlp_post_norm")
