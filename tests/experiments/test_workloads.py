"""Workloads: what requests a config gives."""

import json
import math

import numpy as np
import pytest

from experiments.workloads import Target, arrival_times, prepare
from kvgrain_jax.errors import ConfigError

TARGET = Target(vocabulary=1000, max_context=4096)


class LetterTokenizer:
    """One token for each character; a chat is ``<system>…|<user>…|`` and an opening ``>``."""

    stop_ids = frozenset({7, 3})

    def encode_chat(self, messages, *, add_generation_prompt=True):
        text = "".join(f"<{m['role']}>{m['content']}|" for m in messages)
        return [ord(c) for c in text + (">" if add_generation_prompt else "")]


class UserFirstTokenizer(LetterTokenizer):
    """A chat format that puts the system prompt behind the user's message."""

    def encode_chat(self, messages, *, add_generation_prompt=True):
        return super().encode_chat(messages[::-1], add_generation_prompt=add_generation_prompt)


def synthetic(**changes):
    return {
        "kind": "synthetic",
        "requests": 6,
        "prefix_tokens": 64,
        "suffix_tokens": 8,
        "output_tokens": 5,
    } | changes


def make(config, target=TARGET):
    return prepare(config)(target)


def common(a, b):
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if differ.size else n


# -- synthetic -------------------------------------------------------------------------------------


def test_a_burst_arrives_at_once():
    requests = make(synthetic()).requests
    assert [r.arrival for r in requests] == [0.0] * 6


def test_requests_of_a_prefix_share_it_and_not_a_token_more():
    requests = make(synthetic()).requests
    shared = {common(a.prompt, b.prompt) for a in requests for b in requests if a is not b}
    assert shared == {64}
    assert {r.shared_tokens for r in requests} == {64}


def test_every_request_has_its_lengths():
    requests = make(synthetic(suffix_tokens=9, output_tokens=3)).requests
    assert {(len(r.prompt), r.max_new_tokens) for r in requests} == {(73, 3)}


def test_prefixes_are_interleaved_and_share_nothing_with_each_other():
    workload = make(synthetic(prefix_tokens=(64, 32, 16)))
    requests = workload.requests
    assert [r.shared_tokens for r in requests] == [64, 32, 16, 64, 32, 16]
    assert common(requests[0].prompt, requests[3].prompt) == 64
    assert common(requests[0].prompt, requests[1].prompt) == 0
    assert list(workload.groups.values()) == ["prefix 0", "prefix 1", "prefix 2"] * 2


def test_a_prefix_of_no_tokens_shares_nothing():
    a, b, *_ = make(synthetic(prefix_tokens=0)).requests
    assert common(a.prompt, b.prompt) == 0
    assert a.shared_tokens == 0


def test_the_same_seed_gives_the_same_requests_and_another_seed_others():
    config = synthetic(arrivals="poisson", seed=3)
    first, again = make(config).requests, make(config).requests
    other = make(config | {"seed": 4}).requests
    assert [r.arrival for r in first] == [r.arrival for r in again]
    assert [list(r.prompt) for r in first] == [list(r.prompt) for r in again]
    assert common(first[0].prompt[1:], other[0].prompt[1:]) < 3
    assert [r.arrival for r in first] != [r.arrival for r in other]


def test_poisson_arrivals_have_the_gaps_of_the_exponential_distribution():
    count, rate = 4000, 2.5
    gaps = np.diff([0.0, *arrival_times(count, "poisson", rate, seed=0)])
    # Mean and standard deviation are both 1/rate. Five standard errors: of the mean
    # 1/(rate sqrt(n)), of the deviation sqrt(2)/(rate sqrt(n)) as the kurtosis is 9.
    error = 1 / (rate * math.sqrt(count))
    assert abs(gaps.mean() - 1 / rate) < 5 * error
    assert abs(gaps.std() - 1 / rate) < 5 * math.sqrt(2) * error
    # One in e gaps is longer than the mean.
    share = (gaps > 1 / rate).mean()
    assert abs(share - 1 / math.e) < 5 * math.sqrt(0.25 / count)


def test_a_request_longer_than_the_context_is_an_error():
    with pytest.raises(ConfigError, match="takes 77 tokens; the context is 76"):
        make(synthetic(), Target(vocabulary=1000, max_context=76))


# -- agents ----------------------------------------------------------------------------------------


@pytest.fixture
def agents(tmp_path):
    for name, system in (("cook", "You cook."), ("tutor", "You teach science.")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "system.txt").write_text(system + "\n")
        (folder / "questions.txt").write_text("How long?\n\nWhy?\n")
    return {
        "kind": "agents",
        "folder": str(tmp_path),
        "agents": ("cook", "tutor"),
        "output_tokens": 4,
    }


TEXT_TARGET = Target(vocabulary=256, max_context=100, tokenizer=LetterTokenizer())


def test_agents_take_turns_and_every_question_is_asked(agents):
    workload = make(agents, TEXT_TARGET)
    assert [r.id for r in workload.requests] == ["cook-0", "tutor-0", "cook-1", "tutor-1"]
    assert list(workload.questions.values()) == ["How long?", "How long?", "Why?", "Why?"]


def test_an_agents_prompts_share_the_rendered_system_prompt(agents):
    requests = make(agents, TEXT_TARGET).requests
    text = "".join(map(chr, requests[2].prompt))
    assert text == "<system>You cook.|<user>Why?|>"
    assert requests[2].shared_tokens == len("<system>You cook.|")
    np.testing.assert_array_equal(
        requests[0].prompt[: requests[0].shared_tokens],
        requests[2].prompt[: requests[2].shared_tokens],
    )


def test_agents_stop_at_the_models_stop_tokens(agents):
    assert {r.stop_tokens for r in make(agents, TEXT_TARGET).requests} == {(3, 7)}


def test_more_requests_than_questions_ask_again(agents):
    workload = make(agents | {"requests": 6}, TEXT_TARGET)
    assert workload.questions["cook-2"] == "How long?"


def test_a_chat_format_without_a_leading_system_prompt_is_an_error(agents):
    target = Target(vocabulary=256, max_context=100, tokenizer=UserFirstTokenizer())
    with pytest.raises(ConfigError, match="does not put the system prompt first"):
        make(agents, target)


def test_agents_need_a_tokenizer(agents):
    with pytest.raises(ConfigError, match="has no tokenizer"):
        make(agents)


def test_an_unknown_agent_is_an_error_that_names_the_others(agents):
    with pytest.raises(ConfigError, match="There are cook, tutor"):
        prepare(agents | {"agents": ("pilot",)})


def test_an_empty_system_prompt_is_an_error(agents, tmp_path):
    (tmp_path / "cook" / "system.txt").write_text("  \n")
    with pytest.raises(ConfigError, match=r"cook/system\.txt is empty"):
        prepare(agents)


# -- traces ----------------------------------------------------------------------------------------


@pytest.fixture
def trace(tmp_path):
    def line(timestamp, input_length, output_length, hash_ids):
        return json.dumps(
            {
                "timestamp": timestamp,
                "input_length": input_length,
                "output_length": output_length,
                "hash_ids": hash_ids,
            }
        )

    path = tmp_path / "trace.jsonl"
    path.write_text(
        "\n".join(
            [
                line(0, 1024, 64, [1, 2]),
                line(4000, 1536, 0, [1, 2, 3]),
                line(24000, 700, 8, [1, 9]),
                line(26000, 512, 8, [5]),
            ]
        )
    )
    return {"kind": "trace", "path": str(path)}


def test_a_trace_is_replayed_as_it_was_recorded(trace):
    requests = make(trace).requests
    assert [r.arrival for r in requests] == [0.0, 4.0, 24.0, 26.0]
    assert [len(r.prompt) for r in requests] == [1024, 1536, 700, 512]
    assert common(requests[0].prompt, requests[1].prompt) == 1024


def test_an_answer_that_was_cut_off_asks_for_one_token(trace):
    assert [r.max_new_tokens for r in make(trace).requests] == [64, 1, 8, 8]


def test_time_is_compressed_and_long_silences_are_shortened(trace):
    requests = make(trace | {"time_compression": 2.0, "max_gap_s": 3.0}).requests
    assert [r.arrival for r in requests] == [0.0, 2.0, 5.0, 6.0]


def test_lengths_are_scaled_and_sharing_stays(trace):
    workload = make(trace | {"length_scale": 1 / 64, "output_scale": 0.25})
    requests = workload.requests
    assert [len(r.prompt) for r in requests] == [16, 24, 11, 8]
    assert [r.max_new_tokens for r in requests] == [16, 1, 2, 2]
    assert common(requests[0].prompt, requests[1].prompt) == 16
    assert workload.facts["length_scale"] == 1 / 64


def test_a_part_of_a_trace_begins_at_once(trace):
    workload = make(trace | {"skip": 1, "requests": 2})
    assert [(r.id, r.arrival) for r in workload.requests] == [("r1", 0.0), ("r2", 20.0)]
    assert (workload.facts["replayed_requests"], workload.facts["trace_requests"]) == (2, 4)


def test_what_does_not_fit_the_context_is_cut_and_counted(trace):
    workload = make(trace, Target(vocabulary=1000, max_context=100))
    assert [r.max_new_tokens for r in workload.requests] == [50, 1, 8, 8]
    assert [len(r.prompt) for r in workload.requests] == [50, 99, 92, 92]
    assert workload.facts["prompts_cut_to_context"] == 4
    assert workload.facts["outputs_cut_to_context"] == 1


def test_skipping_all_of_a_trace_is_an_error(trace):
    with pytest.raises(ConfigError, match=r"skip is 4, but .* holds 4 requests"):
        prepare(trace | {"skip": 4})


def test_a_malformed_trace_is_reported_before_a_model_is_known(trace):
    with open(trace["path"], "a") as file:
        file.write("\n{oops")
    with pytest.raises(ConfigError, match=r"trace\.jsonl:5"):
        prepare(trace)


# -- configs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({"kind": "storm"}, "no workload 'storm'; choose one of synthetic, agents, trace"),
        ({}, "no workload None"),
        (synthetic(speed=3), "no field speed"),
        ({"kind": "synthetic", "requests": 1}, "needs output_tokens, prefix_tokens"),
        (synthetic(requests=0), "workload.requests is 0"),
        (synthetic(output_tokens=-1), "workload.output_tokens is -1"),
        (synthetic(suffix_tokens=0), "workload.suffix_tokens is 0"),
        (synthetic(prefix_tokens=-1), "workload.prefix_tokens is -1"),
        (synthetic(prefix_tokens=()), r"workload.prefix_tokens is \(\)"),
        (synthetic(arrivals="sometimes"), "workload.arrivals is 'sometimes'"),
        (synthetic(rate=0.0), "workload.rate is 0.0"),
        (synthetic(rate=math.nan), "workload.rate is nan"),
        (synthetic(seed=-1), "workload.seed is -1"),
        ({"kind": "trace", "path": None}, "give one with --trace=PATH"),
        ({"kind": "trace", "path": "t", "time_compression": 0}, "workload.time_compression is 0"),
        ({"kind": "trace", "path": "t", "length_scale": math.inf}, "workload.length_scale is inf"),
        ({"kind": "trace", "path": "t", "requests": 0}, "workload.requests is 0"),
        ({"kind": "trace", "path": "t", "skip": -1}, "workload.skip is -1"),
        ({"kind": "trace", "path": "/nowhere/t.jsonl"}, "no trace file"),
        ({"kind": "agents", "folder": ".", "agents": (), "output_tokens": 1}, "agents is empty"),
    ],
)
def test_a_wrong_workload_config_is_an_error(config, says):
    with pytest.raises(ConfigError, match=says):
        prepare(config)
