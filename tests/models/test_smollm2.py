"""The real model: SmolLM2-135M-Instruct answers, and its layers are computed right."""

import dataclasses

import numpy as np
from decoder_reference import forward
from model_files import file_tensors, plain_logits

from models import as_model, named_config
from models.from_gguf import smollm2_path
from models.gguf_file import read_gguf
from models.weights import assemble, expected_tensors, name_in_file


def test_file_has_the_published_config(smollm2):
    assert smollm2.config == named_config("smollm2-135m")
    assert smollm2.name == "smollm2-135m"


def test_capital_of_france_is_paris(smollm2):
    ids = smollm2.tokenizer.encode("The capital of France is")
    for _ in range(2):
        # One length, one program: what follows a token does not change its logits.
        padded = ids + [0] * (8 - len(ids))
        ids.append(int(plain_logits(smollm2.model, padded)[len(ids) - 1].argmax()))
    assert smollm2.tokenizer.decode(ids) == "The capital of France is Paris."


def test_first_layers_agree_with_numpy_on_the_rows_as_they_lie_in_the_file(smollm2):
    config = dataclasses.replace(smollm2.config, layers=4)
    ids = smollm2.tokenizer.encode("The capital of France is")
    file = read_gguf(smollm2_path())
    weights = {
        name: file.dequantise(name_in_file(name, "gguf")) for name in expected_tensors(config)
    }
    expected = forward(config, weights, ids, range(len(ids)), interleaved=True)
    loaded = file_tensors(smollm2.config, smollm2.model.params)
    params = assemble("smollm2", config, loaded.__getitem__, "float32")
    actual = plain_logits(as_model(config, params), ids)
    assert np.max(np.abs(actual - expected)) < 1e-4 * np.max(np.abs(expected))
