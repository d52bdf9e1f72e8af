"""The ``generate`` binary on a tiny model."""

import io

import pytest
from tiny_text_model import byte_tokenizer, load_tiny_text_model

import models
from experiments.generate import generate
from kvgrain_jax.engine import SamplingParams
from kvgrain_jax.errors import ConfigError, RequestError


class Pieces(io.StringIO):
    """Remembers what was flushed at once."""

    def __init__(self):
        super().__init__()
        self.flushed = [""]

    def flush(self):
        if self.getvalue() != self.flushed[-1]:
            self.flushed.append(self.getvalue())


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(models, "load", load_tiny_text_model)


def complete(**changes):
    output = Pieces()
    arguments = {"model": "random:tiny", "prompt": "Hello", "max_new_tokens": 10, "output": output}
    return generate(**(arguments | changes)), output


def test_the_text_of_all_tokens_is_printed(tiny):
    tokens, output = complete()
    assert len(tokens) == 10
    assert output.getvalue() == byte_tokenizer().decode(tokens) + "\n"


def test_text_is_printed_while_tokens_arrive(tiny):
    _, output = complete(prompt="abc", max_new_tokens=12)
    assert len(output.flushed) > 3


@pytest.mark.slow
def test_every_system_gives_the_same_greedy_text(tiny):
    answers = {system: complete(system=system)[0] for system in ("kvgrain", "uniform16")}
    assert answers["kvgrain"] == answers["uniform16"]


def test_a_seed_gives_the_same_sample_again_and_another_seed_another(tiny):
    def sample(seed):
        return complete(sampling=SamplingParams(temperature=2.0, seed=seed))[0]

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_a_chat_differs_from_the_plain_prompt(tiny):
    assert complete(chat=True)[0] != complete()[0]


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"prompt": ""}, RequestError, "prompt is empty"),
        ({"max_new_tokens": 0}, RequestError, "max_new_tokens is 0"),
        ({"system_prompt": "Be brief."}, ConfigError, "give --chat"),
        ({"system": "vrgrain"}, ConfigError, "no system 'vrgrain'"),
        ({"model": "tinny"}, ConfigError, "Unknown model 'tinny'"),
        ({"model": "random:tiny"}, ConfigError, "has no tokenizer"),
    ],
)
def test_wrong_arguments_are_errors(changes, error, says):
    with pytest.raises(error, match=says):
        complete(**changes)


def test_a_prompt_longer_than_the_context_is_an_error(tiny):
    with pytest.raises(RequestError, match="more than the context of 4096"):
        complete(prompt="x" * 4090)
