"""A prefix cache over tiny pools whose admissions are checked by counting slots."""

from collections import Counter

import jax
import numpy as np

from kvgrain_jax.pools import PoolGeometry
from kvgrain_jax.prefix import Match, Node, PrefixCache, Reservation
from kvgrain_jax.prefix.policy import parse

HOT_PAGES, COLD_PAGES, ROW_PAGES = 10, 12, 16


def geometry(page_size: int, max_slabs: int = 6) -> PoolGeometry:
    """Tiny pools of as many pages whatever the page size; slabs begin at every second page."""
    return PoolGeometry(
        n_layers=1,
        n_kv_heads=1,
        head_dim=2,
        n_slots=(HOT_PAGES + COLD_PAGES) * page_size,
        n_hot=HOT_PAGES * page_size,
        page_size=page_size,
        slab_align=2 * page_size,
        max_slabs=max_slabs,
    )


class WatchedCache(PrefixCache):
    """A prefix cache whose answers to ``reserve`` are checked by counting slots.

    Attributes:
      tables: page table of each running request, as the batch would hold it.
      events: how often each thing that tests are about has happened.
    """

    def __init__(self, page_size: int, policy: str, min_tokens: int):
        super().__init__(geometry(page_size), parse(policy, min_tokens), ROW_PAGES)
        self.tables: dict[Reservation, list[int]] = {}
        self.events: Counter[str] = Counter()
        evict_one = self.index.evict_one

        def counted(pool: str):
            victim = evict_one(pool)
            self.events[f"eviction from {pool}"] += bool(victim)
            return victim

        self.index.evict_one = counted

    def reserve(
        self, prompt: np.ndarray, *, max_new_tokens: int, shared_tokens: int = 0
    ) -> Reservation | None:
        page = self.geometry.page_size
        match = self.index.match(prompt, limit=prompt.size - 1)
        n_pages = -(-(prompt.size + max_new_tokens - 1) // page)
        expected = self.has_room(match, n_pages)
        below_hot = match.node.is_hot
        before = self.state()
        reservation = super().reserve(
            prompt, max_new_tokens=max_new_tokens, shared_tokens=shared_tokens
        )
        self.ledger.settle()
        assert (reservation is not None) == expected
        if reservation is None:
            assert self.state() == before
            self.events["no room"] += 1
            return None
        assert reservation.cached == match.length == reservation.node.end
        assert reservation.max_pages == n_pages
        new = reservation.declared - reservation.cached
        wanted = below_hot and new > 0 and self.policy.wants_hot(1, True, new)
        assert wanted or reservation.slab is None
        self.events["COLD fallback"] += wanted and reservation.slab is None
        self.tables[reservation] = reservation.pages.tolist()
        return reservation

    def has_room(self, match: Match, n_pages: int) -> bool:
        """Count the pages that could be free for a request: what no running one names or may take.

        In COLD that is every such page; in HOT those above the last that is named, which can be
        lent.
        """
        page = self.geometry.page_size
        matched = self.index.pages(match.node)[: match.length // page].tolist()
        named = set(matched)
        for reservation, table in self.tables.items():
            prompt_pages = reservation.pages.tolist()
            named.update(prompt_pages, table[len(prompt_pages) :])
        end_of_hot = self.ledger.hot_limit // page
        top = max((p + 1 for p in named if p < end_of_hot), default=0)
        free = sum(p not in named for p in range(top, self.geometry.n_pages))
        promised = sum(r.max_pages - len(table) for r, table in self.tables.items())
        return n_pages - len(matched) <= free - promised

    def state(self) -> tuple:
        """Everything that ``reserve`` might change."""

        def tree(node: Node) -> tuple:
            below = sorted(tree(child) for child in node.children.values())
            return (node.id, node.end, node.hits, node.lock_count, node.last_access, below)

        pools = [np.array(x).tolist() for x in jax.tree.leaves(self.ledger.pools)]
        counts = (self.ledger.cold_free, self.ledger.outstanding, self.ledger.lent)
        return pools, counts, self.ledger.slabs, tree(self.index.root), self.index.size()
