"""Per-step dispatch."""

import numpy as np
import pytest

from kvgrain_jax import ConfigError, Segment, make_rule
from kvgrain_jax.attention import (
    CostTable,
    Occupancy,
    Surface,
    fixed_choices,
    load_costs,
    make_choices,
    write_costs,
)
from kvgrain_jax.attention.dispatch import PASS_US, device_m_sat


def occupancy(rows, group, *lengths, own=16):
    """Rows that all share segments one behind the other."""
    return Occupancy(rows, group, [Segment(0, n, 0, rows) for n in lengths], own)


def backend_of(rule, seen, rows):
    return rule.backends[rule.choose(seen, np.array([rows]))[0]]


def choice(rule, rows, group, *lengths):
    return backend_of(rule, occupancy(rows, group, *lengths), rows)


def test_dense_from_the_threshold_on_and_cascade_below():
    rule = make_rule("auto", m_sat=1024)
    assert choice(rule, 256, 4, 100) == "dense"
    assert choice(rule, 255, 4, 100) == "cascade"
    assert choice(rule, 128, 8, 10, 20, 30) == "dense"


def test_paged_where_no_row_has_a_contiguous_prefix():
    assert choice(make_rule("auto", m_sat=1), 256, 4) == "paged"


@pytest.mark.parametrize("backend", ["dense", "cascade", "paged", "cascade16"])
def test_single_backend_is_taken_always(backend):
    assert choice(make_rule(backend), 1, 1) == backend


def test_reason_names_what_was_compared():
    rule = make_rule("auto", m_sat=1024)
    assert rule.reason(occupancy(255, 4, 9), 255) == "M_eff 1020 < 1024"
    assert rule.reason(occupancy(255, 4), 255) == "no contiguous prefix"
    assert make_rule("paged").reason(occupancy(1, 1), 1) == "the only backend"


def test_choices_hold_one_entry_for_each_number_of_rows():
    choices = make_choices(make_rule("auto", m_sat=24), occupancy(8, 4, 50), n_rows=8)
    assert [choices.backends[i] for i in choices.table[1:]] == ["cascade"] * 5 + ["dense"] * 3


def test_every_batch_of_a_bucket_has_the_same_program():
    rule = make_rule("auto", m_sat=24)
    batches = occupancy(8, 4, 50), occupancy(8, 4), occupancy(2, 4, 50)
    assert {make_choices(rule, batch, n_rows=8).backends for batch in batches} == {rule.backends}


def test_a_fixed_backend_takes_the_program_of_the_rule_that_has_it():
    rule = make_rule("auto", m_sat=24)
    assert fixed_choices(rule, "cascade", n_rows=2).backends == rule.backends
    assert fixed_choices(rule, "cascade", n_rows=2).table.tolist() == [1, 1, 1]
    other = fixed_choices(rule, "cascade16", n_rows=2)
    assert (other.backends, other.table.tolist()) == (("cascade16",), [0, 0, 0])


def test_a100_has_the_threshold_of_the_paper():
    assert device_m_sat("NVIDIA A100-SXM4-40GB") == 1024


def test_unknown_backend_and_bad_threshold_are_refused():
    with pytest.raises(ConfigError, match="no backend 'fast'"):
        make_rule("fast")
    with pytest.raises(ConfigError, match="m_sat is 0"):
        make_rule("auto", m_sat=0)


def flat(microseconds):
    return Surface((1,), (1,), ((microseconds,),))


# Prefix passes that cost a start and the tokens, and reads of one row's tokens that add up.
COSTS = CostTable(
    dense=Surface((1, 64, 256), (64, 1024), ((8.0, 40.0), (8.0, 40.0), (8.0, 40.0))),
    cascade=Surface((1, 64, 256), (64, 1024), ((6.0, 20.0), (6.0, 40.0), (24.0, 160.0))),
    own=Surface((1, 256), (16, 4096), ((1.0, 10.0), (5.0, 1280.0))),
)


@pytest.mark.parametrize(
    ("rows", "prefix", "want"),
    [(256, 1024, "dense"), (8, 1024, "paged"), (64, 1024, "dense"), (32, 1024, "cascade")],
)
def test_calibrated_rule_takes_the_smallest_predicted_time(rows, prefix, want):
    rule = make_rule("auto", costs=COSTS)
    seen = occupancy(rows, 4, prefix)
    times = {
        "dense": COSTS.dense(rows, prefix) + PASS_US + COSTS.own(rows, 16),
        "cascade": COSTS.cascade(rows, prefix) + PASS_US + COSTS.own(rows, 16),
        "paged": COSTS.own(rows, 16 + prefix),
    }
    assert min(times, key=lambda name: times[name]) == want
    assert backend_of(rule, seen, rows) == want
    assert f"{want} {times[want]:.0f} us" in rule.reason(seen, rows)


@pytest.mark.parametrize("rule", [make_rule("auto", costs=COSTS), make_rule("auto", m_sat=24)])
def test_choices_of_all_rows_at_once_are_those_of_each(rule):
    seen = occupancy(300, 4, 512)
    each = [backend_of(rule, seen, rows) for rows in range(301)]
    choices = make_choices(rule, seen, n_rows=300)
    assert [choices.backends[i] for i in choices.table] == each
    assert len(set(each)) > 1


@pytest.mark.parametrize(("more", "want"), [(PASS_US - 1, "paged"), (PASS_US + 1, "dense")])
def test_a_prefix_pass_must_save_more_than_its_launch_and_merge(more, want):
    flat_pass = Surface((1, 8), (1, 512), ((10.0, 10.0), (10.0, 10.0)))
    own = Surface((1, 8), (16, 528), ((5.0, 15.0 + more), (5.0, 15.0 + more)))
    rule = make_rule("auto", costs=CostTable(flat_pass, flat_pass, own))
    assert backend_of(rule, occupancy(8, 4, 512), 8) == want


def test_classes_count_by_the_rows_that_share_them():
    # Four classes of 8 rows make the tiles of 8 rows and four times the tokens.
    classes = Occupancy(32, 4, [Segment(i * 256, 256, 8 * i, 8) for i in range(4)], 16)
    assert classes.shared_tokens == 1024
    assert classes.sharers == 8
    assert classes.covered_tokens == 256


def test_threshold_asks_for_the_meff_rule():
    assert make_rule("auto", m_sat=7, costs=COSTS).costs is None


def test_surface_is_linear_in_the_logarithms_and_in_proportion_beyond():
    surface = Surface((2, 8), (16, 64), ((10.0, 20.0), (40.0, 80.0)))
    assert surface(2, 16) == pytest.approx(10)
    assert surface(4, 32) == pytest.approx(10 * 2 * 2**0.5)
    assert surface(1, 1) == pytest.approx(10)
    assert surface(16, 256) == pytest.approx(80 * 2 * 4)


def test_tables_round_trip_and_the_nearest_head_shape_serves(tmp_path):
    def entry(n_kv_heads, microseconds):
        grid = {"rows": [1], "tokens": [1], "microseconds": [[microseconds]]}
        shape = {"n_kv_heads": n_kv_heads, "group": 4, "head_dim": 128}
        return shape | dict.fromkeys(("dense", "cascade", "own"), grid)

    write_costs("some-gpu", [entry(8, 5.0)], tmp_path)
    write_costs("some-gpu", [entry(2, 3.0)], tmp_path)

    def found(n_kv_heads, head_dim=128):
        return load_costs(
            "some-gpu", n_kv_heads=n_kv_heads, group=4, head_dim=head_dim, folder=tmp_path
        )

    assert found(8) == CostTable(flat(5.0), flat(5.0), flat(5.0))
    assert found(1) == CostTable(flat(3.0), flat(3.0), flat(3.0))
    assert found(8, head_dim=64) is None
    assert load_costs("other", n_kv_heads=8, group=4, head_dim=128, folder=tmp_path) is None


def test_negative_or_huge_values_stay_finite():
    assert np.isfinite(COSTS.own(0, 0))
    assert np.isfinite(COSTS.dense(10_000, 10_000_000))
