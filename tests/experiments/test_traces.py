"""Trace files: what the readers make of them, and what they say of bad ones."""

import gzip
import json

import numpy as np
import pytest

from experiments.trace_records import TraceError, prompt_tokens, splitmix64, synthetic_tokens
from experiments.traces import read_trace

VOCABULARY = 50_000


def write(path, *lines):
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def mooncake_line(timestamp: object = 0, input_length=1000, output_length=5, hash_ids=(1, 2)):
    return json.dumps(
        {
            "timestamp": timestamp,
            "input_length": input_length,
            "output_length": output_length,
            "hash_ids": list(hash_ids),
        }
    )


def common(a, b):
    """Length of the longest common prefix."""
    n = min(len(a), len(b))
    differ = np.flatnonzero(np.asarray(a[:n]) != np.asarray(b[:n]))
    return int(differ[0]) if differ.size else n


# -- synthetic tokens ------------------------------------------------------------------------------


def test_splitmix64_gives_the_published_outputs():
    # First outputs for seed 1234567, as printed with the C reference on Rosetta Code.
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    assert splitmix64(1234567, 0, 3).tolist() == expected


def test_a_piece_of_a_synthetic_text_is_the_same_without_what_precedes_it():
    whole = synthetic_tokens("some text", 0, 100, VOCABULARY)
    np.testing.assert_array_equal(whole[37:60], synthetic_tokens("some text", 37, 23, VOCABULARY))


def test_synthetic_tokens_lie_in_the_vocabulary():
    tokens = synthetic_tokens("x", 0, 1000, 7)
    assert set(tokens.tolist()) == set(range(7))


# -- Mooncake --------------------------------------------------------------------------------------


def test_mooncake_times_are_seconds_after_the_first_request(tmp_path):
    path = write(
        tmp_path / "t.jsonl", mooncake_line(2500), mooncake_line(1000), mooncake_line(9000)
    )
    records = read_trace(path)
    assert [r.arrival for r in records] == [0.0, 1.5, 8.0]
    assert [r.id for r in records] == ["r1", "r0", "r2"]


def test_mooncake_lengths_are_kept(tmp_path):
    path = write(tmp_path / "t.jsonl", mooncake_line(input_length=1300, hash_ids=(4, 5, 9)))
    (record,) = read_trace(path)
    assert (record.input_tokens, record.output_tokens) == (1300, 5)
    assert len(prompt_tokens(record, VOCABULARY)) == 1300


def test_mooncake_prompts_share_exactly_the_blocks_with_equal_leading_ids(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        mooncake_line(input_length=1536, hash_ids=(1, 2, 3)),
        mooncake_line(input_length=1536, hash_ids=(1, 2, 4)),
        mooncake_line(input_length=1536, hash_ids=(5, 2, 3)),
    )
    a, b, c = (prompt_tokens(r, VOCABULARY) for r in read_trace(path))
    assert common(a, b) == 1024
    assert common(a, c) == 0


def test_a_partly_used_last_block_begins_like_the_whole_one(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        mooncake_line(input_length=600, hash_ids=(1, 2)),
        mooncake_line(input_length=1024, hash_ids=(1, 2)),
    )
    short, long = (prompt_tokens(r, VOCABULARY) for r in read_trace(path))
    np.testing.assert_array_equal(short, long[:600])


def test_scaled_prompts_share_the_scaled_blocks(tmp_path):
    path = write(
        tmp_path / "t.jsonl",
        mooncake_line(input_length=1300, hash_ids=(1, 2, 3)),
        mooncake_line(input_length=1300, hash_ids=(1, 2, 7)),
    )
    a, b = (prompt_tokens(r, VOCABULARY, block_tokens=16) for r in read_trace(path))
    # Two blocks of 16, and 276 of 512 tokens of a third: 8.6, so 9.
    assert len(a) == len(b) == 41
    assert common(a, b) == 32


def test_a_limit_gives_the_leading_tokens(tmp_path):
    path = write(tmp_path / "t.jsonl", mooncake_line())
    (record,) = read_trace(path)
    whole = prompt_tokens(record, VOCABULARY)
    np.testing.assert_array_equal(prompt_tokens(record, VOCABULARY, limit=600), whole[:600])


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("{", "not valid JSON"),
        ("[1, 2]", "JSON object is expected"),
        ('{"timestamp": 1}', "'input_length' is missing"),
        (mooncake_line(input_length=0), "'input_length' is 0"),
        (mooncake_line(input_length=True), "'input_length' is True"),
        (mooncake_line(output_length=-1), "'output_length' is -1"),
        (mooncake_line(timestamp="soon"), "'timestamp' is 'soon'"),
        (mooncake_line().replace(": 0,", ": NaN,", 1), "'timestamp' is nan"),
        (mooncake_line(hash_ids=(1,)), "1 hash_ids for 1000 tokens"),
        (mooncake_line(hash_ids=(1, -2)), "not a list of whole numbers"),
    ],
)
def test_a_malformed_mooncake_line_is_named(tmp_path, line, says):
    path = write(tmp_path / "t.jsonl", mooncake_line(), "", line)
    with pytest.raises(TraceError, match=rf"t\.jsonl:3: .*{says}"):
        read_trace(path)


# -- Azure -----------------------------------------------------------------------------------------

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def test_azure_times_lengths_and_line_ends(tmp_path):
    path = tmp_path / "t.csv"
    path.write_bytes(
        b"TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
        b"2023-11-16 18:17:03.9799600,4808,10\r\n"
        b"2023-11-16 18:18:04.0319600,3180,8\r\n"
    )
    first, second = read_trace(path)
    assert (first.arrival, first.input_tokens, first.output_tokens) == (0.0, 4808, 10)
    assert second.arrival == pytest.approx(60.052)
    assert len(prompt_tokens(second, VOCABULARY)) == 3180


def test_azure_prompts_share_nothing(tmp_path):
    path = write(
        tmp_path / "t.csv",
        HEADER,
        "2024-05-10 00:00:00+00:00,700,1",
        "2024-05-10 00:00:01+00:00,700,1",
    )
    a, b = (prompt_tokens(r, VOCABULARY) for r in read_trace(path))
    assert common(a, b) < 3


@pytest.mark.parametrize(
    "line",
    [
        "yesterday,1,2",
        "2024-05-10 00:00:00,1",
        "2024-05-10 00:00:00,0,2",
        "2024-05-10 00:00:00,x,2",
    ],
)
def test_a_malformed_azure_line_is_named(tmp_path, line):
    path = write(tmp_path / "t.csv", HEADER, "2024-05-10 00:00:00,5,2", line)
    with pytest.raises(TraceError, match=r"t\.csv:3: "):
        read_trace(path)


# -- sessions of agents ----------------------------------------------------------------------------


def request(t, tokens, ranges, out: object = 3, **more):
    return {"t": t, "type": "n", "in": tokens, "out": out, "hash_ranges": ranges, **more}


def session(name, requests, tool_tokens=0, system_tokens=0):
    return {
        "id": name,
        "block_size": 4,
        "hash_id_scope": "local",
        "tool_tokens": tool_tokens,
        "system_tokens": system_tokens,
        "requests": requests,
    }


def read_sessions(tmp_path, *sessions, **options):
    path = write(tmp_path / "s.jsonl", *(json.dumps(s) for s in sessions))
    return {r.id: r for r in read_trace(path, **options)}


def test_a_raw_session_and_its_compact_form_are_the_same(tmp_path):
    compact = session("s", [request(0, 13, [[1, 2], [7, 1]])], tool_tokens=4)
    raw = json.loads(json.dumps(compact))
    raw["requests"][0]["hash_ids"] = [1, 2, 7]
    del raw["requests"][0]["hash_ranges"]
    pretty = tmp_path / "s.json"
    pretty.write_text(json.dumps(raw, indent=2))
    assert read_trace(pretty) == list(read_sessions(tmp_path, compact).values())


def test_requests_of_a_session_share_their_equal_leading_blocks(tmp_path):
    turns = [request(0, 14, [[1, 3]]), request(5, 22, [[1, 3], [9, 2]])]
    records = read_sessions(tmp_path, session("s", turns))
    first, second = (prompt_tokens(records[f"s/{i}"], VOCABULARY) for i in range(2))
    assert (len(first), len(second)) == (14, 22)
    assert common(first, second) == 12


def test_sessions_share_their_tool_and_system_tokens_and_nothing_else(tmp_path):
    a = session("a", [request(0, 24, [[1, 6]])], tool_tokens=8, system_tokens=5)
    b = session("b", [request(0, 24, [[11, 6]])], tool_tokens=8, system_tokens=9)
    records = read_sessions(tmp_path, a, b)
    # Full blocks of the shorter head: 13 tokens are 3 blocks of 4.
    shared = common(*(prompt_tokens(r, VOCABULARY) for r in records.values()))
    assert shared == 12
    assert [r.shared_blocks for r in records.values()] == [3, 4]


def test_equal_local_ids_of_two_sessions_are_different_blocks(tmp_path):
    records = read_sessions(
        tmp_path, session("a", [request(0, 8, [[1, 2]])]), session("b", [request(0, 8, [[1, 2]])])
    )
    assert common(*(prompt_tokens(r, VOCABULARY) for r in records.values())) < 2


def test_two_heads_within_a_session_stay_different(tmp_path):
    def agent(first):
        return {
            "type": "subagent",
            "t": 0,
            "subagent_type": "Explore",
            "tool_tokens": 8,
            "requests": [request(0, 12, [[first, 3]])],
        }

    records = read_sessions(tmp_path, session("s", [agent(10), agent(20)]))
    assert common(*(prompt_tokens(r, VOCABULARY) for r in records.values())) < 2


def test_a_sub_agents_times_count_from_its_start(tmp_path):
    sub = {
        "type": "subagent",
        "t": 10,
        "requests": [request(0, 4, [[1, 1]]), request(3, 4, [[1, 1]])],
    }
    records = read_sessions(
        tmp_path, session("s", [request(0, 4, [[1, 1]]), sub, request(20, 4, [[1, 1]])])
    )
    times = {name: record.arrival for name, record in records.items()}
    assert times == {"s/0": 0.0, "s/1/0": 10.0, "s/1/1": 13.0, "s/2": 20.0}


def test_service_time_is_scaled_and_think_time_is_kept(tmp_path):
    turns = [
        request(0, 4, [[1, 1]], api_time=6.0),
        request(8, 4, [[1, 1]], api_time=4.0, think_time=2.0),
        request(17, 4, [[1, 1]], think_time=5.0),
    ]
    records = read_sessions(tmp_path, session("s", turns), api_time_scale=0.5)
    assert [r.arrival for r in records.values()] == [0.0, 5.0, 12.0]


def test_sessions_start_one_after_another(tmp_path):
    sessions = [session(name, [request(0, 4, [[1, 1]])]) for name in "abc"]
    records = read_sessions(tmp_path, *sessions, session_gap=7.0, max_sessions=2)
    assert {name: r.arrival for name, r in records.items()} == {"a/0": 0.0, "b/0": 7.0}


@pytest.mark.parametrize(
    ("requests", "says"),
    [
        ([request(0, 9, [[1, 1]])], "request 0: 1 block ids for 9 tokens"),
        ([request(0, 4, [[1, 0]])], "request 0: .* is not .first, count"),
        ([request(5, 4, [[1, 1]]), request(4, 4, [[1, 1]])], "request 1: 't' is 4"),
        ([request(0, 4, [[1, 1]], out=None)], "request 0: 'out' is None"),
        (["hello"], "request 0: a JSON object"),
        ("hello", "'requests' is not a list"),
    ],
)
def test_a_malformed_session_is_named(tmp_path, requests, says):
    with pytest.raises(TraceError, match=rf"s\.jsonl:2.*{says}"):
        read_sessions(
            tmp_path, session("good", [request(0, 4, [[1, 1]])]), session("bad", requests)
        )


def test_a_truncated_session_document_is_named(tmp_path):
    path = write(tmp_path / "s.json", "{", '  "id": "s",', '  "requests": [')
    with pytest.raises(TraceError, match=r"s\.json:4: not valid JSON"):
        read_trace(path, "kvct")


# -- any format ------------------------------------------------------------------------------------


def test_a_gzipped_trace_reads_like_the_plain_one(tmp_path):
    plain = write(tmp_path / "t.jsonl", mooncake_line())
    packed = tmp_path / "t.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(packed) == read_trace(plain)


def test_a_damaged_gzip_file_is_named(tmp_path):
    path = tmp_path / "t.jsonl.gz"
    path.write_bytes(gzip.compress(mooncake_line().encode())[:-12])
    with pytest.raises(TraceError, match=r"t\.jsonl\.gz is damaged"):
        read_trace(path)


@pytest.mark.parametrize("content", ["", "\n \n"])
def test_an_empty_file_is_an_error(tmp_path, content):
    path = tmp_path / "t.jsonl"
    path.write_text(content)
    with pytest.raises(TraceError, match=r"t\.jsonl is empty"):
        read_trace(path)


def test_a_header_without_requests_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="holds no request"):
        read_trace(write(tmp_path / "t.csv", HEADER))


def test_a_missing_file_is_an_error(tmp_path):
    with pytest.raises(TraceError, match=r"no trace file .*nowhere\.jsonl"):
        read_trace(tmp_path / "nowhere.jsonl")


def test_a_folder_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path)


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    path = tmp_path / "t.jsonl"
    path.write_bytes(mooncake_line().encode() + b"\n\xff\xfe\n")
    with pytest.raises(TraceError, match=r"t\.jsonl:2: not UTF-8"):
        read_trace(path)


def test_content_of_no_known_format_is_an_error(tmp_path):
    path = write(tmp_path / "t.txt", "hello, world")
    with pytest.raises(TraceError, match="formats are mooncake, azure, kvct"):
        read_trace(path)


def test_an_unknown_format_name_is_an_error(tmp_path):
    with pytest.raises(TraceError, match="Unknown trace format 'csv'"):
        read_trace(write(tmp_path / "t.csv", HEADER), "csv")
