"""Converts a model to an Orbax checkpoint, with its config and tokenizer beside the weights.

python -m experiments.convert --model=smollm2-135m --out=out/smollm2
python -m experiments.convert --model=path/to/huggingface/folder --out=out/model --dtype=float32

Every ``--model`` takes the folder; loading it reads the weights as they are, without dequantising
or reordering.
"""

from absl import flags

import models
from experiments import flags as shared_flags
from kvgrain_jax.errors import ConfigError
from models.orbax_checkpoint import empty_folder


def convert(*, model: str, out: str | None, dtype: str = "bfloat16", seed: int = 0) -> str:
    """Loads a model and writes it as an Orbax checkpoint.

    Args:
      model: see ``models.load``.
      out: folder to write, empty or not there yet.
      dtype: dtype of the written weights.
      seed: of random weights.

    Returns:
      The id of the written weights.

    Raises:
      ConfigError: no folder is named, or an unknown model or dtype.
      CheckpointError: the model's files are at fault, or the folder holds files already or cannot be
        written.
    """
    if not out:
        raise ConfigError("No folder to write; give --out=FOLDER.")
    # Before minutes of loading, not after.
    empty_folder(out)
    loaded = models.load(model, dtype=dtype, seed=seed)
    models.save(loaded, out)
    return loaded.checkpoint


def main() -> None:
    """Runs the flags and says what was written."""
    out = shared_flags.OUT.value
    checkpoint = convert(model=MODEL.value, out=out, dtype=DTYPE.value, seed=SEED.value)
    print(f"Wrote {checkpoint} in {DTYPE.value} to {out}")


if __name__ == "__main__":
    MODEL = flags.DEFINE_string("model", "smollm2-135m", "Name, file, folder or random:NAME.")
    DTYPE = flags.DEFINE_string("dtype", "bfloat16", "Dtype of the written weights.")
    SEED = flags.DEFINE_integer("seed", 0, "Seed of random weights.")
    flags.declare_key_flag("out")
    shared_flags.run(main)
