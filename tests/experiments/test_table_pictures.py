"""Bars of a table: what stands below and above them."""

import pytest
from matplotlib.figure import Figure

from experiments.table_pictures import PICTURES

STYLES = {name: {"color": "black", "hatch": ""} for name in ("page 1", "page 16")}


def row(variant, how, tok_s):
    metrics = {} if tok_s is None else {"tok_s": {"mean": tok_s, "low": tok_s, "high": tok_s}}
    return {"cell": {"batch": 256}, "variant": variant, "how": how, "metrics": metrics}


def draw_bars(*rows):
    axis = Figure().subplots()
    PICTURES["bars"][0](axis, {"reference": ""}, rows, {}, STYLES)
    return axis


def below(axis):
    return [text.get_text() for text in axis.get_xticklabels()]


def above(axis):
    return [text.get_text() for text in axis.texts]


def test_variants_of_one_cell_are_named_below_their_bars():
    axis = draw_bars(row("page 1", "steps", 18850.4), row("page 16", "steps", 99.25))
    assert below(axis) == ["page 1", "page 16"]
    assert axis.get_xlabel() == "B 256"
    assert above(axis) == ["18,850", "99.2"]
    assert not axis.get_legend_handles_labels()[0]


def test_a_cell_that_was_measured_in_two_ways_has_bars_for_each():
    axis = draw_bars(
        row("page 1", "steps", 18000.0),
        row("page 16", "steps", 19000.0),
        row("page 16", "burst", 12000.0),
    )
    assert below(axis) == ["B 256, steps", "B 256, burst"]
    assert above(axis) == ["18,000", "", "19,000", "12,000"]


@pytest.mark.parametrize(("tok_s", "text"), [(None, ""), (0.0, "0")])
def test_what_was_not_measured_has_no_number(tok_s, text):
    axis = draw_bars(row("page 1", "steps", tok_s))
    assert above(axis) == [text]
