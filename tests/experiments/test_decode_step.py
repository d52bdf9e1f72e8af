"""The ``decode_step`` binary on a tiny model."""

import io
import json

import pytest
import rich.console

from configs import decode_step as decode_step_config
from experiments.decode_step import decode_step
from kvgrain_jax.errors import ConfigError


def tiny_config(out, **changes):
    small = {"model": "random:tiny", "prefix_tokens": 64, "batch": 4, "suffix_tokens": 8}
    few = {"steps": 8, "repeats": 3, "systems": ("uniform16", "cascade16"), "out": str(out)}
    return decode_step_config.get_config().to_dict() | small | few | changes


@pytest.mark.slow
def test_every_system_is_timed_in_turns(tmp_path):
    output = io.StringIO()
    rows = decode_step(tiny_config(tmp_path), rich.console.Console(file=output, width=100))
    assert [row["system"] for row in rows] == ["uniform16", "cascade16"]
    assert [row["turns"] for row in rows] == [3, 3]
    assert all(0 < r["step_ms_p10"] <= r["step_ms"] <= r["step_ms_p90"] for r in rows)
    assert rows[0]["ratio"] == 1.0
    assert rows[1]["ratio"] == pytest.approx(rows[1]["step_ms"] / rows[0]["step_ms"])
    assert [row["backends"] for row in rows] == [["paged"], ["cascade16"]]
    assert "P = 64, B = 4" in output.getvalue()
    assert len(json.loads((tmp_path / "result.json").read_text())["rows"]) == 2


@pytest.mark.parametrize("name", ["prefix_tokens", "batch", "suffix_tokens", "steps", "repeats"])
def test_sizes_below_one_are_errors(tmp_path, name):
    with pytest.raises(ConfigError, match=f"config.{name} is 0"):
        decode_step(tiny_config(tmp_path, **{name: 0}))


def test_an_unknown_field_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="check speed"):
        decode_step(tiny_config(tmp_path, speed=1))
