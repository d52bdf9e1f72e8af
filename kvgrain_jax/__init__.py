"""KVGrain: KV caches paged at different granularities in different regions, in JAX.

Shared prefixes lie in contiguous HOT slabs, each request's own tokens in COLD pages; one decode step
reads a shared prefix once for all rows. The parts, from the bottom:

- ``hot``, ``cold``, ``lending``, ``buffers``: pool states as pytrees, pure functions over them;
- ``decode_attention`` with ``make_plan`` and ``Segment``: attention of a batch over the pools;
- ``prefix``: the radix index and the cache that couples it to the pools;
- ``engine``: requests in, tokens out.
"""

from kvgrain_jax.attention import AttentionPartial as AttentionPartial
from kvgrain_jax.attention import DecodePlan as DecodePlan
from kvgrain_jax.attention import DispatchRule as DispatchRule
from kvgrain_jax.attention import Segment as Segment
from kvgrain_jax.attention import decode_attention as decode_attention
from kvgrain_jax.attention import find_segments as find_segments
from kvgrain_jax.attention import make_plan as make_plan
from kvgrain_jax.attention import make_rule as make_rule
from kvgrain_jax.attention import merge as merge
from kvgrain_jax.engine import Engine as Engine
from kvgrain_jax.engine import EngineConfig as EngineConfig
from kvgrain_jax.engine import Model as Model
from kvgrain_jax.engine import Request as Request
from kvgrain_jax.engine import SamplingParams as SamplingParams
from kvgrain_jax.engine import TokenEvent as TokenEvent
from kvgrain_jax.engine import system_config as system_config
from kvgrain_jax.errors import ConfigError as ConfigError
from kvgrain_jax.errors import KVGrainError as KVGrainError
from kvgrain_jax.errors import PoolCorrupted as PoolCorrupted
from kvgrain_jax.errors import PoolExhausted as PoolExhausted
from kvgrain_jax.errors import RequestError as RequestError
from kvgrain_jax.pools import KVCache as KVCache
from kvgrain_jax.pools import PoolGeometry as PoolGeometry
from kvgrain_jax.pools import PoolState as PoolState
from kvgrain_jax.pools import buffers as buffers
from kvgrain_jax.pools import cold as cold
from kvgrain_jax.pools import hot as hot
from kvgrain_jax.pools import lending as lending

__version__ = "0.1.0"
