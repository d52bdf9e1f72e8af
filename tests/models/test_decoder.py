"""The decoder: logits against an independent NumPy forward pass, and the contract of ``step``."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_reference import forward, random_weights
from model_files import plain_logits

from models import ModelConfig, RopeScaling, as_model, named_config, plain_attend, random_params
from models.decoder import abstract_params, rope_frequencies
from models.weights import assemble, expected_tensors

BASE = ModelConfig(
    layers=2,
    d_model=40,
    ffn=56,
    heads=6,
    kv_heads=2,
    head_dim=16,
    vocabulary=64,
    max_context=512,
    rope_theta=1e4,
    eps=1e-5,
)
VARIANTS = {
    "GQA 3, untied head": {},
    "GQA 4, tied head": {"heads": 8, "tied_embeddings": True},
    "GQA 7, Llama-3.1 rope": {
        "heads": 7,
        "kv_heads": 1,
        "rope_scaling": RopeScaling(8.0, 1.0, 4.0, 64),
    },
    "QKV bias": {"qkv_bias": True},
    "QK norm, GQA 4": {"qk_norm": True, "heads": 8},
    "a KV head for each query head, head dim 80": {"heads": 2, "head_dim": 80},
}
TOKENS = [3, 60, 7, 7, 21, 0, 63, 14, 9]
CONSECUTIVE = list(range(9))
# As after an eviction: absolute, increasing, not row numbers.
WITH_GAPS = [0, 1, 2, 40, 41, 99, 100, 101, 300]


def build(config, seed=0, dtype=jnp.float32):
    weights = random_weights(expected_tensors(config), seed)
    return weights, as_model(config, assemble("test", config, weights.__getitem__, dtype))


def relative_error(actual, expected):
    return np.max(np.abs(actual - expected)) / np.max(np.abs(expected))


@pytest.mark.parametrize("positions", [CONSECUTIVE, WITH_GAPS], ids=["consecutive", "with gaps"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_agree_with_numpy(variant, positions):
    config = dataclasses.replace(BASE, **VARIANTS[variant])
    weights, model = build(config)
    expected = forward(config, weights, TOKENS, positions)
    assert relative_error(plain_logits(model, TOKENS, positions), expected) < 1e-4


def test_logits_are_float32_and_close_in_bfloat16():
    weights, model = build(BASE, dtype=jnp.bfloat16)
    logits = plain_logits(model, TOKENS, CONSECUTIVE)
    assert logits.dtype == np.float32
    assert relative_error(logits, forward(BASE, weights, TOKENS, CONSECUTIVE)) < 0.05


def test_rows_pick_the_tokens_whose_logits_are_wanted():
    _, model = build(BASE)
    everything = plain_logits(model, TOKENS, CONSECUTIVE)
    picked = plain_logits(model, TOKENS, CONSECUTIVE, rows=[8, 2, 2])
    np.testing.assert_allclose(picked, everything[[8, 2, 2]], rtol=1e-5, atol=1e-6)


def test_rows_are_picked_before_the_head():
    _, model = build(BASE)
    step = jax.make_jaxpr(model.step, static_argnums=4)
    tokens = jnp.array(TOKENS)
    program = str(step(model.params, tokens, tokens, None, plain_attend, jnp.array([8])))
    assert "f32[1,64]" in program
    assert "f32[9,64]" not in program


def test_later_tokens_do_not_change_earlier_logits():
    _, model = build(BASE)
    before = plain_logits(model, TOKENS, CONSECUTIVE)
    after = plain_logits(model, [*TOKENS[:-1], 33], CONSECUTIVE)
    np.testing.assert_array_equal(before[:-1], after[:-1])
    assert relative_error(after[-1], before[-1]) > 1e-2


def test_attend_is_called_once_a_layer_with_the_cache_threaded_through():
    _, model = build(dataclasses.replace(BASE, layers=3))
    seen, returned = [], []

    def attend(cache, layer, q, k, v):
        seen.append((cache, layer, q.shape, k.shape, v.shape))
        return plain_attend(None, layer, q, k, v)[0], cache + 1

    def traced(params, tokens):
        logits, cache = model.step(params, tokens, tokens, 10, attend)
        returned.append(cache)
        return logits

    jax.eval_shape(traced, model.params, jnp.array(TOKENS))
    shapes = ((9, 6, 16), (9, 2, 16), (9, 2, 16))
    assert seen == [(10, 0, *shapes), (11, 1, *shapes), (12, 2, *shapes)]
    assert returned == [13]
    assert all(type(layer) is int for _, layer, *_ in seen)


def test_plain_attend_returns_the_cache_untouched():
    cache = object()
    q, kv = jnp.ones((3, 6, 16)), jnp.ones((3, 2, 16))
    assert plain_attend(cache, 0, q, kv, kv)[1] is cache


def test_frequencies_follow_the_llama_3_1_rule():
    plain = rope_frequencies(128, 5e5)
    scaled = rope_frequencies(128, 5e5, named_config("llama-3.1-8b").rope_scaling)
    turns_over_8192_tokens = 8192 * plain / (2 * np.pi)
    np.testing.assert_array_equal(
        scaled[turns_over_8192_tokens > 4], plain[turns_over_8192_tokens > 4]
    )
    low = turns_over_8192_tokens < 1
    np.testing.assert_allclose(scaled[low], plain[low] / 8, rtol=1e-6)
    assert np.all(np.diff(scaled) < 0)


# Few different shapes: few programs to draw them.
SQUARE = dataclasses.replace(
    BASE, d_model=64, ffn=64, heads=4, kv_heads=4, vocabulary=64, tied_embeddings=True
)


def test_random_weights_are_the_seeds_and_keep_logits_near_unit_variance():
    first, again, other = (random_params(SQUARE, jnp.bfloat16, seed) for seed in (5, 5, 6))
    embedding, same, another = (p["embedding"] for p in (first, again, other))
    np.testing.assert_array_equal(embedding, same)
    assert not np.array_equal(embedding, another)
    tokens = np.arange(40)
    assert 0.7 < plain_logits(as_model(SQUARE, first), tokens, tokens).std() < 1.4


def test_random_weights_have_the_dtype_and_shapes_that_were_asked_for():
    arrays = random_params(SQUARE, jnp.bfloat16)
    assert {array.dtype for array in arrays.values()} == {jnp.dtype(jnp.bfloat16)}
    shapes = {name: leaf.shape for name, leaf in abstract_params(SQUARE).items()}
    assert {name: array.shape for name, array in arrays.items()} == shapes
