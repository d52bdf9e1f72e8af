"""The prefix cache: index, pools and KV buffers together, from admission to the end of a request.

    reserve(prompt) -> Reservation     pins what is cached, takes a slab and pages for the rest
    commit(reservation)                prefill is done: the prompt's KV become the index's
    finish(reservation, ...)           the generated tokens too; what is left over is freed
    cancel(reservation)                the request ends early

An admitted request can always finish: the pages that it may still take while decoding are
committed to it. Admission is HOT first with COLD as the fallback, and no live slab ever moves
(GraniKV B.10). Beyond the paper, a prefix in COLD may be promoted by one copy on the device, and one that
HOT has no room for takes consecutive COLD pages where there are such: it is then read as a slab is.

    HOT  |  slabs of the index, slabs of requests in prefill, free ranges, unused, lent  |
    COLD |  pages of the index, pages of requests, free pages                            |
"""

import math
from collections.abc import Sequence

import numpy as np
from jax.sharding import Mesh

from kvgrain_jax.errors import PoolCorrupted
from kvgrain_jax.pools import PoolGeometry, cold
from kvgrain_jax.prefix import audit
from kvgrain_jax.prefix.ledger import PoolLedger
from kvgrain_jax.prefix.node import Cold, Hot, Node, Piece
from kvgrain_jax.prefix.policy import AdmissionPolicy
from kvgrain_jax.prefix.radix import Match, RadixIndex
from kvgrain_jax.prefix.reservation import Reservation


class PrefixCache:
    """Index, pools and KV buffers of one engine.

    Args:
      geometry: sizes of the pools.
      policy: which prefixes go to HOT.
      row_pages: pages of the longest context of a request.
      mesh: devices over which the KV heads are cut; None for the default device.

    Attributes:
      index: the radix tree; owns the slots of its nodes.
      ledger: pools and KV buffers, on the device.
    """

    def __init__(
        self,
        geometry: PoolGeometry,
        policy: AdmissionPolicy,
        row_pages: int,
        mesh: Mesh | None = None,
    ):
        self.geometry = geometry
        self.policy = policy
        self.row_pages = row_pages
        self.index = RadixIndex(geometry.page_size)
        self.ledger = PoolLedger(geometry, row_pages, mesh)

    # -- the life of a request -----------------------------------------------------------------

    def reserve(
        self, prompt: np.ndarray, *, max_new_tokens: int, shared_tokens: int = 0
    ) -> Reservation | None:
        """Reserve all that a request can need, or return None and change nothing.

        Args:
          prompt: token ids ``[n]``.
          max_new_tokens: tokens it may generate.
          shared_tokens: leading tokens declared to be a shared prefix.

        Returns:
          The reservation; None where the pools have no room now. It may come with evictions and
          promotions, of which running requests see nothing but ``Reservation.promoted``. Under
          ``ledger.together`` its own pages are known when that ends.
        """
        page = self.geometry.page_size
        prompt_pages = math.ceil(prompt.size / page)
        max_pages = math.ceil((prompt.size + max_new_tokens - 1) / page)
        match = self.index.match(prompt, limit=prompt.size - 1)
        if not self._can_make_room(max_pages - match.length // page, match):
            return None
        node = self.index.lock(match)
        declared = shared_tokens // page * page
        slab = self._reserve_slab(node, declared)
        if slab and not self._make_room(max_pages - slab.stop // page):
            self.ledger.free([slab])
            slab = None
        if not slab and not self._make_room(max_pages - match.length // page):
            self.index.unlock(node)
            return None
        n_shared = (slab.stop if slab else match.length) // page
        pages = np.empty(prompt_pages, np.int32)
        run = None if slab else self._reserve_run(node, declared)
        n_taken = run.stop // page if run else n_shared
        if run:
            pages[n_shared:n_taken] = run.pages(page)
        self.ledger.take_pages(pages[n_taken:])
        self.ledger.outstanding += max_pages - prompt_pages
        promoted = self._promote_path(node)
        shared = [self.index.pages(node), slab.pages(page)] if slab else [self.index.pages(node)]
        pages[:n_shared] = np.concatenate(shared)
        return Reservation(
            prompt=prompt,
            declared=declared,
            node=node,
            cached=match.length,
            slab=slab,
            run=run,
            pages=pages,
            max_pages=max_pages,
            promoted=promoted,
        )

    def commit(self, reservation: Reservation) -> bool:
        """The prompt is computed: hand its full pages to the index.

        Where another request computed the same tokens meanwhile, its copy stays and ours is
        freed; ``reservation.pages`` then names the copy that stays.

        Returns:
          Whether ``reservation.pages`` changed.
        """
        page = self.geometry.page_size
        end = reservation.prompt.size // page * page
        inserted = self.index.insert(
            reservation.prompt[:end], self._own_pieces(reservation, end), reservation.declared
        )
        reservation.node = self.index.extend(reservation.node, inserted.node)
        for duplicate in inserted.duplicates:
            span = slice(duplicate.start // page, duplicate.stop // page)
            length = duplicate.stop - duplicate.start
            reservation.pages[span] = duplicate.kept.page_ids(length, page)
            self.ledger.free([Piece(duplicate.start, duplicate.stop, duplicate.yours)])
        # A HOT slab below a COLD node cannot join the index; it stays the request's own.
        hot_rejected = [piece for piece in inserted.rejected if piece.is_hot]
        reservation.slab = hot_rejected[0] if hot_rejected else None
        reservation.committed = True
        return bool(inserted.duplicates)

    def decoded(self, pool: cold.ColdState, n_free: int) -> None:
        """The decode loop ran: take the COLD pool that it left, with ``n_free`` free pages."""
        self.ledger.outstanding -= self.ledger.cold_free - n_free
        self.ledger.set_cold(pool, n_free)

    def finish(self, reservation: Reservation, tokens: np.ndarray, pages: np.ndarray) -> None:
        """The request is done: its full pages go to the index, the rest is freed.

        Args:
          reservation: a committed reservation.
          tokens: all tokens whose KV were written: prompt and generated ones, ``[n]``.
          pages: page table of the row, of which ``ceil(n / page_size)`` entries count.
        """
        page = self.geometry.page_size
        n_pages = math.ceil(tokens.size / page)
        if reservation.slab is None:
            end = max(tokens.size // page * page, reservation.node.end)
            start = reservation.node.end
            pieces = []
            if end > start:
                pieces = [Piece(start, end, Cold(pages[start // page : end // page]))]
            inserted = self.index.insert(tokens[:end], pieces)
            for duplicate in inserted.duplicates:
                self.ledger.free([Piece(duplicate.start, duplicate.stop, duplicate.yours)])
            self.ledger.free_pages(pages[end // page : n_pages])
        else:
            self.ledger.free([reservation.slab])
            self.ledger.free_pages(pages[reservation.slab.stop // page : n_pages])
        self.index.unlock(reservation.node)
        self.ledger.outstanding -= reservation.max_pages - n_pages

    def cancel(self, reservation: Reservation) -> None:
        """The request ends before its prompt was committed: free all that is its own."""
        page = self.geometry.page_size
        start = reservation.node.end
        if reservation.slab:
            self.ledger.free([reservation.slab])
            start = reservation.slab.stop
        self.ledger.free_pages(reservation.pages[start // page :])
        self.index.unlock(reservation.node)
        self.ledger.outstanding -= reservation.max_pages - len(reservation.pages)

    def contiguous_pieces(self, reservation: Reservation) -> list[tuple[int, int, int]]:
        """Contiguous pieces ``(node id, base, length)`` at the front of the request's context.

        They are slabs, and of an engine that has a HOT pool the prefixes in consecutive COLD pages that
        the policy would have in HOT. The slab or run of a request in prefill comes last, under id -1: no
        other row shares it.
        """
        pieces = []
        for node in self.index.path(reservation.node):
            like_hot = node.is_hot or self.policy.wants_hot(node.hits, node.declared, node.length)
            base = self._base(node.piece) if like_hot else None
            if base is None:
                return pieces
            pieces.append((node.id, base, node.length))
        own = reservation.slab or reservation.run
        base = self._base(own) if own and not reservation.committed else None
        if own and base is not None:
            pieces.append((-1, base, own.length))
        return pieces

    def drop_all(self) -> None:
        """Forget every cached prefix, as after a change of the weights.

        Raises:
          KVGrainError: a request is still running.
        """
        self.ledger.free(self.index.drop_all())

    def check_integrity(self, holders: Sequence[tuple[Reservation, np.ndarray]]) -> None:
        """Check that pools, index and running requests agree, and the host's mirrors with them.

        Args:
          holders: each running request with the page table of its context so far.

        Raises:
          PoolCorrupted: something does not agree; the message says what.
        """
        audit.check(self.geometry, self.ledger.pools, self.index, holders)
        self.ledger.check_counts()
        committed = sum(reservation.max_pages - len(pages) for reservation, pages in holders)
        if committed != self.ledger.outstanding:
            raise PoolCorrupted(
                f"{self.ledger.outstanding} pages count as committed; the running requests may "
                f"still take {committed}."
            )

    # -- room ------------------------------------------------------------------------------------

    def _can_make_room(self, pages: int, match: Match) -> bool:
        """Whether ``_make_room`` can succeed while the matched prefix stays."""
        page = self.geometry.page_size
        spare = self.ledger.spare
        if spare >= pages:
            return True
        kept_cold = sum(
            (match.node_tokens if node is match.node else node.length) // page
            for node in self.index.path(match.node)
            if node.lock_count == 0 and not node.is_hot
        )
        top = max((end for _, end in self._fixed_ranges(match)), default=0)
        lendable = max(0, self.ledger.hot_limit // page - math.ceil(top / page))
        evictable = self.index.size().evictable_cold_pages - kept_cold
        return spare + evictable + lendable >= pages

    def _make_room(self, pages: int) -> bool:
        """Lend and evict until ``pages`` uncommitted COLD pages are free."""

        def missing() -> int:
            return pages - self.ledger.spare

        self.ledger.lend(missing())
        if missing() > 0:
            self.ledger.free(self.index.evict("cold", missing()))
        while missing() > 0 and (victim := self.index.evict_one("hot")):
            self.ledger.free(victim)
            self.ledger.lend(missing())
        return missing() <= 0

    def _fixed_ranges(self, match: Match | None = None) -> list[tuple[int, int]]:
        """HOT ranges ``[start, end)`` that no eviction frees: locked, matched, or in prefill."""
        matched = {}
        if match:
            for node in self.index.path(match.node):
                if isinstance(node.tag, Hot):
                    tokens = match.node_tokens if node is match.node else node.length
                    matched[node.tag.base] = tokens
        indexed = self.index.hot_ranges()
        fixed = []
        for base, length, evictable in indexed:
            kept = matched.get(base, 0) if evictable else length
            if kept:
                fixed.append((base, base + kept))
        owned = {base for base, _, _ in indexed}
        fixed += [(base, base + n) for base, n in self.ledger.slabs if base not in owned]
        return sorted(fixed)

    # -- HOT -------------------------------------------------------------------------------------

    def _reserve_slab(self, node: Node, declared: int) -> Piece | None:
        """A slab for the declared tokens behind ``node``, if the policy wants one and it fits."""
        n = declared - node.end
        if n < 1 or not node.is_hot or not self.policy.wants_hot(1, True, n):
            return None
        base = self._take_slab(n)
        return None if base is None else Piece(node.end, declared, Hot(base))

    def _reserve_run(self, node: Node, declared: int) -> Piece | None:
        """Consecutive COLD pages for the declared tokens behind ``node``, if HOT should have them."""
        n = declared - node.end
        if n < 1 or not self.geometry.n_hot or not self.policy.wants_hot(1, True, n):
            return None
        pages = self.ledger.take_run(n // self.geometry.page_size)
        return None if pages is None else Piece(node.end, declared, Cold(pages))

    def _base(self, piece: Piece) -> int | None:
        """Slot of a piece's first token; None where its tokens are to be read by their pages."""
        if isinstance(piece.tag, Hot):
            return piece.tag.base
        if not (self.geometry.n_hot and piece.tag.consecutive):
            return None
        return int(piece.tag.pages[0]) * self.geometry.page_size

    def _promote_path(self, node: Node) -> tuple[Node, ...]:
        """Move the COLD nodes down to ``node`` that the policy now wants in HOT, from the top."""
        page = self.geometry.page_size
        promoted = []
        for part in self.index.path(node):
            if part.is_hot:
                continue
            if not self.policy.wants_hot(part.hits, part.declared, part.length):
                break
            base = self._take_slab(part.length)
            if base is None:
                break
            self.ledger.copy_to_slab(part.pages(page), base)
            self.ledger.free_pages(self.index.promote(part, base))
            promoted.append(part)
        return tuple(promoted)

    def _take_slab(self, n: int) -> int | None:
        """Take ``n`` HOT slots; takes back and evicts only what makes a large enough hole."""
        base = self.ledger.take_slab(n)
        if base is None and self.ledger.lent and self._has_hole(n, self.geometry.n_hot):
            self._take_back()
            base = self.ledger.take_slab(n)
        if base is None and self._has_hole(n, self.ledger.hot_limit):
            while base is None and (victim := self.index.evict_one("hot")):
                self.ledger.free(victim)
                base = self.ledger.take_slab(n)
        return base

    def _take_back(self) -> None:
        """Take lent pages back to HOT; cached tokens of finished requests in them are evicted."""
        in_use = self.ledger.lent_in_use()
        if in_use:
            self.ledger.free(self.index.evict_range(*self.ledger.lent_range, in_use))
        self.ledger.take_back()

    def _has_hole(self, n: int, limit: int) -> bool:
        """Whether ``n`` slots below ``limit`` are free once all that can be evicted is."""
        align = self.geometry.slab_align
        start = 0
        for lo, hi in [*self._fixed_ranges(), (limit, limit)]:
            if lo - math.ceil(start / align) * align >= n:
                return True
            start = hi
        return False

    def _own_pieces(self, reservation: Reservation, end: int) -> list[Piece]:
        """The pieces of the prompt behind the cached part, up to ``end``."""
        page = self.geometry.page_size
        pieces = [reservation.slab] if reservation.slab else []
        start = reservation.slab.stop if reservation.slab else reservation.node.end
        if end > start:
            pages = reservation.pages[start // page : end // page]
            pieces.append(Piece(start, end, Cold(pages)))
        return pieces
