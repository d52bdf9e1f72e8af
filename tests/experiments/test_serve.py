"""The ``serve`` binary, end to end on a tiny model."""

import io
import json
import os
import signal
import subprocess
import sys

import pytest
import rich.console
from tiny_text_model import load_tiny_text_model

import models
from configs import smoke
from experiments import serve as serve_module
from experiments.running import SystemRun, first_difference
from experiments.serve import main, serve
from kvgrain_jax.engine import Engine, RequestMetrics, RunMetrics
from kvgrain_jax.errors import ConfigError

# Keys and values of one token of the tiny model: 2 layers, 2 KV heads, 16 wide, float32, K and V.
TOKEN_BYTES = 2 * 2 * 16 * 4 * 2


def smoke_config(out, **changes):
    return smoke.get_config().to_dict() | {"out": str(out)} | changes


def run(config):
    """Exit code, ``result.json`` and what was printed."""
    output = io.StringIO()
    code = serve(config, rich.console.Console(file=output, width=100, highlight=False))
    with open(f"{config['out']}/result.json", encoding="utf-8") as file:
        return code, json.load(file), output.getvalue()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    return *run(smoke_config(folder)), folder


def test_all_systems_serve_all_requests(served):
    code, result, _, _ = served
    assert code == 0
    assert result["complete"]
    assert [row["system"] for row in result["rows"]] == ["uniform16", "cascade16", "kvgrain"]
    assert [row["requests"] for row in result["rows"]] == [6, 6, 6]
    assert [row["output_tokens"] for row in result["rows"]] == [48, 48, 48]


def test_all_systems_give_the_same_tokens(served):
    _, result, text, _ = served
    tokens = [{r["id"]: r["tokens"] for r in row["per_request"]} for row in result["rows"]]
    assert tokens[0] == tokens[1] == tokens[2]
    assert result["first_difference"] is None
    assert "all 3 systems gave the same tokens for all 6 requests" in text


def test_each_prefix_is_stored_once(served):
    _, result, _, _ = served
    stored = {row["system"]: row["prefix_bytes_stored"] for row in result["rows"]}
    assert stored["kvgrain"] == (96 + 64) * TOKEN_BYTES
    kvgrain = result["rows"][2]
    assert kvgrain["peak_hot_tokens"] == 96 + 64


def test_a_system_without_sharing_reads_a_prefix_once_for_each_row(served):
    _, result, _, _ = served
    read = {row["system"]: row["prefix_bytes_read_per_step"] for row in result["rows"]}
    assert 0 < read["kvgrain"] <= (96 + 64) * TOKEN_BYTES
    assert read["uniform16"] > read["kvgrain"]


def test_the_table_names_systems_and_figures(served):
    _, _, text, _ = served
    for word in (
        "uniform16",
        "kvgrain",
        "output tokens/s",
        "TTFT p50 / p99",
        "prefix KV read/step",
    ):
        assert word in text


def test_a_picture_is_drawn(served):
    *_, folder = served
    assert (folder / "serve.png").read_bytes()[:4] == b"\x89PNG"


@pytest.fixture
def heeds_interrupts():
    """A process that was started in the background ignores them."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("heeds_interrupts")
def test_ctrl_c_writes_what_was_measured(tmp_path, monkeypatch):
    step, sent = Engine._step, []

    def interrupt_later(engine):
        if engine.metrics.requests and not sent:
            sent.append(signal.SIGINT)
            os.kill(os.getpid(), signal.SIGINT)
        return step(engine)

    monkeypatch.setattr(Engine, "_step", interrupt_later)
    code, result, text = run(smoke_config(tmp_path))
    assert code == 130
    assert not result["complete"]
    (row,) = result["rows"]
    assert row["system"] == "uniform16"
    assert 0 < row["requests"] < 6
    assert len(row["per_request"]) == row["requests"]
    assert "Interrupted" in text


def test_a_trace_replaces_the_workload(tmp_path):
    trace = tmp_path / "trace.jsonl"
    line = {"timestamp": 0, "input_length": 20, "output_length": 3, "hash_ids": [1]}
    trace.write_text(json.dumps(line) + "\n" + json.dumps(line | {"timestamp": 5}))
    config = smoke_config("unused", systems=("kvgrain",))
    assert main(config, trace=str(trace), out=str(tmp_path / "out")) == 0
    with open(tmp_path / "out" / "result.json", encoding="utf-8") as file:
        result = json.load(file)
    assert result["config"]["workload"] == {"kind": "trace", "path": str(trace)}
    assert result["workload"]["replayed_requests"] == 2
    (row,) = result["rows"]
    assert [r["prompt_tokens"] for r in row["per_request"]] == [20, 20]
    # The second prompt is in the cache but for the token that gives the first logits.
    assert row["per_request"][1]["cached_tokens"] == 19


def test_a_text_workload_shows_an_answer_of_each_agent(tmp_path, monkeypatch):
    monkeypatch.setattr(models, "load", load_tiny_text_model)
    for name in ("cook", "tutor"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "system.txt").write_text(f"You are the {name}. " * 4)
        (tmp_path / name / "questions.txt").write_text(f"What does a {name} do?\nWhy?")
    agents = {
        "kind": "agents",
        "folder": str(tmp_path),
        "agents": ("cook", "tutor"),
        "output_tokens": 4,
    }
    config = smoke_config(tmp_path / "out", systems=("kvgrain",), workload=agents)
    code, result, text = run(config)
    assert code == 0
    assert result["rows"][0]["requests"] == 4
    for name in ("cook", "tutor"):
        assert text.count(f"{name} was asked: ") == 1


# -- agreement -------------------------------------------------------------------------------------


def metrics(**tokens):
    requests = [
        RequestMetrics(name, 0.0, 1.0, 2.0, 10, 0, answer, "length")
        for name, answer in tokens.items()
    ]
    return RunMetrics(kv_bytes_per_token=1, requests=requests)


def test_the_first_difference_is_named():
    runs = {"a": metrics(r0=(1, 2), r1=(1, 2, 3)), "b": metrics(r0=(1, 2), r1=(1, 5, 3))}
    difference = first_difference(runs)
    assert str(difference) == "request r1, generated token 1: a gave token 2, b gave token 5"


def test_an_answer_that_ends_early_differs():
    difference = first_difference({"a": metrics(r0=(1, 2)), "b": metrics(r0=(1,))})
    assert str(difference) == "request r0, generated token 1: a gave token 2, b gave nothing"


def test_requests_that_one_system_has_not_finished_do_not_differ():
    assert first_difference({"a": metrics(r0=(1,), r1=(4,)), "b": metrics(r0=(1,))}) is None


@pytest.mark.parametrize(("must_agree", "code"), [(True, 1), (False, 0)])
def test_systems_that_differ_fail_where_they_must_agree(tmp_path, monkeypatch, must_agree, code):
    answers = iter([(1, 2), (1, 3)])

    def run_differently(model, config, requests, *callbacks):
        return SystemRun(metrics(r0=next(answers)), 0.0, complete=True)

    monkeypatch.setattr(serve_module, "run_system", run_differently)
    systems = ("uniform16", "kvgrain")
    got, result, text = run(smoke_config(tmp_path, systems=systems, must_agree=must_agree))
    assert got == code
    assert result["first_difference"]["request"] == "r0"
    assert "The systems differ" in text


# -- warm-up ---------------------------------------------------------------------------------------


def test_warmup_compiles_the_programs_of_every_system_and_serves_nothing(served, tmp_path):
    output = io.StringIO()
    console = rich.console.Console(file=output, width=100, highlight=False)
    assert serve(smoke_config(tmp_path), console, warmup_only=True) == 0
    text = output.getvalue()
    assert [line for line in text.splitlines() if line.endswith(":")] == [
        "uniform16:",
        "cascade16:",
        "kvgrain:",
    ]
    assert text.count("Compiled 3 programs in") == 3  # bookkeeping, prefill, decode loop
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_warmup_without_a_cache_to_fill_is_refused():
    flags = ["--config=configs/smoke.py", "--warmup", "--compilation_cache=none"]
    command = [sys.executable, "-m", "experiments.serve", *flags]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 1
    assert "--warmup fills the compilation cache" in found.stderr


# -- errors ----------------------------------------------------------------------------------------


@pytest.fixture
def no_loading(monkeypatch):
    def load(*_, **__):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(models, "load", load)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"speed": 3}, "no field speed"),
        ({"systems": ()}, "config.systems is empty"),
        ({"systems": ("kvgrain", "kvgrain")}, "names one system twice"),
        ({"systems": ("vrgrain",)}, "no system 'vrgrain'"),
        ({"engine": {"pool_tokens": 1024, "hops": 3}}, "no option hops"),
        ({"engine": {"pool_tokens": 1024, "backend": "dens"}}, "no backend 'dens'"),
        ({"engine": {"pool_tokens": 1024, "max_batch": 0}}, "max_batch is 0"),
        ({"workload": {"kind": "storm"}}, "no workload 'storm'"),
        ({"workload": {"kind": "trace", "path": "/nowhere/t.jsonl"}}, "no trace file"),
    ],
)
def test_a_wrong_config_is_found_before_anything_is_loaded(tmp_path, no_loading, changes, says):
    with pytest.raises(ConfigError, match=says):
        serve(smoke_config(tmp_path, **changes))


def test_a_lacking_field_is_found_before_anything_is_loaded(tmp_path, no_loading):
    config = smoke_config(tmp_path)
    del config["model"]
    with pytest.raises(ConfigError, match="lacks model"):
        serve(config)


def test_an_unwritable_output_folder_is_found_before_anything_is_loaded(tmp_path, no_loading):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        serve(smoke_config(tmp_path / "file" / "out"))


def test_an_unknown_model_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match="model 'tinny'"):
        serve(smoke_config(tmp_path, model="random:tinny"))


def test_the_binary_reports_an_error_as_a_sentence(tmp_path):
    command = [sys.executable, "-m", "experiments.serve", "--config=configs/smoke.py"]
    command += [f"--out={tmp_path}", "--trace=nowhere.jsonl", "--compilation_cache=none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr == "error: There is no trace file nowhere.jsonl.\n"
    assert not list(tmp_path.iterdir())
