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


def rotary(x, positions, theta):
    """Multiply the complex number x_i + j x_(i + H/2) by exp(j m theta^(-2i/H)) (arXiv:2104.09864, equation 34)."""
    half = x.shape[-1] // 2
    frequencies = theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * positions[:, :, None, None] * frequencies)
    return np.concatenate([turned.real, turned.imag], axis=-1)


def rms_norm(x, scale, epsilon):
    """x / sqrt(mean(x^2) + epsilon) * scale (arXiv:1910.07467, equation 4)."""
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + epsilon) * scale


def swiglu(x, gate, up, down):
    """(silu(x gate) * x up) down (arXiv:2002.05202, equation 6)."""
    gated = x @ gate
    return (gated / (1 + np.exp(-gated)) * (x @ up)) @ down


def attention_layer(x, w, positions, seen, theta, epsilon, score_cap=0.0):
    """Project, normalise queries and keys where they have a scale, rotate, attend, project."""
    q, k, v = (np.einsum("btd,dnh->btnh", x, w[name]) for name in ("query", "key", "value"))
    if "query_norm" in w:
        q = rms_norm(q, w["query_norm"]["scale"], epsilon)
        k = rms_norm(k, w["key_norm"]["scale"], epsilon)
    q, k = rotary(q, positions, theta), rotary(k, positions, theta)
    return np.einsum("btnh,nhd->btd", attention(q, k, v, seen, score_cap), w["out"])


def block(x, w, positions, seen, theta, epsilon, score_cap=0.0):
    """x + attention(norm(x)), then x + mlp(norm(x))."""
    y = rms_norm(x, w["attention_norm"]["scale"], epsilon)
    x = x + attention_layer(y, w["attention"], positions, seen, theta, epsilon, score_cap)
    y = rms_norm(x, w["mlp_norm"]["scale"], epsilon)
    return x + swiglu(y, w["mlp"]["gate"], w["mlp"]["up"], w["mlp"]["down"])
