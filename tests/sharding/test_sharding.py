"""Several devices and several processes compute what one device does, each with its part.

What they compute comes from ``mesh_program.py``, run once with four virtual devices and once as two
processes.
"""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from kvgrain_jax import sharding
from kvgrain_jax.errors import ConfigError

HERE = Path(__file__).parent


def start(*arguments, devices):
    environment = os.environ | {
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "JAX_PLATFORMS": "cpu",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",  # compiling is what takes time
        "PYTHONPATH": os.pathsep.join([str(HERE.parents[1]), str(HERE.parent / "models")]),
    }
    command = [sys.executable, str(HERE / "mesh_program.py"), *map(str, arguments)]
    return subprocess.Popen(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def result(program):
    out, errors = program.communicate(timeout=300)
    assert program.returncode == 0, errors
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def one_process(tmp_path_factory):
    return result(start("one", tmp_path_factory.mktemp("files"), devices=4))


@pytest.fixture(scope="module")
def two_processes():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    programs = [start("two", port, process, devices=1) for process in (0, 1)]
    return [result(program) for program in programs]


@pytest.mark.parametrize(
    "case",
    ["4 KV heads, bias, TP=2", "4 KV heads, bias, TP=4", "2 KV heads, QK norm, tied, TP=4"],
)
def test_logits_are_those_of_one_device(one_process, case):
    assert one_process["tensor parallel"][case] < 1e-5


def test_no_device_holds_more_than_its_share_of_a_matrix(one_process):
    assert one_process["largest share"] == 1 / 4


def test_ranks_beyond_the_kv_heads_hold_copies_with_a_share_of_the_query_heads(one_process):
    # One KV head with eight query heads over four ranks: four KV heads with two each.
    assert one_process["copied heads"] == {"model": [8, 4], "shard": [1, 2 + 2, 8, 32]}


def test_random_weights_do_not_depend_on_the_mesh(one_process):
    assert all(one_process["random"].values()), one_process["random"]


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("file", ["m.gguf", "hf", "orbax"])
def test_checkpoint_gives_the_same_weights_and_id_on_a_mesh(one_process, file, tp):
    assert one_process["checkpoints"][f"{file}, TP={tp}"]


def test_copies_of_kv_heads_are_not_saved(one_process):
    assert "load it without a mesh to save it" in one_process["checkpoints"]["copies saved"]


def test_ranks_sample_the_tokens_that_one_device_does(one_process):
    sampled = one_process["sampling"]
    assert sampled["eight"] == sampled["one device"]


def test_rows_that_the_ranks_cannot_share_evenly_are_sampled_too(one_process):
    sampled = one_process["sampling"]
    assert sampled["six"] == sampled["one device"][:6]


def test_ranks_find_the_most_likely_tokens_of_the_whole_vocabulary(one_process):
    assert one_process["greedy"]["together"] == one_process["greedy"]["whole"]


def test_engine_on_two_devices_gives_the_tokens_of_one_whatever_the_backend(one_process):
    one, two = (one_process["engines"][name] for name in ("one", "two"))
    assert two["tokens"] == one["tokens"]
    assert two["backends"] == ["cascade", "dense", "paged"]
    assert two["cached"] == one["cached"]
    assert [two["cached"][f"r{i}"] for i in range(6)] == [0, 24, 24, 24, 24, 24]
    assert two["cached"]["again"] == 8  # all but the last token of the prompt


@pytest.mark.slow
@pytest.mark.parametrize("kv_heads", [4, 8])
def test_engine_over_four_devices_gives_the_tokens_of_one_with_one_or_two_kv_heads_each(kv_heads):
    found = result(start("four", kv_heads, devices=4))
    assert found["four"] == found["one"]
    assert found["four"]["backends"] == ["cascade", "dense", "paged"]


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("heads", "3 KV heads cannot be spread over 4 devices"),
        ("group", "its 3 query heads cannot be shared by 4"),
        ("ffn", "feed-forward features (50) cannot be cut into 4"),
        ("vocabulary", "vocabulary (63) cannot be cut into 4"),
        ("devices", "3 replicas of 2 devices were asked for; there are 4"),
    ],
)
def test_what_cannot_be_cut_is_refused(one_process, case, message):
    assert message in one_process["refusals"][case]


@pytest.mark.slow
def test_two_processes_give_the_logits_of_one_device(two_processes):
    for found in two_processes:
        assert found["devices"] == [2, 1]
        assert found["difference"] < 1e-5


@pytest.mark.slow
def test_all_processes_receive_the_numbers_of_the_first_exactly(two_processes):
    for found in two_processes:
        assert found["broadcast"] == [1e9, 2**40]


@pytest.mark.slow
def test_processes_agree_on_the_id_of_their_weights(two_processes):
    first, second = (found["checkpoint"] for found in two_processes)
    assert first == second


@pytest.mark.slow
def test_engines_of_two_processes_give_the_tokens_of_one(two_processes, one_process):
    for found in two_processes:
        assert found["engine"]["backends"] == ["cascade"]
        assert found["engine"]["tokens"] == one_process["engines"]["one"]["tokens"]


@pytest.mark.slow
def test_mesh_that_leaves_a_process_without_devices_is_refused(two_processes):
    assert "leave process 1 without one" in two_processes[0]["one device"]


@pytest.mark.parametrize(("tp", "replicas"), [(0, 1), (1, 0)])
def test_mesh_needs_at_least_one_of_each(tp, replicas):
    with pytest.raises(ConfigError, match="at least 1 of each"):
        sharding.make_mesh(tp, replicas)


def test_arrays_of_a_tree_are_placed_and_fetched_back():
    mesh = sharding.make_mesh(1)
    tree = {"kv": np.arange(12.0, dtype=np.float32).reshape(2, 3, 2), "n": np.int32(3)}
    spec = {"kv": sharding.KV_HEADS, "n": sharding.REPLICATED}
    placed = sharding.put(tree, sharding.shardings(mesh, spec))
    assert placed["kv"].sharding == jax.sharding.NamedSharding(mesh, sharding.KV_HEADS)
    fetched = sharding.fetch(placed)
    np.testing.assert_array_equal(fetched["kv"], tree["kv"])
    assert fetched["n"] == 3


def test_one_process_keeps_its_own_numbers():
    assert sharding.broadcast({"due": 3})["due"] == 3
