"""The head-group pool: pages of all groups in one call, against plain-Python sets of pages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvgrain_jax import ConfigError, PoolCorrupted
from kvgrain_jax.budgets import pool
from kvgrain_jax.budgets.ledger import HeadLedger
from kvgrain_jax.budgets.pool import HeadPoolGeometry

N_GROUPS, WIDTH, N_PAGES, N_HOT = 3, 6, 20, 2
GEOMETRY = HeadPoolGeometry(
    group_size=2, head_dim=4, n_pages=N_PAGES, page_size=4, n_hot_pages=N_HOT
)


def make_ledger() -> HeadLedger:
    return HeadLedger(GEOMETRY, n_groups=N_GROUPS, width=WIDTH)


def pages_in(table) -> list[int]:
    flat = np.asarray(table).ravel()
    return flat[flat >= 0].tolist()


class Ledger(RuleBasedStateMachine):
    """Requests come, grow and go; the model is a set of pages for each of them."""

    def __init__(self):
        super().__init__()
        self.ledger = make_ledger()
        self.held: list[tuple[jax.Array, np.ndarray]] = []

    def free(self) -> int:
        return N_PAGES - N_HOT - sum(int(counts.sum()) for _, counts in self.held)

    @rule(counts=st.lists(st.integers(0, WIDTH), min_size=N_GROUPS, max_size=N_GROUPS))
    def reserve(self, counts):
        wanted = np.asarray(counts)
        table = self.ledger.reserve(wanted)
        assert (table is None) == (wanted.sum() > self.free())
        if table is not None:
            assert (np.asarray(table) >= 0).sum(axis=1).tolist() == counts
            self.held.append((table, wanted))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def grow(self, data):
        i = data.draw(st.integers(0, len(self.held) - 1))
        table, counts = self.held[i]
        more = np.asarray([data.draw(st.integers(n, WIDTH)) for n in counts.tolist()])
        new = self.ledger.reserve(more, held=counts, table=table)
        assert (new is None) == (more.sum() - counts.sum() > self.free())
        if new is not None:
            for group, n in enumerate(counts.tolist()):  # what was held stays in its place
                assert np.array_equal(new[group, :n], table[group, :n])
            self.held[i] = new, more

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data):
        table, counts = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.ledger.release(table, int(counts.sum()))

    @invariant()
    def every_page_has_one_owner(self):
        owned = [page for table, _ in self.held for page in pages_in(table)]
        assert len(set(owned)) == len(owned)
        assert set(owned) <= set(range(N_HOT, N_PAGES))
        assert self.ledger.free == self.free()
        assert self.ledger.allocated_bytes == len(owned) * GEOMETRY.page_bytes
        self.ledger.check_integrity([table for table, _ in self.held])


TestLedger = Ledger.TestCase
TestLedger.settings = settings(max_examples=15, stateful_step_count=12, deadline=None)


def test_group_that_needs_more_pages_than_a_table_holds_changes_nothing():
    pages = pool.init_pages(GEOMETRY)
    table = pool.empty_table(N_GROUPS, WIDTH)
    counts = jnp.asarray([1, WIDTH + 1, 1], jnp.int32)
    after, same, ok = jax.jit(pool.reserve)(pages, table, jnp.zeros_like(counts), counts)
    assert not ok
    assert int(after.n_free) == N_PAGES - N_HOT
    assert pages_in(same) == []


def test_freeing_twice_is_refused():
    ledger = make_ledger()
    table = ledger.reserve(np.asarray([1, 2, 0]))
    assert table is not None
    ledger.release(table, 3)
    with pytest.raises(PoolCorrupted, match="twice"):
        ledger.release(table, 3)


def test_lost_page_is_found():
    ledger = make_ledger()
    assert ledger.reserve(np.asarray([1, 2, 0])) is not None
    with pytest.raises(PoolCorrupted, match="lost"):
        ledger.check_integrity([])


def test_token_of_a_head_is_written_to_and_read_from_its_page_and_column():
    kv = pool.init(GEOMETRY)
    table = jnp.asarray([[5, 3, -1], [7, 2, 4]], jnp.int32)
    columns, tokens = jnp.asarray([1, 0]), jnp.asarray([[0, 6], [5, 11]], jnp.int32)
    rows = pool.rows_of(table, columns, tokens, page_size=4, group_size=2)
    # Page, row of the page, column: by hand.
    assert rows.tolist() == [[(5 * 4 + 0) * 2 + 1, (3 * 4 + 2) * 2 + 1], [18, 38]]
    k = jnp.arange(16, dtype=jnp.float32).reshape(4, 4)
    flat = rows.reshape(-1).at[3].set(GEOMETRY.n_rows)  # one is dropped
    kv = pool.write(kv, flat, k, 2 * k, k[:, 0], jnp.arange(4, dtype=jnp.int32))
    assert np.array_equal(kv.k[20, 1], k[0])
    assert np.array_equal(kv.v[14, 1], 2 * k[1])
    assert int(kv.positions[9, 0]) == 2
    assert int(jnp.count_nonzero(kv.k.sum(axis=2))) == 3
    got_k, got_v = pool.read_vectors(kv, rows[0])
    assert np.array_equal(got_k, k[:2])
    assert np.array_equal(got_v, 2 * k[:2])


def test_bytes_are_those_of_the_arrays():
    kv = pool.init(GEOMETRY)
    assert kv.k.nbytes + kv.v.nbytes == N_PAGES * GEOMETRY.page_bytes


def test_pool_of_bytes_is_as_large_as_fits():
    fields = {"group_size": 4, "head_dim": 8, "page_size": 16, "dtype": jnp.bfloat16}
    one = 2 * 16 * 4 * 8 * 2
    assert HeadPoolGeometry.from_bytes(3 * one + one - 1, **fields).n_pages == 3
    with pytest.raises(ConfigError, match="hold no page"):
        HeadPoolGeometry.from_bytes(one - 1, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n_pages": 0}, "n_pages is 0"),
        ({"group_size": 0}, "group_size is 0"),
        ({"page_size": 3}, "page_size is 3"),
        ({"n_hot_pages": 21}, "n_hot_pages is 21"),
        ({"n_pages": 2**28, "page_size": 16}, "int32"),
    ],
)
def test_impossible_sizes_are_refused(fields, words):
    sizes = {"group_size": 2, "head_dim": 4, "n_pages": N_PAGES, "page_size": 4}
    with pytest.raises(ConfigError, match=words):
        HeadPoolGeometry(**(sizes | fields))
