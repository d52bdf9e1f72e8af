"""The error of everything that is read from or written to a model's files."""

from kvgrain_jax.errors import KVGrainError


class CheckpointError(KVGrainError, ValueError):
    """A model's file is missing, cut short, corrupt, or does not hold the model it should.

    The message names the file and, where one is at fault, the tensor.
    """
