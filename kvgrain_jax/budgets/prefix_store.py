"""The shared prefixes of one engine: who has which, and what to drop when a new one needs room."""

import dataclasses

import numpy as np

from kvgrain_jax.budgets.admission import Sequence
from kvgrain_jax.budgets.budget import BudgetPlan
from kvgrain_jax.budgets.ledger import HeadLedger
from kvgrain_jax.budgets.shared import SharedPrefix, slab_layout
from kvgrain_jax.budgets.turns import Span
from kvgrain_jax.engine.request import Request


class PrefixStore:
    """Shared prefixes by their tokens and retention, least recently used first.

    Args:
      ledger: the pool whose slabs they take.
    """

    def __init__(self, ledger: HeadLedger):
        self.ledger = ledger
        self.prefixes: dict[tuple[bytes, float], SharedPrefix] = {}

    def share(self, row: Sequence) -> tuple[Sequence, Sequence | None]:
        """Give a request the prefix that it declares, if the slabs have room for it.

        A prefix takes its slab before it is computed, as its size is known.

        Args:
          row: the request, on its own.

        Returns:
          The request, behind its prefix where it has one, and the sequence that computes the
          prefix where it is a new one.
        """
        prompt = np.asarray(row.request.prompt)
        n = min(row.request.shared_tokens, prompt.size - 1)  # the last token must be computed
        if n < 1 or row.conversation or not self.ledger.geometry.n_hot_pages:
            return row, None
        key = prompt[:n].tobytes(), row.plan.retention
        prefix, fills = self.prefixes.pop(key, None), None
        if prefix is None:
            prefix = self._new(n, row.plan)
            if prefix is None:
                return row, None
            name = f"{row.request.id} (shared prefix)"
            fills = Sequence(
                Request(name, prompt[:n], 1), row.plan, [Span(prompt[:n], True)], fills=prefix
            )
        self.prefixes[key] = prefix  # most recently used
        return dataclasses.replace(row, prefix=prefix, prompt=[Span(prompt[n:], True)]), fills

    def drop(self, prefix: SharedPrefix) -> None:
        """Free the slab of a prefix and forget it."""
        self.ledger.return_slab(prefix.base, prefix.size)
        self.prefixes = {key: kept for key, kept in self.prefixes.items() if kept is not prefix}

    def _new(self, n_tokens: int, plan: BudgetPlan) -> SharedPrefix | None:
        lengths = plan.budgets(n_tokens)
        starts, size = slab_layout(lengths, self.ledger.geometry.slab_align)
        base = self.ledger.take_slab(size)
        for idle in [p for p in self.prefixes.values() if p.ready and not p.users]:
            if base is not None:
                break
            self.drop(idle)
            base = self.ledger.take_slab(size)
        return None if base is None else SharedPrefix(n_tokens, base, size, base + starts, lengths)
