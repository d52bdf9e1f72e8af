"""The systems that the Tangram experiments compare: enter a model, a profile and a cell, leave an engine.

full       the whole cache, pages of head groups, heads cut evenly.
budgets    deterministic budgets; one page table for all heads and layers, as large as the largest
           budget (unified pages): what the paper calls "only Det. Budget".
groups     budgets and head groups, each with pages of its own.
balanced   and the split table by budgets: all of Tangram.
dynamic    budgets that each prompt decides; compressed and reclaimed after its prefill.
shared     all of Tangram, and shared prefixes compressed once (both axes).
granikv    shared prefixes without compression: the engine of GraniKV.
"""

import dataclasses
import functools
import gc
import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np

import models
from experiments.tangram_attention_caches import Demands, read_demands
from kvgrain_jax.budgets import BudgetPlan, HeadGroups, make_groups
from kvgrain_jax.budgets.chunk_scores import ChunkScorer
from kvgrain_jax.budgets.dynamic import DynamicEngine
from kvgrain_jax.budgets.engine import HeadEngine
from kvgrain_jax.budgets.engine_config import HeadEngineConfig
from kvgrain_jax.budgets.gates import read_gates
from kvgrain_jax.engine import Engine, system_config
from kvgrain_jax.errors import ConfigError

SYSTEMS = ("full", "budgets", "groups", "balanced", "dynamic", "shared", "granikv")


@dataclasses.dataclass(frozen=True, eq=False)
class Bench:
    """A model, the demands of its heads, and what all systems have in common.

    Attributes:
      loaded: the model.
      demands: what its heads ask for.
      fields: of ``HeadEngineConfig``; ``scorer`` is a name, ``gates`` a file of gates for it or empty.
    """

    loaded: models.LoadedModel
    demands: Demands
    fields: Mapping[str, Any]

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys and values of one token in a whole cache."""
        model = self.loaded.model
        heads = 2 * model.n_layers * model.n_kv_heads * model.head_dim
        return heads * jnp.dtype(self.fields["kv_dtype"]).itemsize

    def whole_bytes(self, n_tokens: int) -> int:
        """Bytes of the whole cache of ``n_tokens`` tokens, in pages."""
        page = self.fields["page_size"]
        return -(-n_tokens // page) * page * self.token_bytes

    def groups(self, group_size: int, unified: bool) -> HeadGroups:
        """Head groups; with ``unified`` one group for each layer, all of one number of pages."""
        fractions = self.demands.fractions
        return _groups(fractions.tobytes(), fractions.shape, group_size, unified)

    def plan(self, evicted: float) -> BudgetPlan:
        """Budgets that drop ``evicted`` percent of the tokens."""
        demands = self.demands
        return BudgetPlan(
            demands.fractions, 1 - evicted / 100, sinks=demands.sinks, window=demands.window
        )

    def head_engine(
        self, system: str, *, evicted: float, group_size: int, **fields: Any
    ) -> HeadEngine:
        """An engine over head groups.

        Args:
          system: one of ``SYSTEMS`` but ``granikv``.
          evicted: share of the tokens that is dropped, percent.
          group_size: ``G_h``.
          **fields: of ``HeadEngineConfig``, in which it differs from the others.

        Raises:
          ConfigError: the group size does not divide the heads, or a field is wrong.
        """
        fields = {**self.fields, **fields}
        fields = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
        fields["scorer"] = ChunkScorer(fields["scorer"])
        path = fields.pop("gates")
        gates = read_gates(path, checkpoint=self.loaded.checkpoint) if path else None
        fields["kv_dtype"] = jnp.dtype(fields["kv_dtype"])
        fields["balance"] = "even" if system in ("full", "budgets", "groups") else "budgets"
        engine = DynamicEngine if system == "dynamic" else HeadEngine
        try:
            config = HeadEngineConfig(**fields)
        except TypeError as error:
            raise ConfigError(f"config.engine: {error}.") from error
        groups = self.groups(group_size, system == "budgets")
        return engine(self.loaded.model, self.plan(evicted), groups, config, gates)

    def granikv_engine(self, *, pool_tokens: int, hot_tokens: int, max_batch: int) -> Engine:
        """The engine of GraniKV, with room for so many tokens."""
        fields = self.fields
        config = system_config(
            "kvgrain",
            max_batch=max_batch,
            max_context=fields["max_context"],
            pool_tokens=pool_tokens,
            hot_fraction=hot_tokens / pool_tokens,
            chunk_tokens=fields["chunk_tokens"],
            decode_steps=fields["decode_steps"],
            greedy=fields["greedy"],
            kv_dtype=jnp.dtype(fields["kv_dtype"]),
        )
        return Engine(self.loaded.model, config)


def make_bench(config: Mapping[str, Any]) -> Bench:
    """Loads the model and the profile of a config.

    Raises:
      ConfigError: there is no profile, or it or the model cannot be read.
    """
    demands = _read_profile(config)
    loaded = models.load(config["model"], dtype=config["dtype"])
    if config["max_context"]:
        model = dataclasses.replace(loaded.model, max_context=config["max_context"])
        loaded = dataclasses.replace(loaded, model=model)
    return Bench(loaded, demands, config["engine"])


@functools.cache  # programs are compiled for the groups they are given
def _groups(fractions: bytes, shape: tuple[int, int], group_size: int, unified: bool) -> HeadGroups:
    demands = np.frombuffer(fractions).reshape(shape)
    if not unified:
        return make_groups(demands, group_size)
    layers = make_groups(demands, demands.shape[1], scope="layer")
    return dataclasses.replace(layers, unified=True)


def free_memory() -> None:
    """Lets go of engines that nobody names any more: the pools are most of the memory."""
    gc.collect()


def _read_profile(config: Mapping[str, Any]) -> Demands:
    path = config["profile"]["path"]
    if not path or not os.path.exists(path):
        raise ConfigError(
            f"The head profile {path!r} is not there. Give --config.profile.path=FILE: a published one "
            "(see configs/tangram/published_profiles.py), or choose one of another model, whose "
            "fractions are then resampled: results/cpu/tangram/head_profile/profile_0.25.npz."
        )
    found = read_demands(config["model"].removeprefix("random:"), path)
    return dataclasses.replace(
        found, sinks=config["profile"]["sinks"], window=config["profile"]["window"]
    )
