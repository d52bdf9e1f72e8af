"""What a config can ask of a workload: one class for each kind, every field checked.

What enters is the ``workload`` part of a config; what leaves is an instance of one of ``KINDS``.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from kvgrain_jax.errors import ConfigError

ARRIVALS = ("burst", "poisson")


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """Random prompts over shared prefixes.

    Attributes:
      requests: how many.
      prefix_tokens: length of the shared prefix, or one length for each of ``k`` prefixes; request
        ``i`` uses prefix ``i % k``. 0 shares nothing.
      suffix_tokens: tokens of each prompt after the prefix, its own; or several lengths that take
        turns.
      output_tokens: tokens to generate.
      arrivals: ``"burst"`` (all at once) or ``"poisson"``.
      rate: requests per second of the Poisson process.
      seed: of the arrivals and of the tokens.
    """

    requests: int
    prefix_tokens: int | tuple[int, ...]
    suffix_tokens: int | tuple[int, ...]
    output_tokens: int
    arrivals: str = "burst"
    rate: float = 1.0
    seed: int = 0

    def __post_init__(self):
        _at_least(self, 1, "requests", "output_tokens")
        _check_arrivals(self)
        if not self.suffixes or min(self.suffixes) < 1:
            raise ConfigError(
                f"workload.suffix_tokens is {self.suffix_tokens}; give a number >= 1, or several."
            )
        if not self.lengths or min(self.lengths) < 0:
            raise ConfigError(
                f"workload.prefix_tokens is {self.prefix_tokens}; give a length >= 0, or one for "
                "each prefix."
            )

    @property
    def lengths(self) -> tuple[int, ...]:
        """Length of each prefix."""
        return _several(self.prefix_tokens)

    @property
    def suffixes(self) -> tuple[int, ...]:
        """Lengths of suffixes; request ``i`` has number ``i % len(suffixes)``."""
        return _several(self.suffix_tokens)


@dataclasses.dataclass(frozen=True)
class Agents:
    """Chats with agents that have long system prompts.

    Attributes:
      folder: one folder for each agent, see ``experiments.agents.read_agent``.
      agents: names of the agents; request ``i`` goes to agent ``i % len(agents)``.
      requests: how many; None asks every question once.
      output_tokens: tokens to generate at most; an answer may end sooner.
      arrivals, rate, seed: as in ``Synthetic``.
    """

    folder: str
    agents: tuple[str, ...]
    output_tokens: int
    requests: int | None = None
    arrivals: str = "burst"
    rate: float = 1.0
    seed: int = 0

    def __post_init__(self):
        _at_least(self, 1, "requests", "output_tokens")
        _check_arrivals(self)
        if not self.agents:
            raise ConfigError("workload.agents is empty; name at least one agent.")


@dataclasses.dataclass(frozen=True)
class Trace:
    """Replay of a recorded trace.

    Attributes:
      path: the file.
      format: one of ``traces.FORMATS``; None finds it by content.
      requests: how many to replay; None replays all.
      skip: requests to leave out in front.
      time_compression: recorded seconds for one second of the replay.
      max_gap_s: longer silences between two arrivals are shortened to this, in seconds of the
        replay; None keeps them.
      length_scale: factor of the prompt lengths. Blocks are whole tokens, so the factor that is
        used may differ a little; the facts give it.
      output_scale: factor of the output lengths; ``length_scale`` where None.
      api_time_scale, session_gap_s, max_sessions: agent sessions only, see
        ``experiments.agent_sessions``.
    """

    path: str
    format: str | None = None
    requests: int | None = None
    skip: int = 0
    time_compression: float = 1.0
    max_gap_s: float | None = None
    length_scale: float = 1.0
    output_scale: float | None = None
    api_time_scale: float = 1.0
    session_gap_s: float = 0.0
    max_sessions: int | None = None

    def __post_init__(self):
        if not self.path:
            raise ConfigError("The workload replays a trace; give one with --trace=PATH.")
        _at_least(self, 1, "requests", "max_sessions")
        _at_least(self, 0, "skip", "api_time_scale", "session_gap_s", "max_gap_s")
        for name in ("time_compression", "length_scale", "output_scale"):
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError(f"workload.{name} is {value}; give a finite number > 0.")


KINDS = {"synthetic": Synthetic, "agents": Agents, "trace": Trace}


def read_spec(config: Mapping[str, Any]) -> Synthetic | Agents | Trace:
    """The workload a config asks for.

    Args:
      config: ``kind``, one of ``KINDS``, and fields of that class.

    Raises:
      ConfigError: unknown kind, unknown or missing field, or a value out of range.
    """
    fields = dict(config)
    kind = fields.pop("kind", None)
    if kind not in KINDS:
        raise ConfigError(f"There is no workload {kind!r}; choose one of {', '.join(KINDS)}.")
    known = {field.name: field for field in dataclasses.fields(KINDS[kind])}
    if unknown := sorted(set(fields) - set(known)):
        raise ConfigError(
            f"The {kind} workload has no field {', '.join(unknown)}; it has {', '.join(known)}."
        )
    required = {name for name, field in known.items() if field.default is dataclasses.MISSING}
    if missing := sorted(required - set(fields)):
        raise ConfigError(f"The {kind} workload needs {', '.join(missing)}.")
    return KINDS[kind](**fields)


def _several(lengths: int | tuple[int, ...]) -> tuple[int, ...]:
    return (lengths,) if isinstance(lengths, int) else tuple(lengths)


def _at_least(spec: Any, minimum: int, *names: str) -> None:
    for name in names:
        value = getattr(spec, name)
        if value is not None and not (math.isfinite(value) and value >= minimum):
            raise ConfigError(f"workload.{name} is {value}; give a number >= {minimum}.")


def _check_arrivals(spec: Synthetic | Agents) -> None:
    if spec.arrivals not in ARRIVALS:
        raise ConfigError(
            f"workload.arrivals is {spec.arrivals!r}; choose one of {', '.join(ARRIVALS)}."
        )
    if not (math.isfinite(spec.rate) and spec.rate > 0):
        raise ConfigError(f"workload.rate is {spec.rate}; give requests per second > 0.")
    if spec.seed < 0:
        raise ConfigError(f"workload.seed is {spec.seed}; give a whole number >= 0.")
