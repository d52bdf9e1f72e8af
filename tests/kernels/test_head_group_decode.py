"""Head-group decode: the specification against float64 NumPy, the kernel against it."""

import jax
import jax.numpy as jnp
import kernel_reference as reference
import numpy as np
import pytest
from kernel_suite import HEAD_DIMS, Suite, close, draw, essential, wide
from merge_append_suites import scattered
from test_gpu_lowering import lower

from pallas_kernels.head_group_decode import head_group_decode, layer_work, mosaic, triton
from pallas_kernels.implementation import ImplementationError, trace_once

OWN_LAYER = ((1, 0), (3, 2))  # two groups of two, all four heads of one layer
SPANNING = ((-1, 2, -1), (-1, -1, -1), (0, -1, 1))  # groups that also hold other layers' heads


class HeadGroupDecodeSuite(Suite):
    """Each head attends to its own number of tokens, in the pages of its group."""

    page_size = 1  # where a case does not say

    def cannot_run(self, *, dtype, head_dim, page_size) -> bool:
        """Whether the implementation refuses the case, by its name."""
        return False

    def check(
        self,
        lengths,
        *,
        members=OWN_LAYER,
        group=2,
        head_dim=64,
        dtype=None,
        page_size=None,
        splits=None,
        prefix_counts=None,
        order=None,
        work=None,
    ):
        """``lengths``: of each row, group and member. ``work``: programs and parts of a work list."""
        dtype = self.dtype if dtype is None else dtype
        page_size = self.page_size if page_size is None else page_size
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

        listed = None
        if work is not None:
            sizes = dict(zip(("n_entries", "width"), work, strict=True))
            n_heads = n_kv_heads * group
            listed = layer_work(members, splits, n_rows=n_rows, n_heads=n_heads, **sizes)

        if self.cannot_run(dtype=dtype, head_dim=head_dim, page_size=page_size):
            with pytest.raises(ImplementationError, match=f"cannot run as {self.implementation}"):
                head_group_decode(
                    *(q, k, v, jnp.asarray(table % n_slots, jnp.int32), jnp.asarray(lengths)),
                    members=members,
                    page_size=page_size,
                    scale=1.0,
                    implementation=self.implementation,
                )
            pytest.skip("refused by name, as it should be")

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
                    splits=splits if listed is None else None,
                    work=listed,
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

    @essential
    def test_programs_of_a_work_list_that_no_part_needs_do_nothing(self):
        lengths = [[[70, 64], [150, 149]], [[17, 16], [2, 0]]]
        self.check(lengths, splits=(1, 2, 4, 3), work=(13, 6))

    def test_more_parts_than_tokens(self):
        self.check([[[3, 1], [2, 0]]], splits=(4, 4, 4, 4))

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


# A case takes the interpreter 5 to 10 seconds.
INTERPRETED = (
    "test_programs_of_a_work_list_that_no_part_needs_do_nothing",
    "test_prefix_partials_are_merged_in_whatever_the_order_of_rows[splits1]",
)


@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
class TestMosaic(HeadGroupDecodeSuite):
    """``head_group_decode`` in Pallas Mosaic GPU, with race detection."""

    implementation = "mosaic"
    dtype = "bfloat16"
    page_size = 16
    slow_interpreter = True

    @pytest.fixture(autouse=True)
    def _few(self, request):
        if jax.default_backend() != "gpu" and request.node.name not in INTERPRETED:
            pytest.skip("the interpreter is slow; this case runs on a GPU")

    def cannot_run(self, *, dtype, head_dim, page_size) -> bool:
        return dtype == "float32" or head_dim > 128 or page_size % 8 != 0


@pytest.mark.parametrize("kernel", [triton, mosaic])
@pytest.mark.parametrize(("n_kv_heads", "group", "head_dim"), [(8, 4, 128), (4, 7, 128)])
def test_layers_with_work_lists_of_one_size_share_a_program(kernel, n_kv_heads, group, head_dim):
    members = np.stack([np.arange(n_kv_heads), np.full(n_kv_heads, -1)], axis=1)
    first, second = (
        layer_work(
            members,
            tuple(1 + (layer * head) % 3 for head in range(n_kv_heads)),
            n_rows=4,
            n_heads=n_kv_heads * group,
            n_entries=4 * n_kv_heads,
            width=8,
        )
        for layer in (1, 2)
    )

    def layers(works):
        def call(q, k, v, pages, lengths):
            args, options = (q, k, v, pages, lengths), {"page_size": 16, "scale": 0.1}
            return [trace_once(kernel.decode_work, *args, work, **options) for work in works]

        pool = jax.ShapeDtypeStruct((512, 2, head_dim), jnp.bfloat16)
        q = jax.ShapeDtypeStruct((4, n_kv_heads * group, head_dim), jnp.bfloat16)
        pages = jax.ShapeDtypeStruct((4, n_kv_heads, 30), jnp.int32)
        lengths = jax.ShapeDtypeStruct((4, n_kv_heads, 2), jnp.int32)
        text = lower(call, q, pool, pool, pages, lengths)
        return [text.count(name) for name in ("@__gpu$xla.gpu.triton", "@mosaic_gpu_v2")]

    assert layers([first, second]) == layers([first])
    assert sum(layers([first])) == 2  # the decode and the merge


@pytest.mark.parametrize("sizes", [{"n_entries": 9}, {"width": 3}])
def test_a_work_list_too_small_for_the_splits_is_refused(sizes):
    with pytest.raises(ValueError, match="do not fit a work list"):
        layer_work(np.arange(4)[None], (1, 2, 4, 3), n_rows=1, n_heads=4, **sizes)


def test_a_work_list_of_another_batch_is_refused():
    q, pool = jnp.zeros((2, 4, 16)), jnp.zeros((8, 4, 16))
    tables = jnp.zeros((2, 1, 2), jnp.int32), jnp.zeros((2, 1, 4), jnp.int32)
    members = np.arange(4)[None]
    work = layer_work(members, None, n_rows=3, n_heads=4)
    with pytest.raises(ValueError, match="work list is of"):
        head_group_decode(
            q, pool, pool, *tables, members=members, page_size=1, scale=1.0, work=work
        )


def test_heads_that_do_not_share_the_query_heads_evenly_are_refused():
    q, pool = jnp.zeros((1, 4, 16)), jnp.zeros((8, 3, 16))
    tables = jnp.zeros((1, 1, 2), jnp.int32), jnp.zeros((1, 1, 3), jnp.int32)
    with pytest.raises(ValueError, match="4 query heads cannot share 3 KV heads"):
        head_group_decode(
            q, pool, pool, *tables, members=np.arange(3)[None], page_size=1, scale=1.0
        )
