"""What a binary leaves behind: valid JSON, written whole, and pictures that can be opened."""

import dataclasses
import json
import math

import numpy as np
import pytest
from matplotlib.image import imread

from experiments import report
from experiments.pictures import draw_runs
from kvgrain_jax.engine.metrics import RequestMetrics, RunMetrics, Sample, StepTrace
from kvgrain_jax.errors import ConfigError


def read(path):
    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(encoding="utf-8"), parse_constant=refuse)


def test_a_result_holds_what_was_run_and_where(tmp_path):
    path = report.write_result(tmp_path, "serve", {"model": "tiny"}, [{"system": "a"}], extra=1)
    result = read(path)
    assert result["experiment"] == "serve"
    assert result["config"] == {"model": "tiny"}
    assert result["rows"] == [{"system": "a"}]
    assert result["extra"] == 1
    assert result["device"]["platform"] == "cpu"
    assert result["versions"]["jax"]
    assert "commit" in result


def test_numbers_that_are_not_finite_become_null(tmp_path):
    row = {
        "a": math.nan,
        "b": [math.inf, 1.5],
        "c": np.float32("nan"),
        "d": np.array([1.0, np.inf]),
    }
    (found,) = read(report.write_result(tmp_path, "x", {}, [row]))["rows"]
    assert found == {"a": None, "b": [None, 1.5], "c": None, "d": [1.0, None]}


def test_arrays_tuples_and_dataclasses_become_plain_json(tmp_path):
    @dataclasses.dataclass
    class Point:
        x: int
        y: tuple[int, ...]

    row = {"p": Point(1, (2, 3)), "n": np.int64(4), "t": np.bool_(True), 5: np.float32(0.5)}
    (found,) = read(report.write_result(tmp_path, "x", {}, [row]))["rows"]
    assert found == {"p": {"x": 1, "y": [2, 3]}, "n": 4, "t": True, "5": 0.5}


def test_a_failed_write_leaves_the_old_result(tmp_path, monkeypatch):
    path = report.write_result(tmp_path, "x", {}, [{"run": 1}])

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(report.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        report.write_result(tmp_path, "x", {}, [{"run": 2}])
    assert read(path)["rows"] == [{"run": 1}]


def test_an_output_folder_is_made_with_its_parents(tmp_path):
    folder = report.check_out_folder(tmp_path / "a" / "b")
    assert folder.is_dir()
    assert not list(folder.iterdir())


def test_an_output_folder_that_is_a_file_is_an_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match=r"output folder .*file/out cannot be written"):
        report.check_out_folder(tmp_path / "file" / "out")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0012345, "1.23"), (0.05, "50"), (1.2345, "1234"), (math.nan, "-")],
)
def test_times_are_shown_in_milliseconds(seconds, text):
    assert report.milliseconds(seconds) == text


def run_metrics(backend, hot):
    request = RequestMetrics("r", 0.0, 0.5, 1.5, 10, 5, (1, 2, 3), "length")
    return RunMetrics(
        kv_bytes_per_token=64,
        requests=[request],
        samples=[Sample(0.5, 1, 0, hot, 20, 0, 10), Sample(1.5, 1, 0, hot, 25, 0, 10)],
        steps=[StepTrace(backend, 1, 3, "", 10), StepTrace("paged", 1, 3, "", 10)],
    )


def test_the_picture_of_several_systems_can_be_opened(tmp_path):
    runs = {"first": run_metrics("paged", 0), "second": run_metrics("dense", 12)}
    draw_runs(tmp_path / "p.png", "title", runs)
    height, width, _ = imread(tmp_path / "p.png").shape
    assert width > 1500 > height > 800


def test_a_run_that_was_stopped_at_once_can_be_drawn(tmp_path):
    draw_runs(tmp_path / "p.png", "title", {"only": RunMetrics(kv_bytes_per_token=64)})
    assert imread(tmp_path / "p.png").size
