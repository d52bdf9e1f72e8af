"""Engines that hold a cell: enters a cell of a config, leaves an engine whose rows all decode.

A cell is a batch of rows that share prefixes. Its prefixes are computed once and cached, each row has a
suffix of its own; texts are random tokens, no two rows' alike.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

import models
from kvgrain_jax import Engine, EngineConfig, Request, sharding, system_config
from kvgrain_jax.engine import Model
from kvgrain_jax.errors import ConfigError

SLAB_ALIGN = 128


@dataclasses.dataclass(frozen=True)
class Cell:
    """Rows that share prefixes.

    Attributes:
      prefixes: tokens of each prefix; rows take them in turn. Empty for none.
      batch: rows, ``B``.
    """

    prefixes: tuple[int, ...]
    batch: int

    def __str__(self) -> str:
        lengths = "+".join(str(n) for n in self.prefixes) or "0"
        return f"P {lengths}, B {self.batch}"


def parse_cell(value: Sequence[Any]) -> Cell:
    """A cell of a config.

    Raises:
      ConfigError: it is not a pair of prefix lengths and a batch.
    """
    try:
        prefixes, batch = value
        cell = Cell(tuple(int(n) for n in prefixes if n), int(batch))
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{value} is no cell; give ((16384,), 256) or the like.") from error
    if cell.batch < 1 or min(cell.prefixes, default=1) < 1:
        raise ConfigError(f"{value} is no cell; lengths and batch must be positive.")
    return cell


def named(backend: str) -> str | None:
    """The backend that ``Engine.decode`` takes; None dispatches."""
    return None if backend == "auto" else backend


def make_engine(config: Mapping[str, Any], cells: Sequence[Cell], *, new_tokens: int) -> Engine:
    """An engine with room for each of the cells, one at a time.

    Args:
      config: ``model``, ``dtype``, ``tp``, ``suffix_tokens`` and ``engine``.
      cells: the cells.
      new_tokens: tokens that each row may generate.
    """
    mesh = sharding.make_mesh(config["tp"]) if config["tp"] > 1 else None
    model = models.load(config["model"], dtype=config["dtype"], mesh=mesh).model
    return Engine(model, engine_config(model, config, cells, new_tokens=new_tokens))


def engine_config(
    model: Model, config: Mapping[str, Any], cells: Sequence[Cell], *, new_tokens: int
) -> EngineConfig:
    """Pools and batch for the cells; what ``config["engine"]`` says wins."""
    own = config["suffix_tokens"] + new_tokens
    hot = max(sum(-(-n // SLAB_ALIGN) * SLAB_ALIGN for n in set(cell.prefixes)) for cell in cells)
    batch = max(cell.batch for cell in cells)
    # Besides the batch, one slab that a prefix leaves while it moves.
    total = -(-(hot + batch * own + 4096) // SLAB_ALIGN) * SLAB_ALIGN
    context = max(max(cell.prefixes, default=0) for cell in cells) + own
    fields = {
        "max_batch": batch,
        "batch_buckets": tuple(sorted({cell.batch for cell in cells})),
        "max_context": min(model.max_context, -(-context // SLAB_ALIGN) * SLAB_ALIGN),
        "pool_tokens": total,
        "hot_fraction": hot / total,
        "decode_steps": config.get("steps", 16),
        "slab_align": SLAB_ALIGN,
        "kv_dtype": jnp.dtype(config["dtype"]),
        **config["engine"],
    }
    return system_config(
        "kvgrain",
        **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()},
    )


_numbers = itertools.count()


def fill(engine: Engine, cell: Cell, *, suffix_tokens: int, new_tokens: int) -> None:
    """Serve a cell's requests until all of them decode. Its prefixes are computed before."""
    _cache_prefixes(engine, cell)
    for request in _requests(engine, cell, suffix_tokens, new_tokens):
        engine.submit(request)
    while engine.scheduler.n_decoding < cell.batch:
        engine.prefill()


def empty(engine: Engine) -> None:
    """End everything that runs, and forget what is cached."""
    for row in engine.scheduler.running:
        engine.abort(row.request.id)
    engine.cache.drop_all()


def end_to_end(engine: Engine, cell: Cell, suffix_tokens: int, tokens: int) -> dict[str, float]:
    """A burst of a cell's requests, its prefixes cached: prefill of the suffixes and decoding.

    Args:
      engine: an empty one.
      cell: prefixes and rows.
      suffix_tokens: tokens of each row behind its prefix.
      tokens: that each row generates.
    """
    _cache_prefixes(engine, cell)
    summary = engine.run(_requests(engine, cell, suffix_tokens, tokens)).summary()
    return {
        "end_to_end_tok_s": summary["output_tokens_per_s"],
        "end_to_end_s": summary["duration_s"],
        "ttft_p50_s": summary["ttft_p50_s"],
        "tpot_p50_s": summary["tpot_p50_s"],
    }


def _cache_prefixes(engine: Engine, cell: Cell) -> None:
    """One request computes each prefix, as a cache that has seen it would hold it."""
    for length in cell.prefixes:
        engine.submit(_request(engine, length, _text(engine, next(_numbers), 1), 1))
    while engine.has_work:
        engine.prefill()


def _requests(engine: Engine, cell: Cell, suffix_tokens: int, new_tokens: int) -> list[Request]:
    """One for each row; they take the prefixes in turn."""
    prefixes = itertools.islice(itertools.cycle(cell.prefixes or (0,)), cell.batch)
    return [
        _request(engine, length, _text(engine, 10**6 + next(_numbers), suffix_tokens), new_tokens)
        for length in prefixes
    ]


def _request(engine: Engine, prefix: int, suffix: np.ndarray, new_tokens: int) -> Request:
    """The prefix of that length, the same each time, and a suffix."""
    prompt = np.concatenate([_text(engine, prefix, prefix), suffix])
    return Request(f"row {next(_numbers)}", prompt, new_tokens, shared_tokens=prefix)


def _text(engine: Engine, seed: int, n: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, engine.model.vocabulary, n).astype(np.int32)
