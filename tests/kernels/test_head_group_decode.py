"""Head-group decode: the specification against float64 NumPy, the kernel against it."""

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest
from kernel_suite import HEAD_DIMS, Suite, close, draw, essential, wide
from merge_append_suites import scattered

from pallas_kernels.head_group_decode import head_group_decode

OWN_LAYER = ((1, 0), (3, 2))  # two groups of two, all four heads of one layer
SPANNING = ((-1, 2, -1), (-1, -1, -1), (0, -1, 1))  # groups that also hold other layers' heads


class HeadGroupDecodeSuite(Suite):
    """Each head attends to its own number of tokens, in the pages of its group."""

    def check(
        self,
        lengths,
        *,
        members=OWN_LAYER,
        group=2,
        head_dim=64,
        dtype=None,
        page_size=1,
        splits=None,
        prefix_counts=None,
        order=None,
    ):
        """``lengths``: of each row, group and member."""
        dtype = self.dtype if dtype is None else dtype
        lengths, members, n_slots = np.array(lengths, np.int32), np.array(members), 256
        (n_rows, n_groups, width), n_kv_heads = lengths.shape, int((members >= 0).sum())
        rng, shape = np.random.default_rng(30), (n_slots, width, head_dim)
        q = draw(31, (n_rows, n_kv_heads * group, head_dim), dtype)
        pages = np.array(
            [[rng.permutation(n_slots // page_size) for _ in range(n_groups)] for _ in lengths]
        )
        slots = {
            head: reference.paged_slots(
                pages[:, g], np.zeros(n_rows, int), lengths[:, g, m], page_size
            )
            for (g, m), head in np.ndenumerate(members)
            if head >= 0
        }
        k, v = (np.full(shape, np.nan, np.float32) for _ in range(2))
        for pool, seed in ((k, 32), (v, 33)):
            for (_, m), head in np.ndenumerate(members):
                for own in slots[head] if head >= 0 else ():
                    pool[own, m] = wide(draw(seed, shape, dtype))[own, m]
        k, v = (jnp.asarray(pool).astype(dtype) for pool in (k, v))
        table = pages.copy()
        for row, g in np.ndindex(n_rows, n_groups):
            table[row, g, -(-int(lengths[row, g].max()) // page_size) :] = 1 << 30
        prefix, outs, lses = None, [], []
        if prefix_counts is not None:
            prefix, outs, lses = scattered(prefix_counts, group, head_dim)

        def run(implementation, q, k, v):
            call = jax.jit(
                lambda q, k, v, pages, lengths, prefix, order: head_group_decode(
                    q,
                    k,
                    v,
                    pages,
                    lengths,
                    members=members,
                    page_size=page_size,
                    scale=head_dim**-0.5,
                    splits=splits,
                    prefix=prefix,
                    order=order,
                    implementation=implementation,
                )
            )
            rows = None if order is None else jnp.asarray(order, jnp.int32)
            return call(q, k, v, jnp.asarray(table, jnp.int32), jnp.asarray(lengths), prefix, rows)

        actual = run(self.implementation, q, k, v)
        if self.implementation == "xla":
            heads = {}
            for (_, m), head in np.ndenumerate(members):
                if head >= 0:
                    own = wide(q)[:, head * group : (head + 1) * group]
                    keys, values = (wide(pool)[:, m : m + 1] for pool in (k, v))
                    heads[int(head)] = reference.attend_slots(
                        own, keys, values, slots[head], head_dim**-0.5
                    )
            own = [np.concatenate([heads[i][part] for i in sorted(heads)], 1) for part in (0, 1)]
            expected = reference.merge([own[0], *outs], [own[1], *lses])
        else:
            expected = run("xla", *(x.astype(jnp.float32) for x in (q, k, v)))
        close(actual, expected, dtype)
        return actual

    @essential
    def test_heads_of_a_layer_in_two_groups(self):
        self.check([[[70, 64], [3, 1]], [[17, 16], [2, 0]]])

    @essential
    def test_groups_that_span_layers(self):
        lengths = [[[9, 40, 5], [1, 1, 1], [130, 120, 129]], [[0, 3, 0], [0, 0, 0], [0, 0, 1]]]
        out, lse = self.check(lengths, members=SPANNING)
        assert np.isneginf(lse[1, :2]).all()
        assert (np.asarray(out[1, :2]) == 0).all()

    @pytest.mark.parametrize("page_size", [1, 4, 16])
    def test_page_sizes(self, page_size):
        self.check([[[70, 65], [3, 1]], [[17, 16], [2, 0]]], page_size=page_size)

    @essential
    def test_a_split_table_of_each_head_changes_nothing(self):
        self.check([[[70, 64], [150, 149]], [[17, 16], [2, 0]]], splits=(1, 2, 4, 3))

    def test_groups_of_one_head(self):
        self.check([[[7], [90], [0]], [[1], [2], [3]]], members=((2,), (0,), (1,)))

    def test_one_group_of_all_heads(self):
        self.check([[[7, 90, 0]], [[1, 2, 3]]], members=((0, 1, 2),))

    @pytest.mark.parametrize("splits", [None, (1, 2, 1)])
    @essential
    def test_prefix_partials_are_merged_in_whatever_the_order_of_rows(self, splits):
        lengths = [[[9, 40, 5], [1, 1, 1], [30, 20, 29]], [[0, 3, 0], [0, 0, 0], [0, 0, 1]]]
        counts = [[1, 0, 12], [2, 0, 0]]
        self.check(lengths, members=SPANNING, prefix_counts=counts, splits=splits, order=[1, 0])

    @pytest.mark.parametrize("group", [1, 3, 7, 16])
    def test_query_heads_of_a_kv_head(self, group):
        self.check([[[70, 64], [3, 1]]], group=group)

    @pytest.mark.parametrize("head_dim", HEAD_DIMS)
    def test_head_dims(self, head_dim):
        self.check([[[37, 12], [3, 1]]], head_dim=head_dim, dtype="bfloat16")

    @pytest.mark.parametrize("members", [((0, 0),), ((0, 2),), ((-1, -1),), ((-2, 0),)])
    @essential
    def test_members_that_are_not_each_head_once_are_refused(self, members):
        with pytest.raises(ValueError, match="each KV head from 0 on once"):
            self.check([[[5, 5]]], members=members)

    @essential
    def test_a_split_table_of_the_wrong_size_is_refused(self):
        with pytest.raises(ValueError, match="4 positive integers"):
            self.check([[[5, 5], [5, 5]]], splits=(1, 1, 1))


class TestSpecification(HeadGroupDecodeSuite):
    """``head_group_decode`` in XLA."""


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
class TestTriton(HeadGroupDecodeSuite):
    """``head_group_decode`` in Pallas Triton."""

    implementation = "triton"
    slow_interpreter = True


def test_heads_that_do_not_share_the_query_heads_evenly_are_refused():
    q, pool = jnp.zeros((1, 4, 16)), jnp.zeros((8, 3, 16))
    tables = jnp.zeros((1, 1, 2), jnp.int32), jnp.zeros((1, 1, 3), jnp.int32)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads"):
        head_group_decode(
            q, pool, pool, *tables, members=np.arange(3)[None], page_size=1, scale=1.0
        )
