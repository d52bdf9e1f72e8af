"""The ``tables`` binary: every table of the paper, small, and what holds for all of them."""

import importlib
import io
import json
import os
import subprocess
import sys

import jax
import pytest
import rich.console
from matplotlib.image import imread

from experiments import paper_numbers, table_spec, table_summary, tables
from experiments.table_kernels import CASES
from experiments.table_pictures import PICTURES
from experiments.table_rows import DERIVED, METRICS
from experiments.table_store import Store
from kvgrain_jax.errors import ConfigError
from models.config import named_config
from models.weights import expected_tensors

NAMES = table_summary.table_names()
# Run in processes of their own: the arguments of kernels are compiled as descriptions of arrays, which
# the run-time checks of annotations refuse, and reading a profile can end the process that reads it.
APART = ("layout_microbench", "roofline", "amdahl")


def get_config(name, variant="smoke"):
    return importlib.import_module(f"configs.granikv.{name}").get_config(variant).to_dict()


def run(config, **options):
    """Exit code, ``result.json`` and what was printed."""
    output = io.StringIO()
    console = rich.console.Console(file=output, width=200, highlight=False)
    code = tables.run_table(config, console, **options)
    with open(f"{config['out']}/result.json", encoding="utf-8") as file:
        return code, json.load(file), output.getvalue()


@pytest.fixture(scope="module", autouse=True)
def _compile_quickly():
    """The programs run for milliseconds here; optimising them takes most of a minute."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Results of the smoke variants that a CPU can run, by name; each is run once, when asked for."""
    folder, kept = tmp_path_factory.mktemp("tables"), {}

    def result(name):
        if name not in kept:
            out = folder / name
            done = (
                run_command(name, out)
                if name in APART
                else run(get_config(name) | {"out": str(out)})
            )
            kept[name] = (*done, out)
        return kept[name]

    return result


def run_command(name, out):
    """As ``run``, from the command line."""
    config = f"--config=configs/granikv/{name}.py:smoke"
    command = [
        sys.executable,
        "-m",
        "experiments.tables",
        config,
        f"--out={out}",
        "--compilation_cache=none",
    ]
    quickly = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = subprocess.run(
        command, cwd=table_summary.ROOT, env=quickly, capture_output=True, text=True
    )
    return done.returncode, json.loads((out / "result.json").read_text()), done.stdout


def rows_of(result, **wanted):
    return [
        row
        for row in result["rows"]
        if all({**row["cell"], "variant": row["variant"]}[k] == v for k, v in wanted.items())
    ]


def value(result, metric, **wanted):
    (row,) = rows_of(result, **wanted)
    return row["metrics"][metric]["mean"]


# -- every config ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_config_is_valid_at_every_size(name):
    for variant in ("full", "headline", "smoke"):
        config = get_config(name, variant)
        if config["name"] == "trace_replay" and variant != "smoke":
            config["workload"]["traces"]["mooncake"]["path"] = "given on the command line"
        assert table_spec.units(config)
        assert config["name"] == name
        assert config["picture"] in PICTURES
        assert set(config["metrics"]) <= set(METRICS)
        assert set(config["derive"]) <= set(DERIVED)
        for cell in table_spec.cells(config):
            assert cell["how"] != "kernels" or cell["case"] in CASES


@pytest.mark.parametrize("name", NAMES)
def test_a_docstring_gives_the_commands_and_the_time_they_take(name):
    text = importlib.import_module(f"configs.granikv.{name}").__doc__ or ""
    assert f"--config=configs/granikv/{name}.py" in text
    assert f"{name}.py:smoke" in text
    assert "minutes on one H200" in " ".join(text.split())


@pytest.mark.parametrize("name", NAMES)
def test_a_headline_cell_is_measured_as_in_the_full_table(name):
    if name == "trace_replay":
        return  # its headline replays fewer requests
    full = {unit.fingerprint for unit in table_spec.units(get_config(name, "full"))}
    headline = {unit.fingerprint for unit in table_spec.units(get_config(name, "headline"))}
    assert headline <= full


@pytest.mark.parametrize("name", NAMES)
def test_a_table_asks_for_the_memory_of_its_weights_and_pools(name):
    config = get_config(name, "full")
    if name == "trace_replay":
        config["workload"]["traces"]["mooncake"]["path"] = "given on the command line"
    for unit in table_spec.units(config):
        if unit.engine is None:
            continue
        shape = named_config(unit.model.removeprefix("random:"))
        weights = 2 * sum(_product(sizes) for sizes in expected_tensors(shape).values())
        token = 2 * 2 * shape.layers * shape.kv_heads * shape.head_dim
        assert unit.engine.pool_tokens is not None
        engines = 2 if unit.cell["how"] == "paired" else 1
        pools = engines * token * unit.engine.pool_tokens
        assert weights + pools + 4 * 2**30 <= config["memory_gib"] * 2**30 < 139 * 2**30


def _product(sizes):
    product = 1
    for size in sizes:
        product *= size
    return product


def test_an_unknown_variant_is_an_error():
    with pytest.raises(
        ConfigError, match="no variant 'quick'; choose one of full, headline, smoke"
    ):
        get_config("page_size", "quick")


# -- every smoke variant -------------------------------------------------------------------------


QUICK = ("hot_fraction",)  # which another test here needs too


def slow_but(quick, names):
    return [n if n in quick else pytest.param(n, marks=pytest.mark.slow) for n in names]


@pytest.mark.parametrize("name", slow_but(QUICK, NAMES))
def test_a_smoke_variant_measures_all_of_its_cells(results, name):
    code, result, text, folder = results(name)
    assert code == 0
    assert result["pending"] == 0
    assert not result["failures"]
    run_rows = [row for row in result["rows"] if not row["not_run"]]
    assert run_rows
    shown = set(get_config(name)["metrics"])
    for row in run_rows:
        assert row["repetitions"] >= 1
        assert shown & set(row["metrics"])
    assert "smoke variant" in text
    assert "| variant |" in (folder / "table.md").read_text()
    height, width, _ = imread(folder / "table.png").shape
    assert min(height, width) > 500


SERVED = [
    *("sharegpt_llama8b", "grid_llama8b", "multi_prefix", "hetero_prefix", "page_size"),
    *("hot_fraction", "trace_replay", "nested_prefix", "admission"),
]


@pytest.mark.parametrize("name", slow_but(QUICK, SERVED))
def test_all_variants_give_the_same_tokens(results, name):
    _, result, text, _ = results(name)
    assert result["agreement"]
    for entry in result["agreement"]:
        assert entry["same"] == entry["compared"] > 0
    assert "Same tokens from all variants" in text


# -- what a table shows --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_speedup_is_the_ratio_of_throughputs(results):
    _, result, _, _ = results("grid_llama8b")
    ours, base = (
        value(result, "tok_s", prefix_tokens=64, variant=v) for v in ("kvgrain", "uniform16")
    )
    found = value(result, "speedup", prefix_tokens=64, variant="kvgrain")
    assert found == pytest.approx(ours / base)


@pytest.mark.slow
def test_steady_steps_give_rows_over_time_and_no_time_to_first_token(results):
    _, result, _, _ = results("concurrency")
    (row,) = rows_of(result, batch=4)
    step = row["metrics"]["step_ms"]["mean"]
    assert row["metrics"]["tok_s"]["mean"] == pytest.approx(4000 / step)
    assert "ttft_p50_s" not in row["metrics"]


@pytest.mark.slow
def test_the_cost_of_the_dispatch_is_taken_against_the_backend_that_it_takes(results):
    _, result, _, folder = results("dispatch_overhead")
    assert value(result, "dense_percent", batch=4) == 100
    (cell,) = (folder / "cells").glob("*.json")
    series = json.loads(cell.read_text())["series"]
    differences = [a - b for a, b in zip(series["auto_ms"], series["forced_ms"], strict=True)]
    assert len(differences) == 2
    found = value(result, "overhead_us", batch=4)
    assert found == pytest.approx(1000 * sum(differences) / 2)
    assert value(result, "overhead_low_us", batch=4) == pytest.approx(1000 * min(differences))


@pytest.mark.slow
def test_the_dispatcher_follows_the_number_of_rows(results):
    _, result, _, _ = results("dispatch_trace")
    # Three query heads a KV head and a threshold of 12: dense is taken once all four rows decode, and
    # their prompts are computed one after the other.
    assert 0 < value(result, "dense_percent", batch=4) < 100


def test_a_prefix_larger_than_hot_stays_in_cold(results):
    _, result, _, _ = results("hot_fraction")
    assert value(result, "hot_peak", variant="f_p 0.05") == 0
    assert value(result, "cold_prefix_peak", variant="f_p 0.05") == 64
    assert value(result, "hot_peak", variant="f_p 0.8") == 64
    assert value(result, "cold_prefix_peak", variant="f_p 0.8") == 0


def test_hot_lends_what_it_does_not_need(results):
    _, result, _, _ = results("hot_fraction")
    # Four rows of 60 prompt tokens of their own and 6 new ones, the last of which is never fed; of
    # 1,024 slots COLD has 205.
    assert value(result, "lent_peak", variant="f_p 0.8") == 4 * (60 + 5) - 205
    assert value(result, "lent_peak", variant="f_p 0.05") == 0


@pytest.mark.slow
def test_prefixes_beyond_hot_fall_back_to_cold_and_none_leaves_hot(results):
    _, result, _, _ = results("admission")
    assert value(result, "hot_peak", variant="always") == 4 * 64
    assert value(result, "hot_peak", variant="half fits") == 2 * 64
    assert value(result, "cold_prefix_peak", variant="half fits") == 2 * 64
    assert value(result, "hot_released", variant="half fits") == 0
    # Each of the four prefixes is used once.
    assert value(result, "hot_admitted", variant="after 2 uses") == 0


@pytest.mark.slow
def test_a_replay_counts_the_prompt_tokens_found_in_the_cache(results):
    _, result, _, _ = results("trace_replay")
    for row in result["rows"]:
        assert 0 < row["metrics"]["hit_percent"]["mean"] < 100
    assert result["facts"]["mooncake"]["replayed_requests"] == 8


@pytest.mark.slow
def test_nested_texts_are_shared_level_by_level_and_flat_ones_are_not(results):
    _, result, _, _ = results("nested_prefix")
    assert value(result, "hit_percent", sharing="flat", variant="kvgrain") == 0
    # Besides the first request, all find the system prompt; the third and fourth their persona too.
    assert value(result, "tokens_saved", sharing="nested", variant="kvgrain") >= 3 * 64
    # Texts that are stored: 64 + 2 * 16 + 4 * 16 tokens, against four prompts of 96.
    for sharing, tokens in (("nested", 160), ("flat", 384)):
        where = {"sharing": sharing, "variant": "uniform16"}
        assert value(result, "cold_prefix_peak", **where) == tokens


@pytest.mark.slow
def test_the_layouts_differ_in_bytes_by_the_number_of_rows(results):
    _, result, _, _ = results("layout_microbench")
    shared, unique = (value(result, "gigabytes", storage=s) for s in ("shared", "unique"))
    assert unique == pytest.approx(4 * shared)


@pytest.mark.slow
def test_a_profile_keeps_its_longest_waits_and_between_which_operations_they_were(results):
    _, result, _, folder = results("amdahl")
    for cell in (folder / "cells").glob("*.json"):
        kept = json.loads(cell.read_text())
        longest = [milliseconds for _, _, milliseconds in kept["series"]["waits"]]
        assert longest == sorted(longest, reverse=True)
        assert len(longest) <= 12
        # A CPU that computes on all its threads need not have waited.
        assert kept["metrics"]["longest_wait_ms"] == max(longest, default=0)
        assert all(before and after for before, after, _ in kept["series"]["waits"])
    idle, launch = (value(result, f"{x}_ms", variant="kvgrain") for x in ("idle", "launch"))
    assert 0 <= launch <= idle


@pytest.mark.slow
def test_a_cell_that_needs_more_devices_is_listed_as_not_run(results):
    _, result, _, folder = results("tp_envelope")
    assert [row["cell"]["tp"] for row in result["rows"] if row["not_run"]] == [64] * 3
    assert "tp 64: not run, it needs 64 devices and JAX sees" in (folder / "table.md").read_text()


def test_the_papers_numbers_stand_beside_ours():
    rows = paper_numbers.read("table09")
    assert len(rows) == 6 * 6 * 3
    found = paper_numbers.values(
        ("table09",), ("prefix_tokens", "batch"), {"prefix_tokens": 16384, "batch": 256}, "kvgrain"
    )
    assert found == {"tok_s": 2943, "tpot_p50_ms": 59, "ttft_p50_s": 10.5}


# -- errors and interruption -----------------------------------------------------------------------


def test_a_full_table_needs_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "load_model", None)  # nothing is loaded before the check
    config = get_config("grid_llama8b", "full") | {"out": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"needs a GPU with 60 GiB.*grid_llama8b\.py:smoke"):
        tables.run_table(config)


def test_a_replay_without_a_trace_says_how_to_give_one(tmp_path):
    config = get_config("trace_replay", "full") | {"out": str(tmp_path)}
    with pytest.raises(ConfigError, match=r"--config\.workload\.traces\.mooncake\.path=FILE"):
        tables.run_table(config)


def test_a_missing_trace_is_an_error_before_anything_is_loaded(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "load_model", None)
    config = get_config("trace_replay") | {"out": str(tmp_path)}
    config["workload"]["traces"]["mooncake"]["path"] = str(tmp_path / "none.jsonl")
    with pytest.raises(ConfigError, match=r"There is no trace file .*none\.jsonl"):
        tables.run_table(config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speed": 1}, "check speed"),
        ({"paper": ("table99",)}, "no numbers of 'table99'"),
        ({"reference": "other"}, "config.reference is 'other'"),
        ({"cells": ({"how": "guess"},)}, "how='guess'"),
        ({"cells": ({"how": "burst", "batch": 4},)}, "A cell lacks prefix_tokens"),
        ({"axes": ("batch",)}, "do not tell these apart"),
    ],
)
def test_a_wrong_config_is_an_error(change, message):
    with pytest.raises(ConfigError, match=message):
        table_spec.units(get_config("grid_llama8b") | change)


@pytest.fixture
def short(tmp_path):
    """A table of one system with two cells."""
    config = get_config("multi_prefix") | {"out": str(tmp_path), "reference": ""}
    return config | {"variants": config["variants"][-1:]}


def test_an_interrupted_run_renders_what_is_there_and_goes_on_from_it(short, monkeypatch):
    measured = []

    def measure(unit, load, progress):
        measured.append(unit.name)
        return None if len(measured) == 2 else tables.table_serving.measure(unit, load, progress)

    monkeypatch.setitem(tables.METHODS, "poisson", measure)
    code, result, text = run(short)
    assert code == 130
    assert result["pending"] == 1
    assert "1 measurements are not finished" in text
    code, result, _ = run(short)
    assert (code, result["pending"]) == (0, 0)
    assert measured == [measured[0], measured[1], measured[1]]
    code, _, _ = run(short)
    assert code == 0
    assert len(measured) == 3


def test_a_cell_that_was_made_with_other_settings_does_not_count(short, tmp_path):
    store = Store(tmp_path)
    before = table_spec.units(short)[0]
    store.write(before, {"metrics": {"tok_s": 1.0}})
    assert store.read(before)
    short["workload"]["output_tokens"] += 1
    after = table_spec.units(short)[0]
    assert after.name == before.name
    assert store.read(after) is None


def test_a_cell_that_cannot_be_served_does_not_end_the_run(short):
    first, second = short["cells"]
    short["cells"] = ({**first, "prefix_tokens": 4000}, second)
    code, result, text = run(short)
    assert code == 1
    assert [row["repetitions"] for row in result["rows"]] == [0, 1]
    assert "the context is" in text
    assert len(result["failures"]) == 1


def test_rendering_measures_nothing(short):
    code, result, _ = run(short, render_only=True)
    assert code == 0
    assert result["pending"] == 2


@pytest.mark.slow
def test_an_unknown_variant_on_the_command_line_is_a_sentence():
    config = "--config=configs/granikv/page_size.py:quick"
    command = [sys.executable, "-m", "experiments.tables", config]
    done = subprocess.run(command, cwd=table_summary.ROOT, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.startswith("error: page_size has no variant 'quick'")
