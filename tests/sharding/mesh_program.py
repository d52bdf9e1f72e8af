"""A program that prints what meshes of several CPU devices compute; the tests beside it judge.

The number of devices and of processes must be known before JAX starts, hence a program:
``mesh_program.py one FOLDER`` or ``mesh_program.py four KV_HEADS`` with four virtual devices, or
``mesh_program.py two PORT PROCESS`` as one of two processes with one device each. It prints one line of
JSON.
"""

import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from decoder_reference import random_weights  # pyright: ignore[reportMissingImports]
from jax import lax
from jax.sharding import PartitionSpec as P
from model_files import file_tensors, write_gguf, write_huggingface  # pyright: ignore[reportMissingImports]

import models
from kvgrain_jax import Engine, Request, sharding, system_config
from kvgrain_jax.engine.sampling import sample
from kvgrain_jax.errors import ConfigError
from models.weights import assemble, expected_tensors, fingerprint

BASE = models.ModelConfig(
    layers=2,
    d_model=32,
    ffn=48,
    heads=8,
    kv_heads=4,
    head_dim=8,
    vocabulary=64,
    max_context=64,
    rope_theta=1e4,
)
VARIANTS = {
    "4 KV heads, bias": ({"qkv_bias": True}, [2, 4]),
    "2 KV heads, QK norm, tied": (
        {"kv_heads": 2, "qk_norm": True, "tied_embeddings": True},
        [4],
    ),
}
ENGINE = dataclasses.replace(BASE, kv_heads=2)
# The last id is out of range, as padding may be.
TOKENS = np.array([3, 60, 7, 7, 21, 0, 63, 64], np.int32)


def build(config, mesh=None):
    weights = random_weights(expected_tensors(config), seed=0)
    params = assemble("test", config, weights.__getitem__, "float32", mesh)
    return models.as_model(config, params, mesh)


def logits(model):
    def forward(params, tokens):
        positions = jnp.arange(len(tokens))
        out, _ = model.step(params, tokens, positions, None, models.plain_attend)
        return out if model.axis is None else lax.all_gather(out, model.axis, axis=1, tiled=True)

    if model.mesh is not None:
        forward = jax.shard_map(
            forward,
            mesh=model.mesh,
            in_specs=(model.params_spec, P()),
            out_specs=P(),
            check_vma=False,
        )
    return sharding.fetch(jax.jit(forward)(model.params, TOKENS))


def tensor_parallel():
    """Largest difference of logits from those of one device."""
    found = {}
    for name, (changes, ranks) in VARIANTS.items():
        config = dataclasses.replace(BASE, **changes)
        expected = logits(build(config))
        for tp in ranks:
            actual = logits(build(config, sharding.make_mesh(tp)))
            found[f"{name}, TP={tp}"] = float(np.abs(actual - expected).max())
    return found


def copied_heads():
    """Heads of the model, and of the weights of one device, with one KV head on four devices."""
    model = build(dataclasses.replace(BASE, kv_heads=1), sharding.make_mesh(4))
    qkv = model.params["layers.0.attention.qkv.weight"].addressable_shards[0].data
    return {"model": [model.n_heads, model.n_kv_heads], "shard": qkv.shape}


def largest_share():
    """The largest share of a matrix that one device holds."""
    model = build(BASE, sharding.make_mesh(4))
    matrices = [array for array in model.params.values() if array.ndim > 1]
    return max(array.addressable_shards[0].data.size / array.size for array in matrices)


def random_values():
    """Whether random weights on four devices are those of one; two copies of a KV head are equal."""
    # Few different shapes: few programs to draw them.
    config = dataclasses.replace(
        BASE, d_model=64, ffn=64, kv_heads=2, tied_embeddings=True, qkv_bias=True
    )
    one = models.random_params(config, jnp.bfloat16, 3)
    four = models.random_params(config, jnp.bfloat16, 3, sharding.make_mesh(4))
    found = {}
    for name, array in one.items():
        alone, cut = np.asarray(array), np.asarray(four[name])
        if ".qkv." in name:
            queries = cut[:, :-2].reshape(alone[:, :-2].shape)
            found[name] = np.array_equal(queries, alone[:, :-2]) and all(
                np.array_equal(cut[copy::2, -2:], alone[:, -2:]) for copy in (0, 1)
            )
        else:
            found[name] = np.array_equal(cut, alone)
    return found


def checkpoints(folder):
    """Whether each kind of file gives on a mesh the weights, and the id, that it gives without."""
    config = dataclasses.replace(BASE, kv_heads=2, tied_embeddings=True)
    weights = random_weights(expected_tensors(config), seed=1)
    write_gguf(folder / "m.gguf", config, weights)
    write_huggingface(folder / "hf", config, weights)
    models.save(models.load(folder / "m.gguf"), folder / "orbax")
    found = {}
    for name in ("m.gguf", "hf", "orbax"):
        one = models.load(folder / name)
        for tp in (2, 4):
            mesh = sharding.make_mesh(tp)
            loaded = models.load(folder / name, mesh=mesh)
            tensors = file_tensors(config, one.model.params)
            placed = assemble("test", config, tensors.__getitem__, "float32", mesh)
            same = all(
                np.array_equal(array, placed[key])
                and array.sharding.spec == placed[key].sharding.spec
                for key, array in loaded.model.params.items()
            )
            found[f"{name}, TP={tp}"] = same and loaded.checkpoint == one.checkpoint
            if loaded.model.n_kv_heads > config.kv_heads:
                save = functools.partial(models.save, loaded, folder / "never")
                found["copies saved"] = refusal(save)
    return found


def sampling():
    """Tokens that four ranks sample together: of eight rows, of six, and of eight on one device."""
    args = (
        np.random.default_rng(0).standard_normal((8, 64)).astype(np.float32),
        np.resize(np.array([0.0, 0.7, 1.3], np.float32), 8),
        np.resize(np.array([0, 5], np.int32), 8),
        np.resize(np.array([1.0, 0.9], np.float32), 8),
        np.arange(8, dtype=np.uint32),
        np.arange(8, dtype=np.int32),
    )
    together = jax.jit(
        jax.shard_map(
            functools.partial(sharding.sample_sharded, sample, axis=sharding.TP),
            mesh=sharding.make_mesh(4),
            in_specs=(P(None, "tp"), *[P()] * 5),
            out_specs=P(),
            check_vma=False,
        )
    )
    return {
        "eight": together(*args).tolist(),
        "six": together(*[x[:6] for x in args]).tolist(),
        "one device": jax.jit(sample)(*args).tolist(),
    }


def greedy():
    """The most likely tokens that four ranks find together, and NumPy's; most rows have ties."""
    logits = np.random.default_rng(0).integers(0, 6, (8, 16)).astype(np.float32)
    together = jax.jit(
        jax.shard_map(
            functools.partial(sharding.greedy_sharded, axis=sharding.TP),
            mesh=sharding.make_mesh(4),
            in_specs=P(None, "tp"),
            out_specs=P(),
            check_vma=False,
        )
    )
    return {"together": together(logits).tolist(), "whole": logits.argmax(axis=1).tolist()}


def serve(model, **options):
    """What an engine gives eight requests: tokens, backends it took, cached tokens.

    One is alone at first. Six more share a prefix, then the first comes again; as they end, fewer
    rows decode than the backend ``dense`` is chosen for.
    """
    fields = {
        "pool_tokens": 512,
        "max_batch": 6,
        "chunk_tokens": 32,
        "chunk_requests": 2,
        "decode_steps": 3,
        "min_hot_tokens": 8,
        "slab_align": 16,
        "hot_fraction": 0.25,
        "m_sat": 4 * model.n_heads // model.n_kv_heads,
        "greedy": True,
    }
    engine = Engine(model, system_config("kvgrain", **(fields | options)))
    draw = np.random.default_rng(5)
    prefix, alone = draw.integers(0, BASE.vocabulary, 24), draw.integers(0, BASE.vocabulary, 9)
    suffixes = [draw.integers(0, BASE.vocabulary, 3 + i) for i in range(6)]
    engine.run([Request("alone", alone, 4)])
    first = engine.metrics
    sharing = [
        Request(f"r{i}", np.concatenate([prefix, suffix]), 10 + i, shared_tokens=24)
        for i, suffix in enumerate(suffixes)
    ]
    second = engine.run([*sharing, Request("again", alone, 6)])
    engine.check_integrity()
    requests = [*first.requests, *second.requests]
    return {
        "tokens": {request.id: [int(token) for token in request.tokens] for request in requests},
        "backends": sorted({step.backend for step in [*first.steps, *second.steps]}),
        "cached": {request.id: request.cached_tokens for request in requests},
    }


def engines():
    """What engines on one and two devices serve."""
    meshes = {"one": None, "two": sharding.make_mesh(2)}
    return {name: serve(build(ENGINE, mesh)) for name, mesh in meshes.items()}


def engines_over_four(kv_heads):
    """What engines on one device and over four serve."""
    config = dataclasses.replace(BASE, heads=16, kv_heads=kv_heads)
    meshes = {"one": None, "four": sharding.make_mesh(4)}
    return {name: serve(build(config, mesh)) for name, mesh in meshes.items()}


def refusals():
    """What is said of models and meshes that do not fit."""
    mesh = sharding.make_mesh(4)
    asked = {
        "heads": lambda: build(dataclasses.replace(BASE, heads=6, kv_heads=3), mesh),
        "group": lambda: build(dataclasses.replace(BASE, heads=3, kv_heads=1), mesh),
        "ffn": lambda: build(dataclasses.replace(BASE, ffn=50), mesh),
        "vocabulary": lambda: build(dataclasses.replace(BASE, vocabulary=63), mesh),
        "devices": lambda: sharding.make_mesh(2, replicas=3),
    }
    return {name: refusal(ask) for name, ask in asked.items()}


def refusal(ask):
    try:
        ask()
    except ConfigError as error:
        return str(error)
    return None


def two_processes(port, process):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", num_processes=2, process_id=process)
    config = dataclasses.replace(BASE, qkv_bias=True)
    mesh = sharding.make_mesh(2)
    model = build(config, mesh)
    difference = np.abs(logits(model) - logits(build(config))).max()
    own = {"clock": np.float64(1e9 + process / 3), "due": np.int64(2**40 + process)}
    received = sharding.broadcast(own)
    return {
        "devices": [len(jax.devices()), len(jax.local_devices())],
        "difference": float(difference),
        "broadcast": [float(received["clock"]), int(received["due"])],
        "checkpoint": fingerprint(config, model.params),
        "one device": refusal(lambda: sharding.make_mesh(1)),
        "engine": serve(build(ENGINE, mesh), backend="cascade"),
    }


def main(mode, *arguments):
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    if mode == "two":
        found = two_processes(*map(int, arguments))
    elif mode == "four":
        found = engines_over_four(*map(int, arguments))
    else:
        found = {
            "tensor parallel": tensor_parallel(),
            "copied heads": copied_heads(),
            "largest share": largest_share(),
            "random": random_values(),
            "checkpoints": checkpoints(Path(*arguments)),
            "sampling": sampling(),
            "greedy": greedy(),
            "engines": engines(),
            "refusals": refusals(),
        }
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
