"""The serving engine: requests, scheduler, jitted decode loop, sampling, metrics."""

from kvgrain_jax.engine.config import SYSTEMS as SYSTEMS
from kvgrain_jax.engine.config import EngineConfig as EngineConfig
from kvgrain_jax.engine.config import system_config as system_config
from kvgrain_jax.engine.decode_loop import decode_loop as decode_loop
from kvgrain_jax.engine.engine import Engine as Engine
from kvgrain_jax.engine.metrics import RequestMetrics as RequestMetrics
from kvgrain_jax.engine.metrics import RunMetrics as RunMetrics
from kvgrain_jax.engine.model import Model as Model
from kvgrain_jax.engine.request import GREEDY as GREEDY
from kvgrain_jax.engine.request import Request as Request
from kvgrain_jax.engine.request import SamplingParams as SamplingParams
from kvgrain_jax.engine.serving import TokenEvent as TokenEvent
