"""Decode attention over heads of different lengths: what is compared is the same work, cut rightly."""

import importlib
import json

import numpy as np
import pytest

from experiments import tangram_attention, tangram_attention_pages
from experiments.kernel_cases import multiprocessors
from experiments.tangram_attention_bench import make_bench, parse_method, shape_of_work
from experiments.tangram_attention_caches import (
    Cell,
    head_layout,
    plan_on_host,
    read_demands,
    uniform_layout,
)
from kvgrain_jax import ConfigError
from kvgrain_jax.budgets import HeadProfile, partition, save_profile
from models import named_config

CELL = Cell(context=1000, batch=3, retention=0.25)


def smoke(name, tmp_path, **fields):
    config = importlib.import_module(f"configs.tangram.{name}").get_config("smoke").to_dict()
    return config | fields | {"out": str(tmp_path)}


def test_every_method_that_can_run_is_timed_on_as_many_tokens(tmp_path):
    methods = ("uniform", "static", "planned", "aot", "aot:mosaic")
    fields = {"cells": ((96, 2, 0.5),), "methods": methods}
    *rows, refused = tangram_attention.attention(smoke("attention_balance", tmp_path, **fields))
    assert [row["method"] for row in rows] == ["uniform", "static", "planned", "aot"]
    assert "cannot run as mosaic" in refused["error"]
    model = named_config("tiny")
    kept = 2 * model.layers * model.kv_heads * 48
    assert {row["gb"] for row in rows} == {kept * 2 * 4 * model.head_dim / 1e9}
    assert all(row["difference"] == 0 for row in rows)
    assert rows[2]["total_ms"] == pytest.approx(
        rows[2]["attention_ms"] + rows[2]["plan_ms"] + rows[2]["upload_ms"]
    )
    assert rows[3]["over_uniform"] == pytest.approx(rows[3]["total_ms"] / rows[0]["total_ms"])
    assert json.loads((tmp_path / "result.json").read_text())["rows"][0]["method"] == "uniform"
    assert (tmp_path / "attention.png").stat().st_size > 0


def test_the_share_of_planning_is_of_the_whole_step(tmp_path):
    rows = tangram_attention.attention(smoke("planning_overhead", tmp_path))
    planned = next(row for row in rows if row["method"] == "planned")
    step = planned["total_ms"] + planned["rest_ms"]
    assert planned["plan_share"] == pytest.approx(planned["plan_ms"] / step)
    assert next(row for row in rows if row["method"] == "aot")["plan_share"] == 0


def test_wasted_pages_grow_with_the_group_and_one_page_for_all_heads_wastes_most(tmp_path):
    rows = tangram_attention_pages.fragmentation(smoke("page_fragmentation", tmp_path))
    waste = [row["fragmentation"] for row in rows if row["scope"] == "global"]
    assert waste == sorted(waste)
    assert max(row["fragmentation"] for row in rows) == rows[-1]["fragmentation"]
    assert rows[-1]["scope"] == "unified"
    assert all(row["together_ms"] > 0 and row["each_ms"] > 0 for row in rows)
    assert (tmp_path / "fragmentation.png").stat().st_size > 0


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cells": ((96, 2),)}, "context, batch, retention"),
        ({"cells": ((96, 2, 1.5),)}, "is no cell"),
        ({"methods": ("uniform", "best")}, "is no method"),
        ({"runs": 4}, "odd number"),
        ({"runs": 0}, "at least 1"),
        ({"group_size": 5}, "does not divide"),
        ({"profile": "no such file"}, "cannot be read"),
        ({"models": ("gpt-5",)}, "gpt-5"),
    ],
)
def test_a_wrong_config_is_refused(fields, message, tmp_path):
    with pytest.raises(ConfigError, match=message):
        tangram_attention.attention(smoke("attention_balance", tmp_path, **fields))


@pytest.fixture
def profile(tmp_path):
    """Four layers of four heads, each head its own fraction."""
    fractions = np.linspace(0.05, 0.8, 16).reshape(1, 4, 4)
    made = HeadProfile(fractions, "kvzip", "tiny", 0.25, 4, 28, np.array([900]), ("prose",))
    save_profile(made, tmp_path / "profile.npz")
    return made, tmp_path / "profile.npz"


def test_a_profile_of_another_shape_is_resampled_layer_by_layer_and_says_so(profile):
    made, path = profile
    demands = read_demands("tiny", str(path))
    model = named_config("tiny")
    assert demands.fractions.shape == (model.layers, model.kv_heads)
    assert "resampled from 4 x 4 heads" in demands.source
    for layer, fractions in enumerate(demands.fractions):
        source = made.fractions[0, int((layer + 0.5) * 4 / model.layers)]
        assert len(set(fractions) & set(source)) == model.kv_heads


def test_both_layouts_keep_as_many_tokens(profile):
    demands = read_demands("tiny", str(profile[1]))
    assert demands.budgets(CELL).sum() == demands.uniform_tokens(CELL) * demands.fractions.size
    assert demands.uniform_tokens(CELL) == 250


@pytest.mark.parametrize("kind", ["heads", "uniform"])
def test_no_two_rows_or_groups_share_a_page(kind, profile):
    demands = read_demands("tiny", str(profile[1]))
    layout = (
        uniform_layout(demands.model, 4)
        if kind == "uniform"
        else head_layout(demands, page_size=4, group_size=2, scope="global")
    )
    budgets = demands.budgets(CELL)
    table, lengths = (np.asarray(x) for x in layout.tables(budgets, CELL.batch, 250))
    used = np.concatenate(
        [
            table[row, group, : -(-int(lengths[row, group].max()) // 4)]
            for row, group in np.ndindex(table.shape[:2])
        ]
    )
    assert sorted(used) == list(range(len(used)))
    assert layout.rows(budgets, CELL.batch) == len(used) * 4 * layout.groups.group_size
    np.testing.assert_array_equal(lengths[0], layout.groups.by_group(budgets))


def test_a_host_plan_takes_the_smallest_chunk_that_fits():
    rng = np.random.default_rng(0)
    for _ in range(20):
        lengths = rng.integers(1, 400, (1, 5))
        splits = plan_on_host(lengths, n_blocks=12, page_size=4)
        pages = -(-lengths[0] // 4)
        fitting = [c for c in range(1, 101) if (-(-pages // c)).sum() <= 12]
        np.testing.assert_array_equal(splits, -(-pages // min(fitting)))


def test_parts_are_the_tokens_of_each_program():
    budgets = np.array([[8, 8], [64, 2]])
    shape = shape_of_work(budgets, np.array([[1, 1], [3, 1]], np.int32), page_size=4)
    # 64 tokens are 16 pages: parts of 6, 6 and 4 pages; the mean part is 66 / 4.
    assert shape == {"imbalance": 24 / 16.5, "layer": 1, "parts": [24, 24, 16, 2]}


def test_work_lists_of_all_methods_and_layers_have_one_size(tmp_path):
    config = smoke("attention_balance", tmp_path)
    bench = make_bench("tiny", config, [CELL])
    methods = [parse_method(name) for name in ("uniform", "static", "planned", "aot")]
    sizes = {
        tuple(x.shape for x in fields)
        for method in methods
        for fields in bench.work_lists(CELL, method, bench.splits(CELL, method))
    }
    assert len(sizes) == 1


@pytest.mark.parametrize("kind", ["uniform", "static", "planned", "aot"])
def test_all_parts_of_a_layer_run_at_once(kind, tmp_path):
    config = smoke("attention_balance", tmp_path, blocks_per_processor=8)
    bench, method = make_bench("tiny", config, [CELL]), parse_method(kind)
    splits = bench.splits(CELL, method)
    assert splits is not None
    assert CELL.batch * splits.sum(axis=1).max() <= 8 * multiprocessors()


def test_the_split_table_is_that_of_algorithm_1(tmp_path):
    bench = make_bench("tiny", smoke("attention_balance", tmp_path), [CELL])
    aot = parse_method("aot")
    n_blocks = bench.row_blocks(CELL.batch) - bench.demands.model.kv_heads
    expected = partition(bench.budgets(CELL, aot), n_blocks=max(1, n_blocks), page_size=4)
    np.testing.assert_array_equal(bench.splits(CELL, aot), expected.splits)
