"""Requests are checked where they are made: what is wrong is said, and nothing else happens."""

import math

import numpy as np
import pytest

from kvgrain_jax import KVGrainError, Request, RequestError, SamplingParams


def test_a_prompt_is_kept_as_a_read_only_int32_row():
    prompt = np.array([3, 1, 2], np.int64)
    kept = Request("r", prompt, 4).prompt
    prompt[0] = 9
    assert isinstance(kept, np.ndarray)
    assert kept.dtype == np.int32
    assert kept.tolist() == [3, 1, 2]
    with pytest.raises(ValueError, match="read-only"):
        kept[0] = 9


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"prompt": []}, "prompt is empty"),
        ({"prompt": np.zeros((0, 4), np.int32)}, "prompt is empty"),
        ({"prompt": np.array([[1, 2]])}, r"shape \(1, 2\)"),
        ({"prompt": np.array(7)}, r"shape \(\)"),
        ({"prompt": np.array([1.0, 2.0])}, "float64, not integers"),
        ({"prompt": [True]}, "bool, not integers"),
        ({"prompt": np.array(["a"])}, "not integers"),
        ({"prompt": [1, -1]}, "token id out of range"),
        ({"prompt": [2**31]}, "token id out of range"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"max_new_tokens": -3}, "max_new_tokens is -3"),
        ({"stop_tokens": (5, -1)}, "stop token"),
        ({"stop_tokens": (2**31,)}, "stop token"),
        ({"arrival": -0.1}, "arrival is -0.1"),
        ({"arrival": math.nan}, "arrival is nan"),
        ({"arrival": math.inf}, "arrival is inf"),
        ({"shared_tokens": -1}, "shared_tokens is -1 of a prompt of 3"),
        ({"shared_tokens": 4}, "shared_tokens is 4 of a prompt of 3"),
    ],
)
def test_a_malformed_request_is_refused(fields, message):
    with pytest.raises(RequestError, match=f"Request r1: .*{message}"):
        Request("r1", **{"prompt": [1, 2, 3], "max_new_tokens": 1} | fields)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", -0.5),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_p", -0.1),
        ("top_p", math.nan),
        ("seed", -1),
        ("seed", 2**32),
    ],
)
def test_senseless_sampling_is_refused_by_name(field, value):
    with pytest.raises(RequestError, match=f"{field} is {value}"):
        SamplingParams(**{field: value})


def test_the_limits_themselves_are_allowed():
    SamplingParams(temperature=0.0, top_k=0, top_p=1.0, seed=2**32 - 1)
    Request("r", [0, 2**31 - 1], 1, shared_tokens=2, stop_tokens=(0,), arrival=0.0)


def test_a_request_error_is_both_a_value_error_and_one_of_the_librarys():
    assert issubclass(RequestError, ValueError)
    assert issubclass(RequestError, KVGrainError)
