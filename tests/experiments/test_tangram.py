"""The serving experiments of Tangram, each by its smoke variant, and what their figures must obey."""

import importlib
import io
import json

import pytest
import rich.console

from experiments.tangram import MEASURES, tangram
from experiments.tangram_spec import units
from kvgrain_jax import ConfigError

NAMES = ("throughput", "group_size", "ttft", "prefill_latency", "both_axes")


def get_config(name: str, variant: str = "smoke") -> dict:
    return importlib.import_module(f"configs.tangram.{name}").get_config(variant).to_dict()


def run(config: dict, **options):
    """Exit code, what ``result.json`` says, and the output."""
    console = rich.console.Console(file=io.StringIO(), width=200)
    code = tangram(config, console, **options)
    with open(f"{config['out']}/result.json", encoding="utf-8") as file:
        result = json.load(file)
    assert isinstance(console.file, io.StringIO)
    return code, result, console.file.getvalue()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Rows of the smoke variants, measured when first asked for."""
    found = {}

    def of(name: str) -> list[dict]:
        if name not in found:
            config = get_config(name) | {"out": str(tmp_path_factory.mktemp(name))}
            code, result, output = run(config)
            assert code == 0, output
            found[name] = result["rows"]
        return found[name]

    return of


def by_system(rows: list[dict]) -> dict[str, dict]:
    return {row["system"]: row for row in rows}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("variant", ["qwen3-4b", "qwen2.5-7b", "smoke"])
def test_a_config_is_valid_and_says_how_it_is_run(name, variant):
    module = importlib.import_module(f"configs.tangram.{name}")
    assert f"--config=configs/tangram/{name}.py" in (module.__doc__ or "")
    assert units(get_config(name, variant), tuple(MEASURES))


@pytest.mark.slow
def test_more_requests_run_at_once_when_head_groups_get_pages_of_their_own(results):
    rows = by_system(results("throughput"))
    assert rows["full"]["rows_peak"] == 2  # the pool holds two whole caches
    assert rows["full"]["rows_peak"] < rows["groups"]["rows_peak"]
    assert rows["groups"]["rows_peak"] == rows["balanced"]["rows_peak"]
    assert rows["full"]["ratio"] == 1


@pytest.mark.slow
def test_unified_pages_hold_fewer_requests_than_those_of_head_groups(tmp_path):
    config = get_config("throughput") | {"out": str(tmp_path)}
    config["cells"] = tuple({"system": s, "evicted": 75} for s in ("budgets", "groups"))
    rows = by_system(run(config)[1]["rows"])
    assert rows["budgets"]["rows_peak"] < rows["groups"]["rows_peak"]
    assert rows["budgets"]["footprint_mib"] > rows["groups"]["footprint_mib"]


@pytest.mark.slow
def test_pages_of_single_heads_are_used_best(results):
    used = {row["group_size"]: row["used_percent"] for row in results("group_size")}
    assert list(used) == [1, 2]
    assert used[2] <= used[1] <= 100


def test_static_budgets_reclaim_nothing_and_dynamic_ones_do(results):
    rows = results("prefill_latency")
    static = [row for row in rows if row["system"] != "dynamic"]
    (dynamic,) = (row for row in rows if row["system"] == "dynamic")
    assert [row["pages_reclaimed"] for row in static] == [0] * len(static)
    assert [row["reclaim_ms"] for row in static] == [0.0] * len(static)
    assert dynamic["pages_reclaimed"] > 0
    for row in rows:
        parts = ("allocation_ms", "model_ms", "eviction_ms", "reclaim_ms")
        assert sum(row[part] for part in parts) == pytest.approx(row["total_ms"])


def test_every_system_gets_every_rate(results):
    rows = results("ttft")
    assert {row["system"] for row in rows} == {"full", "balanced"}
    assert all(0 < row["ttft_mean_s"] <= row["ttft_p99_s"] for row in rows)


@pytest.mark.slow
def test_both_axes_together_hold_least(results):
    rows = by_system(results("both_axes"))
    assert rows["shared"]["kv_mib"] < rows["granikv"]["kv_mib"]
    assert rows["shared"]["kv_mib"] < rows["balanced"]["kv_mib"]
    assert rows["granikv"]["same_percent"] == 100


def test_finished_cells_are_not_measured_again(tmp_path):
    config = get_config("group_size") | {"out": str(tmp_path)}
    config["cells"] = ({"group_size": 2},)
    _, first, _ = run(config)
    code, again, output = run(config)
    assert code == 0
    assert again["rows"] == first["rows"]
    assert "Demands of the heads" not in output  # nothing was loaded


def test_a_cell_that_cannot_run_is_told_and_the_others_go_on(tmp_path):
    config = get_config("group_size") | {"out": str(tmp_path)}
    config["cells"] = tuple({"group_size": size} for size in (3, 2))
    code, result, output = run(config)
    assert code == 1
    assert [row["group_size"] for row in result["rows"]] == [2]
    assert "does not divide" in output


def test_a_profile_that_is_missing_is_told_with_what_to_do(tmp_path):
    config = get_config("ttft") | {"out": str(tmp_path)}
    config["profile"] = {"path": "", "sinks": 2, "window": 6}
    with pytest.raises(ConfigError, match=r"--config\.profile\.path=FILE"):
        run(config)


def test_full_size_asks_for_a_gpu_before_anything_is_loaded(tmp_path):
    config = get_config("ttft", "qwen3-4b") | {"out": str(tmp_path)}
    with pytest.raises(ConfigError, match="needs a GPU"):
        run(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"measure": "speed"}, "config.measure"),
        ({"cells": ({"system": "vllm"},)}, "no system 'vllm'"),
        ({"axes": ("system",)}, "do not tell these apart"),
        ({"extra": 1}, "check extra"),
    ],
)
def test_wrong_config_is_refused(change, message, tmp_path):
    config = get_config("ttft", "qwen3-4b") | {"out": str(tmp_path)} | change
    if "cells" in change:
        config["cells"] = tuple({"evicted": 0, "rate": 1.0, **c} for c in config["cells"])
    with pytest.raises(ConfigError, match=message):
        run(config)
