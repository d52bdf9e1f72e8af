"""Decode grid, dispatch fit and device traces: what their results say, on the tiny model."""

import importlib
import json

import pytest

from experiments import decode_grid, device_trace, dispatch_fit
from experiments.decode_cells import Cell
from experiments.kernel_timing import Ceilings
from kvgrain_jax import ConfigError
from kvgrain_jax.attention import load_costs, write_costs
from models import ModelConfig, as_model, random_params


def smoke(name, tmp_path, **fields):
    config = importlib.import_module(f"configs.{name}").get_config("smoke").to_dict()
    return config | fields | {"out": str(tmp_path)}


def grid_config(folder):
    return smoke(
        "decode_grid",
        folder,
        cells=(((32, 48), 4),),
        backends=("auto", "paged"),
        profile_steps=0,  # the profiler's reader and the type checker of the tests do not mix
    )


def test_a_grid_times_every_backend_in_every_cell(tmp_path):
    rows = decode_grid.decode_grid(grid_config(tmp_path))
    assert [(row["cell"], row["backend"]) for row in rows] == [
        ("P 32+48, B 4", "auto"),
        ("P 32+48, B 4", "paged"),
    ]
    assert rows[0]["ran"] == ["dense"]
    assert rows[1]["ran"] == ["paged"]
    assert rows[0]["reason"] == "M_eff 12 >= 1"
    assert all(row["step_ms_min"] <= row["step_ms"] <= row["step_ms_max"] for row in rows)
    assert all(row["end_to_end_tok_s"] > 0 for row in rows)
    written = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [row["step_ms"] for row in written] == [row["step_ms"] for row in rows]
    assert (tmp_path / "decode_grid.png").stat().st_size > 0


def test_warmup_measures_nothing(tmp_path):
    assert decode_grid.decode_grid(grid_config(tmp_path), warmup_only=True) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("cell", [((16,), 0), ((-4,), 2), 7, ((16,),)])
def test_what_is_no_cell_is_refused_before_anything_is_loaded(cell, tmp_path):
    with pytest.raises(ConfigError, match="is no cell"):
        decode_grid.decode_grid(smoke("decode_grid", tmp_path, cells=(cell,), model="no such"))


def test_roofline_adds_weights_prefix_and_own_tokens():
    config = ModelConfig(
        layers=1,
        d_model=16,
        ffn=32,
        heads=4,
        kv_heads=2,
        head_dim=8,
        vocabulary=64,
        max_context=64,
        rope_theta=1e4,
    )
    model = as_model(config, random_params(config, "float32"))
    # One FLOP a second and endless bandwidth: milliseconds are thousands of FLOPs.
    found = decode_grid.roofline(
        model,
        Cell((10,), 3),
        Ceilings(1.0, float("inf"), float("inf")),
        own_tokens=5,
    )
    # Projections in and out, gate, up and down, three norms, head; not the embedding.
    weights = 16 * (32 + 2 * 16) + 32 * 16 + 3 * 32 * 16 + 3 * 16 + 64 * 16
    assert found["matmul_roofline_ms"] == pytest.approx(2 * weights * 3 * 1e3)
    assert found["prefix_roofline_ms"] == pytest.approx(4 * 4 * 8 * 3 * 10 * 1e3)
    assert found["own_roofline_ms"] == pytest.approx(4 * 4 * 8 * 3 * 5 * 1e3)


@pytest.mark.slow
def test_a_fit_is_a_table_that_the_dispatch_can_load(tmp_path):
    (row,) = dispatch_fit.dispatch_fit(
        smoke("dispatch_fit", tmp_path, rows=(1, 4), prefix_tokens=(16, 32), own_tokens=(4, 8))
    )
    shape = {"n_kv_heads": 2, "group": 3, "head_dim": 16}
    assert shape.items() <= row.items()
    assert list(row["m_sat"]) == [16, 32]
    write_costs("here", [{k: v for k, v in row.items() if k != "m_sat"}], tmp_path)
    costs = load_costs("here", folder=tmp_path, **shape)
    assert costs is not None
    assert costs.own(4, 8) == pytest.approx(row["own"]["microseconds"][1][1])


def test_threshold_is_where_dense_is_never_slower_from_there_on():
    def surface(lines):
        return {"rows": [1, 2, 4], "tokens": [8, 16], "microseconds": lines}

    surfaces = {
        "dense": surface([[3, 1], [3, 5], [3, 1]]),
        "cascade": surface([[1, 2], [4, 4], [5, 4]]),
    }
    shape = dispatch_fit.HeadShape(2, 3, 16)
    assert dispatch_fit.thresholds(shape, surfaces) == {8: 6, 16: 12}


def test_times_of_a_profile_add_up_to_the_span():
    names = ["nvjet_tst_128x128", "split_kv_decode_triton", "ncclDevKernel_AllReduce", "fusion_3"]
    events = [device_trace.Event(0, name, 10e6 * i, 10e6 * i + 4e6) for i, name in enumerate(names)]
    found = device_trace.add_up([*events, device_trace.Event(0, "fusion_4", 31e6, 36e6)])
    assert found.kinds == pytest.approx(
        {"matmul": 4, "attention": 4, "collectives": 4, "other": 6}  # the last two overlap
    )
    assert found.idle == pytest.approx(18)
    assert found.total == pytest.approx(36)
    assert found.waits[0] == ("nvjet_tst_128x128", "split_kv_decode_triton", pytest.approx(6))


def test_waits_between_the_same_kernels_are_added_up_and_launches_are_none():
    events, time = [], 0.0
    for name, microseconds in (
        ("gemm", 0),
        ("copy", 600),
        ("gemm", 500),
        ("copy", 2),
        ("gemm", 700),
    ):
        time += microseconds * 1e3
        events += [device_trace.Event(device, name, time, time + 1e6) for device in (0, 1)]
        time += 1e6
    found = device_trace.add_up(events)
    assert list(found.waits_between.items()) == [
        (("copy", "gemm"), (2, pytest.approx(1.2))),
        (("gemm", "copy"), (1, pytest.approx(0.6))),
    ]
    assert found.launch == pytest.approx(0.002)


def test_only_what_lies_inside_the_loop_counts():
    events = [
        device_trace.Event(0, "MemcpyH2D", 0, 1),
        device_trace.Event(0, "nvjet", 5, 6),
        device_trace.Event(0, "fusion", 7, 8),
        device_trace.Event(0, "nvjet", 9, 10),
        device_trace.Event(0, "MemcpyD2H", 20, 21),
    ]
    assert device_trace.inside_loop(events) == events[1:4]
