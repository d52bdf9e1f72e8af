"""Tuned knobs: the nearest shape that was measured on the device, else the rule."""

import json

from pallas_kernels import tuning
from pallas_kernels.segment_attention import tiles_for

LLAMA = {"folded_rows": 1024, "length": 8192, "n_kv_heads": 8, "head_dim": 128}
RULE = {"row_tile": 1, "kv_tile": 2}


def look(shape, device="nvidia-h200"):
    return tuning.lookup(
        "segment_attention", shape, exact=("head_dim",), fallback=RULE, device=device
    )


def test_a_measured_shape_gets_its_own_knobs():
    assert look(LLAMA) == {"row_tile": 128, "kv_tile": 128}


def test_a_shape_between_gets_the_nearest():
    assert look(LLAMA | {"folded_rows": 30, "length": 9000}) == look(
        LLAMA | {"folded_rows": 32, "length": 8192}
    )


def test_a_field_that_must_be_equal_is_never_approximated():
    assert look(LLAMA | {"head_dim": 256}) == RULE


def test_a_device_without_a_file_gets_the_rule():
    assert look(LLAMA, device="abacus") == RULE


def test_few_rows_get_the_narrow_tile_by_rule():
    sizes = {"length": 100, "n_kv_heads": 1, "head_dim": 224}
    assert tiles_for(folded_rows=64, **sizes) == (64, 64)
    assert tiles_for(folded_rows=65, **sizes) == (128, 64)


def test_written_knobs_are_a_file_of_the_device(tmp_path):
    entries = [{"shape": {"head_dim": 64}, "knobs": {"block": 32}}]
    path = tuning.write("some_op", entries, folder=tmp_path)
    assert path == tmp_path / "some_op" / "tuning" / f"{tuning.device_name()}.json"
    assert json.loads(path.read_text()) == entries
