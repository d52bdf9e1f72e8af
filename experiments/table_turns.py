"""Lengths of user turns: drawn from a fitted distribution, or taken from a file.

What enters is the ``turns`` section of a cell; what leaves are lengths in tokens.

The paper takes ShareGPT's user turns of 16 to 512 tokens, which may not be redistributed. The
default here is a lognormal distribution truncated to the same range, fitted by maximum likelihood to
the 261 of 480 English user turns of that length in a sample of 100 conversation trees of OpenAssistant
(LAION-AI/Open-Assistant, Apache-2.0, commit f1e6ed95), counted with SmolLM2's tokenizer. Parameters:
mu 0.055 and sigma 1.611 of the logarithm; Kolmogorov-Smirnov distance 0.050; deciles 1, 5, 9 of the
turns 17, 26 and 64 tokens, of the fit 17, 26 and 68; mean 38.5 and 37.9.
"""

import json
import math
import pathlib
import statistics
from collections.abc import Mapping
from typing import Any

import numpy as np

from kvgrain_jax.errors import ConfigError

FITTED = {"path": "", "mu": 0.055, "sigma": 1.611, "least": 16, "most": 512}
# Of English text with a vocabulary of 49,152 (the sample above); only for files that hold text.
CHARACTERS_PER_TOKEN = 4.49


def draw(turns: Mapping[str, Any], count: int, seed: int) -> tuple[int, ...]:
    """Lengths of ``count`` turns.

    Args:
      turns: ``{"tokens": n}`` for turns of one length; else ``path`` of a file, or where that is empty
        ``mu`` and ``sigma`` of a lognormal distribution, and ``least`` and ``most`` tokens of a turn.
      count: how many.
      seed: of the draw.

    Raises:
      ConfigError: the file cannot be used.
    """
    if "tokens" in turns:
        return (turns["tokens"],) * count
    rng = np.random.default_rng(seed)
    least, most = turns["least"], turns["most"]
    if turns["path"]:
        lengths = [n for n in read(turns["path"]) if least <= n <= most]
        if not lengths:
            raise ConfigError(f"{turns['path']} holds no turn of {least} to {most} tokens.")
        return tuple(int(n) for n in rng.choice(lengths, count))
    normal = statistics.NormalDist(turns["mu"], turns["sigma"])
    low, high = (normal.cdf(math.log(edge)) for edge in (least - 0.5, most + 0.5))
    return tuple(
        min(max(round(math.exp(normal.inv_cdf(low + u * (high - low)))), least), most)
        for u in rng.random(count)
    )


def read(path: str | pathlib.Path) -> list[int]:
    """Lengths of the turns in a file.

    Args:
      path: lines with one whole number each; or ShareGPT's JSON, a list of objects with
        ``conversations``, of which the texts ``from`` ``human`` count, at 4.49 characters a token.

    Raises:
      ConfigError: it cannot be read, or is neither of the two.
    """
    try:
        text = pathlib.Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"The file of turns {path} cannot be read: {error}.") from error
    try:
        if not text.lstrip().startswith("["):
            return [int(line) for line in text.split()]
        return [
            math.ceil(len(turn["value"]) / CHARACTERS_PER_TOKEN)
            for conversation in json.loads(text)
            for turn in conversation["conversations"]
            if turn["from"] == "human"
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is neither whole numbers, one a line, nor ShareGPT's JSON ({error!r})."
        ) from error
