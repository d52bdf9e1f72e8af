"""Parts of the tables: lengths of turns, dialogues, the arithmetic of rows, the summary of claims."""

import json
import math
import statistics

import numpy as np
import pytest

from experiments import table_dispatch, table_rows, table_summary, table_turns
from experiments.table_claims import CLAIMS, Rows
from experiments.table_markdown import value_text
from experiments.trace_records import TraceError, prompt_tokens
from experiments.traces import read_trace
from kvgrain_jax.errors import ConfigError

# -- turns ---------------------------------------------------------------------------------------


def test_drawn_turns_have_the_quantiles_of_the_sample_they_were_fitted_to():
    drawn = table_turns.draw(table_turns.FITTED, 20_000, seed=0)
    deciles = statistics.quantiles(drawn, n=10)
    assert min(drawn) == 16
    assert max(drawn) <= 512
    assert deciles[0] == pytest.approx(17, abs=1)
    assert deciles[4] == pytest.approx(26, abs=2)
    assert deciles[8] == pytest.approx(64, abs=6)


def test_turns_of_one_length_are_all_equal():
    assert table_turns.draw({"tokens": 7}, 3, seed=0) == (7, 7, 7)


def test_turns_of_a_file_are_filtered_as_in_the_paper(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("3\n20\n900\n40\n")
    drawn = table_turns.draw(table_turns.FITTED | {"path": str(path)}, 50, seed=0)
    assert set(drawn) == {20, 40}


def test_sharegpt_is_read_and_only_what_people_wrote_counts(tmp_path):
    path = tmp_path / "sharegpt.json"
    turns = [{"from": "human", "value": "x" * 449}, {"from": "gpt", "value": "y" * 90}]
    path.write_text(json.dumps([{"id": "a", "conversations": turns}]))
    assert table_turns.read(path) == [100]


@pytest.mark.parametrize("text", ["many words", '[{"no": "conversations"}]'])
def test_a_file_that_holds_no_turns_is_an_error(tmp_path, text):
    path = tmp_path / "file"
    path.write_text(text)
    with pytest.raises(ConfigError, match="neither whole numbers"):
        table_turns.read(path)


def test_a_file_without_turns_of_the_asked_length_is_an_error(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("3\n4\n")
    with pytest.raises(ConfigError, match="no turn of 16 to 512 tokens"):
        table_turns.draw(table_turns.FITTED | {"path": str(path)}, 5, seed=0)


# -- dialogues -----------------------------------------------------------------------------------


@pytest.fixture
def dialogues(tmp_path):
    def messages(question):
        return [
            {"role": "system", "content": "s" * 460},
            {"role": "user", "content": question},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "look"}]},
            {"role": "tool", "content": "found"},
            {"role": "assistant", "content": "answer"},
        ]

    path = tmp_path / "dialogues.json"
    path.write_text(json.dumps([{"traj": messages("one")}, {"traj": messages("two")}]))
    return path


def test_each_answer_of_a_dialogue_is_a_request_over_all_that_was_said_before(dialogues):
    records = read_trace(dialogues, session_gap=2.0)
    assert [(r.id, r.arrival) for r in records] == [
        ("d0/0", 0.0),
        ("d1/0", 2.0),
        ("d0/1", 5.0),
        ("d1/1", 7.0),
    ]
    first, _, later, _ = records
    tokens = prompt_tokens(later, 1000)
    assert tokens[: first.input_tokens].tolist() == prompt_tokens(first, 1000).tolist()
    assert later.input_tokens > first.input_tokens + first.output_tokens


def test_dialogues_share_the_system_prompt_and_nothing_more(dialogues):
    records = read_trace(dialogues)
    one, two = (prompt_tokens(r, 100_000) for r in records if r.id.endswith("/0"))
    shared = records[0].shared_blocks
    # "system", a line break and 460 letters, at 4.6 characters a token.
    assert shared == 102
    assert one[:shared].tolist() == two[:shared].tolist()
    assert one[shared] != two[shared]


def test_a_file_without_dialogues_is_an_error(tmp_path):
    path = tmp_path / "dialogues.json"
    path.write_text('[{"traj": [{"content": "no role"}]}]')
    with pytest.raises(TraceError, match="no dialogues in tau-bench's form"):
        read_trace(path)


# -- rows ----------------------------------------------------------------------------------------


def row(variant, **metrics):
    values = {name: {"mean": v, "low": v, "high": v} for name, v in metrics.items()}
    return {"variant": variant, "cell": {}, "metrics": values, "paper": {}}


def test_amdahls_prediction_is_the_papers_formula():
    base = row("uniform16", attention_ms=60.0, attention_percent=60.0)
    ours = row("kvgrain", attention_ms=6.0)
    table_rows.DERIVED["amdahl"]([[base, ours]])
    assert table_rows.mean(ours, "s_attention") == pytest.approx(10)
    # 1 / (0.4 + 0.6 / 10)
    assert table_rows.mean(ours, "speedup_predicted") == pytest.approx(1 / 0.46)


def test_dense_is_held_against_cascade():
    dense = row("dense", step_ms=3.0)
    table_rows.DERIVED["dense_over_cascade"]([[row("cascade", step_ms=4.0), dense]])
    assert table_rows.mean(dense, "to_cascade") == pytest.approx(0.75)


@pytest.mark.parametrize(
    ("value", "text"), [(16384, "16K"), (1000, "1000"), ((2048, 5), "2K, 5"), ("shared", "shared")]
)
def test_lengths_of_whole_ki_are_written_short(value, text):
    assert value_text(value) == text


# -- paired turns --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "ranks"), [(6, (1, 6)), (10, (2, 9)), (20, (6, 15)), (40, (14, 27)), (3, (1, 3))]
)
def test_the_interval_of_a_median_is_that_of_the_sign_test(n, ranks):
    """Ranks of the 95% interval as tables of the sign test give them; the range below six values."""
    shuffled = [7 * i % 41 for i in range(1, 41)]  # 1 to 40
    low, median, high = table_dispatch.median_interval([v for v in shuffled if v <= n])
    assert (low, high) == ranks
    assert median == (n + 1) / 2


def test_the_interval_of_a_median_holds_it_as_often_as_it_says():
    draws = np.random.default_rng(0).exponential(size=(4000, 40))
    ends = np.array([table_dispatch.median_interval(draw) for draw in draws])
    held = np.mean((ends[:, 0] <= math.log(2)) & (math.log(2) <= ends[:, 2]))
    # 1 - 2 * P(Binomial(40, 1/2) <= 13), within four standard errors.
    assert held == pytest.approx(0.9615, abs=4 * math.sqrt(0.9615 * 0.0385 / 4000))


def test_the_cost_of_the_dispatch_is_what_remains_when_a_drift_met_both():
    drift = np.linspace(0.0, 0.004, 40)  # twice the step that is timed
    forced = 0.002 + drift
    found = table_dispatch.overhead((forced + 1e-6).tolist(), forced.tolist())
    for name in ("overhead_us", "overhead_low_us", "overhead_high_us"):
        assert found[name] == pytest.approx(1)
    assert (found["forced_ms"], found["step_ms"]) == pytest.approx((4, 4.001))
    assert found["overhead_percent"] == pytest.approx(100 / 4000)


def test_the_bound_on_the_cost_is_the_end_of_its_interval_that_is_farther_from_none():
    found = table_dispatch.overhead([0.992, 1.0, 1.004], [1.0, 1.0, 1.0])
    assert found["overhead_percent"] == 0
    assert found["overhead_bound_percent"] == pytest.approx(0.8)


# -- claims --------------------------------------------------------------------------------------


def write_result(folder, name, rows, **more):
    (folder / name).mkdir()
    (folder / name / "result.json").write_text(json.dumps({"rows": rows, **more}))


def headline(variant, speedup):
    cell = {"prefix_tokens": 16384, "batch": 256}
    return row(variant, speedup=speedup) | {"cell": cell, "how": "poisson"}


def line(text, config, claim):
    (found,) = [x for x in text.splitlines() if f"`{config}`" in x and claim in x]
    return [part.strip() for part in found.strip("|").split("|")]


def test_without_results_every_claim_is_not_run(tmp_path):
    lines = table_summary.render(tmp_path).splitlines()[2:]
    assert len(lines) == len(CLAIMS)
    assert all("| - | not run |" in text for text in lines)


@pytest.mark.parametrize(("speedup", "verdict"), [(3.5, "confirmed"), (1.9, "not confirmed")])
def test_a_claim_is_decided_by_the_result(tmp_path, speedup, verdict):
    write_result(tmp_path, "sharegpt_llama8b", [headline("kvgrain", speedup)])
    found = line(table_summary.render(tmp_path), "sharegpt_llama8b", "Llama-3.1-8B, P 16K")
    assert found[2:5] == ["2.16x", f"{speedup:.2f}x", verdict]


def test_a_claim_measured_under_other_conditions_is_not_decided(tmp_path):
    one = headline("kvgrain", 5.0)
    one["cell"]["tp"] = 1
    write_result(tmp_path, "sharegpt_qwen14b", [one])
    found = line(table_summary.render(tmp_path), "sharegpt_qwen14b", "TP 2")
    assert found[3:5] == ["5.00x", "not testable here: one device"]


@pytest.mark.parametrize(
    ("devices", "verdict"), [(2, "not testable here: needs 4 devices"), (4, "not run")]
)
def test_a_claim_that_needs_more_devices_than_any_result_had_cannot_be_tested(
    tmp_path, devices, verdict
):
    write_result(tmp_path, "sharegpt_llama8b", [], device={"count": devices})
    found = line(table_summary.render(tmp_path), "sharegpt_qwen32b", "TP 4")
    assert found[3:5] == ["-", verdict]


@pytest.mark.parametrize(("bound", "verdict"), [(0.19, "confirmed"), (0.21, "not confirmed")])
def test_the_dispatch_is_free_where_the_whole_interval_says_so(tmp_path, bound, verdict):
    rows = [row("auto", overhead_percent=0.01, overhead_bound_percent=b) for b in (0.05, bound)]
    write_result(tmp_path, "dispatch_overhead", rows)
    found = line(table_summary.render(tmp_path), "dispatch_overhead", "free")
    assert found[3:5] == [f"{bound:.2f}% of a step at most", verdict]


def test_the_fitted_threshold_is_where_dense_wins_from_then_on():
    def cell(m_eff, ratio):
        return row("dense", m_eff=m_eff, to_cascade=ratio)

    (claim,) = [claim for claim in CLAIMS if claim.config == "dispatch_fit"]
    found = claim.read(Rows([cell(8, 1.2), cell(32, 0.99), cell(128, 1.01), cell(512, 0.7)]))
    assert found == ("dense from M_eff 512 on", True)
    assert claim.read(Rows([cell(8, 1.2), cell(512, 1.1)])) == (
        "dense nowhere ahead to the end",
        False,
    )


def test_the_summary_replaces_what_is_between_its_markers(tmp_path):
    path = tmp_path / "doc.md"
    path.write_text(f"before\n{table_summary.BEGIN}\nold\n{table_summary.END}\nafter\n")
    table_summary.write("new\n", path)
    text = path.read_text()
    assert "old" not in text
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert "\nnew\n" in text


def test_a_document_without_markers_is_an_error(tmp_path):
    path = tmp_path / "doc.md"
    path.write_text("nothing")
    with pytest.raises(ConfigError, match="summary: begin"):
        table_summary.write("new", path)


def test_the_summary_in_reproduce_is_that_of_the_results():
    """After new results: python -m experiments.tables --summary"""
    summary = table_summary.render(table_summary.ROOT / "results" / "h200" / "granikv")
    assert summary in table_summary.REPRODUCE.read_text(encoding="utf-8")


def test_reproduce_names_every_table():
    text = table_summary.REPRODUCE.read_text(encoding="utf-8")
    for name in table_summary.table_names():
        assert f"configs/granikv/{name}.py" in text
