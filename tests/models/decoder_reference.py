"""The decoder's formulas in NumPy float64: one token, one head, one pair of features at a time.

Written from the papers and model cards, sharing nothing with the code under test but the names of
the weights and the fields of the config.
"""

import math

import numpy as np


def forward(config, weights, tokens, positions, *, interleaved=False):
    """Logits ``[T, V]`` of one sequence; ``interleaved`` pairs neighbours in rotary encoding."""
    w = {name: np.asarray(value, np.float64) for name, value in weights.items()}
    x = [w["embedding"][token] for token in tokens]
    for layer in range(config.layers):
        own = {
            name.removeprefix(f"layers.{layer}."): value
            for name, value in w.items()
            if name.startswith(f"layers.{layer}.")
        }
        normed = [_norm(row, own["attention_norm.weight"], config.eps) for row in x]
        attended = _attention(config, own, normed, positions, interleaved)
        x = [
            row + own["attention.output.weight"] @ out for row, out in zip(x, attended, strict=True)
        ]
        for t, row in enumerate(x):
            h = _norm(row, own["ffn_norm.weight"], config.eps)
            gate = own["ffn.gate.weight"] @ h
            swish = gate / (1.0 + np.exp(-gate))
            x[t] = row + own["ffn.down.weight"] @ (swish * (own["ffn.up.weight"] @ h))
    head = w.get("head", w["embedding"])
    return np.stack([head @ _norm(row, w["final_norm.weight"], config.eps) for row in x])


def random_weights(shapes, seed):
    """Weights that exercise every term: biases are not zero, norms are not one."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.3 * noise
        elif name.endswith("bias"):
            weights[name] = 0.5 * noise
        else:
            weights[name] = noise / math.sqrt(shape[-1])
    return {name: value.astype(np.float32) for name, value in weights.items()}


def _norm(row, weight, eps):
    return row / math.sqrt(np.mean(row**2) + eps) * weight


def _attention(config, w, rows, positions, interleaved):
    group = config.heads // config.kv_heads
    queries, keys, values = ([], [], [])
    for row, position in zip(rows, positions, strict=True):
        q, k, v = (
            w[f"attention.{name}.weight"] @ row + w.get(f"attention.{name}.bias", 0.0)
            for name in ("query", "key", "value")
        )
        queries.append(
            [
                _rotated(_qk_norm(config, w, "query", head), position, config, interleaved)
                for head in q.reshape(config.heads, config.head_dim)
            ]
        )
        keys.append(
            [
                _rotated(_qk_norm(config, w, "key", head), position, config, interleaved)
                for head in k.reshape(config.kv_heads, config.head_dim)
            ]
        )
        values.append(v.reshape(config.kv_heads, config.head_dim))
    outputs = []
    for t, own in enumerate(queries):
        heads = []
        for h, q in enumerate(own):
            scores = [q @ keys[s][h // group] / math.sqrt(config.head_dim) for s in range(t + 1)]
            shares = np.exp(np.array(scores) - max(scores))
            shares /= shares.sum()
            heads.append(sum(share * values[s][h // group] for s, share in enumerate(shares)))
        outputs.append(np.concatenate(heads))
    return outputs


def _qk_norm(config, w, name, head):
    return _norm(head, w[f"attention.{name}_norm.weight"], config.eps) if config.qk_norm else head


def _rotated(head, position, config, interleaved):
    """Multiplies the complex numbers made of pairs of features by ``exp(i angle)``."""
    half = config.head_dim // 2
    angles = np.array([position * _frequency(config, pair) for pair in range(half)])
    turn = np.exp(1j * angles)
    if interleaved:
        turned = (head[0::2] + 1j * head[1::2]) * turn
        return np.stack([turned.real, turned.imag], axis=-1).reshape(-1)
    turned = (head[:half] + 1j * head[half:]) * turn
    return np.concatenate([turned.real, turned.imag])


def _frequency(config, pair):
    frequency = config.rope_theta ** (-2.0 * pair / config.head_dim)
    scaling = config.rope_scaling
    if scaling is None:
        return frequency
    wavelength = 2 * math.pi / frequency
    if wavelength < scaling.original_context / scaling.high_frequency_factor:
        return frequency
    if wavelength > scaling.original_context / scaling.low_frequency_factor:
        return frequency / scaling.factor
    smooth = (scaling.original_context / wavelength - scaling.low_frequency_factor) / (
        scaling.high_frequency_factor - scaling.low_frequency_factor
    )
    return (1 - smooth) * frequency / scaling.factor + smooth * frequency
