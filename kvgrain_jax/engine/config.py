"""Configuration of the engine, and the three systems that the GraniKV paper compares."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike

from kvgrain_jax.attention import DispatchRule, load_costs, make_rule
from kvgrain_jax.engine.model import Model
from kvgrain_jax.errors import ConfigError
from kvgrain_jax.pools import PoolGeometry
from kvgrain_jax.prefix import policy
from pallas_kernels.tuning import device_name

RULES = ("auto", "meff", "calibrated")


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Everything that shapes the engine's pools and programs.

    Attributes:
      backend: ``"auto"`` dispatches every step, or one backend for all steps: ``dense``,
        ``cascade``, ``paged``, ``cascade16``.
      rule: how ``"auto"`` dispatches: ``"meff"`` by the threshold, ``"calibrated"`` by times that
        ``experiments.dispatch_fit`` measured on this kind of device, ``"auto"`` calibrated where
        there are such times and no threshold is given.
      m_sat: threshold of the ``meff`` rule; the device's own where None.
      greedy: serve greedy requests only. The decode loop then has no branch for drawing tokens, for
        which a GPU waits for the host in every step.
      page_size: tokens of a COLD page: 1, 4 or 16.
      hot_fraction: share of the pool that is HOT, in [0, 1]; 0 keeps every prefix in COLD.
      policy: ``"always"`` or ``"after_hits:N"``, see ``kvgrain_jax.prefix.policy``.
      min_hot_tokens: shorter shared prefixes stay in COLD.
      pool_tokens: tokens that the pool holds; where None, ``pool_bytes`` decides.
      pool_bytes: bytes of the keys and values of the pool.
      max_context: tokens of one request, prompt and output together; the model's own where None.
      max_batch: requests that decode at once.
      batch_buckets: row counts the decode loop is compiled for, ascending; ``(max_batch,)`` where
        empty. A batch runs in the smallest that holds it.
      chunk_tokens: prompt tokens of one prefill call.
      chunk_buckets: sizes the prefill is compiled for, ascending; ``(chunk_tokens,)`` where empty.
      chunk_requests: requests in one prefill call at most.
      patience: requests that find a prefix of at least ``min_hot_tokens`` in the cache and may go before
        one that came first and finds none; 0 serves them in the order in which they came.
      decode_steps: decode steps between two looks of the host.
      prefill_decode_steps: the same while prompts are still to be computed, at most
        ``decode_steps``; 0 computes all prompts first.
      max_slabs: live HOT slabs at most.
      max_segments: segments of one batch at most; pieces of prefixes beyond are read by pages.
      max_pieces: contiguous pieces of one request that a prefill reads as such.
      max_staged: earlier tokens in pages that a prefill copies side by side at most before it reads
        them, never more than the pool holds; the copies of one layer are alive at once. None for one
        request's whole context or 16 times the chunk, whichever is more, where GPU kernels run, and
        for no copies elsewhere.
      slab_align: HOT slab bases are multiples of this many tokens.
      kv_dtype: dtype of keys and values.

    Raises:
      ConfigError: a value is out of range or two do not fit together.
    """

    backend: str = "auto"
    rule: str = "auto"
    m_sat: int | None = None
    greedy: bool = False
    page_size: int = 1
    hot_fraction: float = 0.2
    policy: str = "always"
    min_hot_tokens: int = 64
    pool_tokens: int | None = None
    pool_bytes: int | None = None
    max_context: int | None = None
    max_batch: int = 8
    batch_buckets: tuple[int, ...] = ()
    chunk_tokens: int = 256
    chunk_buckets: tuple[int, ...] = ()
    chunk_requests: int = 8
    patience: int = 0
    decode_steps: int = 8
    prefill_decode_steps: int = 1
    max_slabs: int = 64
    max_segments: int = 64
    max_pieces: int = 8
    max_staged: int | None = None
    slab_align: int = 64
    kv_dtype: DTypeLike = jnp.float32

    def __post_init__(self):
        make_rule(self.backend, self.m_sat)
        if self.rule not in RULES:
            raise ConfigError(f"rule is {self.rule!r}; choose one of {', '.join(RULES)}.")
        if self.rule == "calibrated" and self.m_sat is not None:
            raise ConfigError(
                "m_sat is the threshold of the meff rule; leave it out or choose meff."
            )
        policy.parse(self.policy, self.min_hot_tokens)
        for name in (
            "max_batch",
            "chunk_tokens",
            "chunk_requests",
            "decode_steps",
            "max_slabs",
            "max_segments",
            "max_pieces",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}; give at least 1.")
        if not 0 <= self.prefill_decode_steps <= self.decode_steps:
            raise ConfigError(
                f"prefill_decode_steps is {self.prefill_decode_steps}; give a number from 0 to "
                f"decode_steps, {self.decode_steps}."
            )
        if self.patience < 0:
            raise ConfigError(f"patience is {self.patience}; give a number of requests, or 0.")
        if self.max_staged is not None and self.max_staged < 0:
            raise ConfigError(f"max_staged is {self.max_staged}; give a number of tokens, or 0.")
        if self.max_context is not None and self.max_context < 1:
            raise ConfigError(f"max_context is {self.max_context}; give at least 1.")
        if (self.pool_tokens is None) == (self.pool_bytes is None):
            raise ConfigError("Give either pool_tokens or pool_bytes.")
        for name, top in (("batch_buckets", self.max_batch), ("chunk_buckets", self.chunk_tokens)):
            buckets = getattr(self, name) or (top,)
            if list(buckets) != sorted(set(buckets)) or buckets[0] < 1 or buckets[-1] != top:
                raise ConfigError(f"{name} is {buckets}; give ascending sizes that end with {top}.")
            object.__setattr__(self, name, tuple(buckets))

    def dispatch_rule(self, model: Model) -> DispatchRule:
        """The dispatch rule for a model on this process's device.

        Raises:
          ConfigError: the calibrated rule is asked for where nothing fitting was measured.
        """
        costs = None
        if self.rule != "meff":
            costs = load_costs(
                device_name(),
                n_kv_heads=model.n_kv_heads,
                group=model.n_heads // model.n_kv_heads,
                head_dim=model.head_dim,
            )
        if self.rule == "calibrated" and costs is None:
            raise ConfigError(
                f"Nothing was measured for head dim {model.head_dim} on {device_name()}; run "
                "experiments.dispatch_fit there, or choose the rule meff."
            )
        return make_rule(self.backend, self.m_sat, costs)

    def geometry(self, model: Model) -> PoolGeometry:
        """Pools of this configuration for a model.

        Raises:
          ConfigError: the sizes do not fit together.
        """
        fields: dict[str, Any] = {
            "hot_fraction": self.hot_fraction,
            "page_size": self.page_size,
            "n_layers": model.n_layers,
            "n_kv_heads": model.n_kv_heads,
            "head_dim": model.head_dim,
            "slab_align": self.slab_align,
            "max_slabs": self.max_slabs,
            "dtype": self.kv_dtype,
        }
        if self.pool_tokens is not None:
            return PoolGeometry.from_tokens(self.pool_tokens, **fields)
        assert self.pool_bytes is not None  # checked in __post_init__
        return PoolGeometry.from_bytes(self.pool_bytes, **fields)


# The systems of GraniKV §4.3. They share model, scheduler and sampling; only storage and decode
# backend differ.
SYSTEMS: dict[str, dict[str, Any]] = {
    "uniform16": {"backend": "paged", "page_size": 16, "hot_fraction": 0.0},
    "cascade16": {"backend": "cascade16", "page_size": 16, "hot_fraction": 0.0},
    "kvgrain": {"backend": "auto", "page_size": 1},
}


def system_config(name: str, **overrides: Any) -> EngineConfig:
    """Configuration of a named system.

    Args:
      name: ``uniform16`` (16-token pages, each row reads its whole context: the papers' "SGLang
        default"), ``cascade16`` (16-token pages, what the whole batch shares is read once:
        "SGLang-Cascade") or ``kvgrain`` (HOT slabs, COLD pages, per-step dispatch).
      **overrides: fields of ``EngineConfig``. Those that make the system what it is win over them
        for the two baselines.

    Raises:
      ConfigError: unknown name, unknown field, or a value out of range.
    """
    if name not in SYSTEMS:
        raise ConfigError(f"There is no system {name!r}; choose one of {', '.join(SYSTEMS)}.")
    known = {field.name for field in dataclasses.fields(EngineConfig)}
    unknown = sorted(set(overrides) - known)
    if unknown:
        raise ConfigError(f"The engine has no option {', '.join(unknown)}.")
    system = SYSTEMS[name]
    merged = {**system, **overrides} if name == "kvgrain" else {**overrides, **system}
    return EngineConfig(**merged)
