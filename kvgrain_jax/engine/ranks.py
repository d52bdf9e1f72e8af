"""Running the engine's programs over the ranks of a mesh: enters a model, leaves where things go."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kvgrain_jax.engine.model import Model
from kvgrain_jax.sharding import KV_HEADS, REPLICATED, TP, put


@dataclasses.dataclass(frozen=True)
class Ranks:
    """Devices that run one program together; hashable, for a static argument of ``jax.jit``.

    Attributes:
      mesh: the devices; None for the default one.
      specs: how each weight is cut, leaf by leaf.
      tree: structure of the weights.
    """

    mesh: Mesh | None = None
    specs: tuple[PartitionSpec, ...] = ()
    tree: Any = None

    @classmethod
    def of(cls, model: Model) -> "Ranks":
        """Where a model runs."""
        if model.mesh is None:
            return cls()
        is_spec = lambda leaf: isinstance(leaf, PartitionSpec)  # noqa: E731
        leaves, tree = jax.tree.flatten(model.params_spec, is_leaf=is_spec)
        return cls(model.mesh, tuple(leaves), tree)

    @property
    def axis(self) -> str | None:
        """Mesh axis of the ranks; None on one device."""
        return None if self.mesh is None else TP

    @property
    def size(self) -> int:
        """How many ranks cut the model."""
        return 1 if self.mesh is None else self.mesh.shape[TP]

    def run(self, program: Callable[..., Any], params, kv, *whole, n_results: int) -> Any:
        """Call ``program(params, kv, *whole)`` on every rank.

        Args:
          program: sees the rank's part of weights and KV buffers. Returns the KV buffers and
            ``n_results`` other values that are equal on all ranks.
          params: weights.
          kv: KV buffers.
          *whole: what every rank has whole.
          n_results: results besides the KV buffers.
        """
        if self.mesh is None:
            return program(params, kv, *whole)
        spec = jax.tree.unflatten(self.tree, self.specs)
        return jax.shard_map(
            program,
            mesh=self.mesh,
            in_specs=(spec, KV_HEADS, *[REPLICATED] * len(whole)),
            out_specs=(KV_HEADS, *[REPLICATED] * n_results),
            check_vma=False,
        )(params, kv, *whole)

    def whole(self, tree: Any) -> Any:
        """Place arrays of the host whole on every device."""
        if self.mesh is None:
            return tree
        return put(tree, NamedSharding(self.mesh, REPLICATED))
