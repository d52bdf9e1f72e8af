"""Requests: what a caller asks of the engine, checked before it goes any further."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from kvgrain_jax.errors import RequestError


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn.

    Attributes:
      temperature: 0 takes the most likely token (greedy).
      top_k: keep the ``top_k`` most likely tokens; 0 keeps all.
      top_p: keep the most likely tokens that together reach this probability, in (0, 1].
      seed: the same seed gives the same tokens whatever else is in the batch.

    Raises:
      RequestError: a value is out of range or not a number.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self):
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise RequestError(f"temperature is {self.temperature}; give a finite number >= 0.")
        if not 0 <= self.top_k < 2**31:
            raise RequestError(
                f"top_k is {self.top_k}; give 0 (all tokens) or a positive number below 2**31."
            )
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p is {self.top_p}; give a number in (0, 1].")
        if not 0 <= self.seed < 2**32:
            raise RequestError(f"seed is {self.seed}; give a whole number in [0, 2**32).")


GREEDY = SamplingParams()


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """One prompt to complete.

    Attributes:
      id: name of the request, unique among those in the engine.
      prompt: token ids, at least one; stored as a read-only int32 array.
      max_new_tokens: tokens to generate at most; at least 1.
      stop_tokens: generation ends after one of these (it is part of the output).
      sampling: how tokens are drawn.
      arrival: seconds after the start of the run before which the request does not exist.
      shared_tokens: how many leading prompt tokens the caller declares to be a prefix that other
        requests share (a system prompt). It may go to HOT on its first use; 0 leaves it to the
        prefix index to find out.

    Raises:
      RequestError: a value is out of range. Token ids are checked against the vocabulary by the
        engine, which knows it.
    """

    id: str
    prompt: np.ndarray | Sequence[int]
    max_new_tokens: int
    stop_tokens: tuple[int, ...] = ()
    sampling: SamplingParams = GREEDY
    arrival: float = 0.0
    shared_tokens: int = 0

    def __post_init__(self):
        prompt = np.asarray(self.prompt)
        if prompt.size == 0:
            raise RequestError(f"Request {self.id}: the prompt is empty; give at least one token.")
        if prompt.ndim != 1:
            raise RequestError(
                f"Request {self.id}: the prompt has shape {prompt.shape}; give one row of token ids."
            )
        if prompt.dtype.kind not in "iu":
            raise RequestError(f"Request {self.id}: token ids are {prompt.dtype}, not integers.")
        if prompt.min() < 0 or prompt.max() > np.iinfo(np.int32).max:
            raise RequestError(f"Request {self.id}: the prompt holds a token id out of range.")
        prompt = prompt.astype(np.int32)
        prompt.flags.writeable = False
        object.__setattr__(self, "prompt", prompt)
        if self.max_new_tokens < 1:
            raise RequestError(
                f"Request {self.id}: max_new_tokens is {self.max_new_tokens}; give at least 1."
            )
        if not all(0 <= token < 2**31 for token in self.stop_tokens):
            raise RequestError(
                f"Request {self.id}: a stop token of {self.stop_tokens} is no token id."
            )
        if not (math.isfinite(self.arrival) and self.arrival >= 0):
            raise RequestError(f"Request {self.id}: arrival is {self.arrival}; give seconds >= 0.")
        if not 0 <= self.shared_tokens <= prompt.size:
            raise RequestError(
                f"Request {self.id}: shared_tokens is {self.shared_tokens} of a prompt of "
                f"{prompt.size} tokens."
            )
