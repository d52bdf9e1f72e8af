"""Head profiles: how much of a context each KV head demands, measured on samples.

Enter per-sample retained fractions of every layer and head; leave their mean, their spread, how
stable the ranking of the heads is, and an npz file that says for which checkpoint it was made.
Everything here is NumPy at set-up time. Source: Tangram §3.2 and §4.1.1.
"""

import dataclasses
import os
import pathlib
import zipfile

import numpy as np
from jaxtyping import Float, Int

from kvgrain_jax.errors import ConfigError

FORMAT = 1


@dataclasses.dataclass(frozen=True, eq=False)
class HeadProfile:
    """Retained fractions of sample contexts under one global target.

    Of a context of ``n`` tokens the first ``sinks`` and the last ``window`` are protected; the
    fraction of a head is ``(kept - protected) / (n - protected)``, so it carries over to other
    lengths.

    Attributes:
      fractions: float64 ``[samples, L, K]`` in [0, 1].
      scorer: name of the scores that chose the tokens.
      checkpoint: id of the weights, as ``models.load`` gives it.
      target: retention of all heads together at which the samples were taken, in (0, 1].
      sinks: protected tokens at the front.
      window: protected tokens at the end.
      lengths: int64 ``[samples]``, tokens of each context.
      domains: what each sample was taken from; one name a sample.

    Raises:
      ConfigError: shapes disagree, or a value is out of range or not finite.
    """

    fractions: Float[np.ndarray, "samples L K"]
    scorer: str
    checkpoint: str
    target: float
    sinks: int
    window: int
    lengths: Int[np.ndarray, " samples"]
    domains: tuple[str, ...]

    def __post_init__(self):
        if 0 in self.fractions.shape:
            raise ConfigError(
                f"A profile of shape {self.fractions.shape} is empty; give at least one sample, "
                "layer and head."
            )
        if not np.all((self.fractions >= 0) & (self.fractions <= 1)):
            raise ConfigError(
                "The profile holds fractions that are NaN or outside [0, 1]; measure it again."
            )
        check_retention(self.target, "The profile's target")
        check_protected(self.sinks, self.window)
        for name in ("lengths", "domains"):
            if len(getattr(self, name)) != len(self.fractions):
                raise ConfigError(
                    f"The profile has {len(self.fractions)} samples and {len(getattr(self, name))} "
                    f"{name}; give one for each sample."
                )

    @property
    def n_layers(self) -> int:
        return self.fractions.shape[1]

    @property
    def n_kv_heads(self) -> int:
        return self.fractions.shape[2]

    @property
    def mean(self) -> Float[np.ndarray, "L K"]:
        """Mean over samples."""
        return self.fractions.mean(axis=0)

    @property
    def std(self) -> Float[np.ndarray, "L K"]:
        """Standard deviation over samples; 0 where there is one sample only."""
        if len(self.fractions) == 1:
            return np.zeros(self.fractions.shape[1:])
        return self.fractions.std(axis=0, ddof=1)

    def of_domain(self, domain: str) -> "HeadProfile":
        """The samples of one domain.

        Raises:
          ConfigError: there are none.
        """
        chosen = np.array([name == domain for name in self.domains])
        if not chosen.any():
            raise ConfigError(
                f"The profile has no sample of domain {domain!r}; it has "
                f"{', '.join(sorted(set(self.domains)))}."
            )
        return self.subset(np.flatnonzero(chosen))

    def subset(self, samples: Int[np.ndarray, " chosen"]) -> "HeadProfile":
        """The samples of these indices."""
        return dataclasses.replace(
            self,
            fractions=self.fractions[samples],
            lengths=self.lengths[samples],
            domains=tuple(self.domains[i] for i in samples),
        )


def retained_fractions(
    kept: Int[np.ndarray, "samples L K"],
    lengths: Int[np.ndarray, " samples"],
    *,
    sinks: int,
    window: int,
) -> Float[np.ndarray, "samples L K"]:
    """Fractions of a profile from counts of kept tokens, protected ones included.

    Args:
      kept: tokens that each head kept.
      lengths: tokens of each context.
      sinks: protected tokens at the front.
      window: protected tokens at the end.

    Raises:
      ConfigError: a context is not longer than what is protected, or a head kept fewer tokens than
        are protected or more than there are.
    """
    check_protected(sinks, window)
    protected = sinks + window
    if np.any(lengths <= protected):
        raise ConfigError(
            f"A context of {lengths.min()} tokens is not longer than the {protected} protected "
            "ones; profile longer contexts or protect fewer tokens."
        )
    length = lengths[:, None, None]
    if np.any(kept < protected) or np.any(kept > length):
        raise ConfigError(
            f"A head kept {kept.min()} to {kept.max()} tokens of contexts of {lengths.min()} to "
            f"{lengths.max()}; it must keep at least the {protected} protected ones and at most all."
        )
    return (kept - protected) / (length - protected)


def save_profile(profile: HeadProfile, path: str | os.PathLike[str]) -> None:
    """Writes a profile as npz, whole or not at all."""
    path = pathlib.Path(path)
    unfinished = path.with_name(path.name + ".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, format=FORMAT, **vars(profile))
    os.replace(unfinished, path)


def load_profile(path: str | os.PathLike[str]) -> HeadProfile:
    """Reads a profile that ``save_profile`` wrote.

    Raises:
      ConfigError: the file cannot be read, or is no profile of this format.
    """
    names = [field.name for field in dataclasses.fields(HeadProfile)]
    try:
        with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
            if "format" not in file or int(file["format"]) != FORMAT:
                raise ConfigError(
                    f"{path} is no head profile of format {FORMAT}; measure it again."
                )
            found = {name: file[name] for name in names}
    except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path} cannot be read as a head profile: {error}.") from error
    return HeadProfile(
        fractions=found["fractions"],
        scorer=str(found["scorer"]),
        checkpoint=str(found["checkpoint"]),
        target=float(found["target"]),
        sinks=int(found["sinks"]),
        window=int(found["window"]),
        lengths=found["lengths"],
        domains=tuple(str(name) for name in found["domains"]),
    )


def check_profile(profile: HeadProfile, *, checkpoint: str, n_layers: int, n_kv_heads: int) -> None:
    """Compares a profile with the model that it shall be used for.

    Raises:
      ConfigError: it was made for other weights or another number of layers or heads.
    """
    if (profile.n_layers, profile.n_kv_heads) != (n_layers, n_kv_heads):
        raise ConfigError(
            f"The profile is of {profile.n_layers} layers of {profile.n_kv_heads} KV heads, the "
            f"model has {n_layers} of {n_kv_heads}; measure a profile of this model."
        )
    if profile.checkpoint != checkpoint:
        raise ConfigError(
            f"The profile was made for checkpoint {profile.checkpoint!r}, the model is "
            f"{checkpoint!r}; measure a profile of this model."
        )


def spearman(a: Float[np.ndarray, "..."], b: Float[np.ndarray, "..."]) -> float:
    """Spearman's rank correlation of all elements; ties get their mean rank.

    Returns:
      A value in [-1, 1]; NaN where one side is constant.
    """
    ranks = np.stack([_mean_ranks(a.ravel()), _mean_ranks(b.ravel())])
    centred = ranks - ranks.mean(axis=1, keepdims=True)
    norm = np.sqrt(np.prod((centred**2).sum(axis=1)))
    return float(centred[0] @ centred[1] / norm) if norm else float("nan")


def split_half_stability(
    profile: HeadProfile, *, splits: int = 100, seed: int = 0
) -> Float[np.ndarray, " splits"]:
    """Rank correlation of the heads' means between random halves of the samples.

    Raises:
      ConfigError: there are fewer than two samples.
    """
    n = len(profile.fractions)
    if n < 2:
        raise ConfigError(f"The profile has {n} sample; two halves need at least two.")
    rng = np.random.default_rng(seed)
    found = np.empty(splits)
    for i in range(splits):
        order = rng.permutation(n)
        halves = (order[: n // 2], order[n // 2 :])
        found[i] = spearman(*(profile.fractions[half].mean(axis=0) for half in halves))
    return found


def check_retention(retention: float, what: str = "The retention") -> None:
    """Raises ``ConfigError`` where a retention is outside (0, 1]."""
    if not 0 < retention <= 1:
        raise ConfigError(f"{what} is {retention}; give a number in (0, 1].")


def check_protected(sinks: int, window: int) -> None:
    """Raises ``ConfigError`` where a count of protected tokens is negative."""
    if sinks < 0 or window < 0:
        raise ConfigError(f"sinks is {sinks} and window {window}; neither can be negative.")


def _mean_ranks(values: Float[np.ndarray, " n"]) -> Float[np.ndarray, " n"]:
    _, place, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[place]
