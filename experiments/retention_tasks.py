"""Questions about long contexts, made by seed: what ``retention`` and ``head_profile`` read.

A text of some domain and a tokenizer enter; contexts of exactly the same number of tokens leave, with
questions whose answers lie in them. Answers are scored by teacher forcing, so a question is a prompt
and the tokens that should follow. Several questions share one context: whoever compresses it does
not know which will be asked.

Texts are those of the running Python's own library (``prose``: the reference in
``pydoc_data.topics``; ``code``: a few modules) or a file of the user's.
"""

import argparse
import ast
import dataclasses
import pathlib
import random
import re
import typing
from collections.abc import Callable, Sequence
from pydoc_data import topics
from types import ModuleType

from kvgrain_jax.errors import ConfigError
from models import Tokenizer

LIBRARY: dict[str, tuple[ModuleType, ...]] = {
    "prose": (topics,),
    "code": (argparse, typing, pathlib, ast),
}
HALVES = ("profile", "test")
_CITIES = [
    "Lisbon",
    "Oslo",
    "Cairo",
    "Lima",
    "Hanoi",
    "Quito",
    "Rabat",
    "Tunis",
    "Minsk",
    "Sofia",
    "Dublin",
    "Vienna",
    "Havana",
    "Riga",
    "Doha",
    "Kyoto",
    "Porto",
    "Turin",
    "Delhi",
    "Perth",
]
_WORDS = [
    "amber",
    "river",
    "stone",
    "cloud",
    "silver",
    "forest",
    "winter",
    "garden",
    "copper",
    "island",
    "marble",
    "desert",
    "lantern",
    "harbor",
    "meadow",
    "thunder",
    "velvet",
    "canyon",
    "orange",
    "violet",
    "feather",
    "anchor",
    "bridge",
    "candle",
    "dragon",
    "engine",
    "falcon",
    "guitar",
    "hammer",
    "jungle",
    "kitten",
    "ladder",
    "mirror",
    "needle",
    "oyster",
    "pepper",
    "rabbit",
    "saddle",
    "ticket",
    "tunnel",
    "walnut",
    "window",
    "yellow",
    "basket",
    "button",
    "carpet",
    "castle",
    "coffee",
    "cotton",
    "doctor",
    "flower",
]


@dataclasses.dataclass(frozen=True)
class Question:
    """Token ids of a question and of the answer that should follow."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Sample:
    """A context and what is asked about it.

    Attributes:
      task: one of ``TASKS``.
      domain: of the text between the facts.
      context: token ids.
      questions: at least one.
    """

    task: str
    domain: str
    context: tuple[int, ...]
    questions: tuple[Question, ...]


@dataclasses.dataclass(frozen=True)
class Text:
    """Lines of one domain as token ids, cut in halves: profiles and questions never share a line."""

    domain: str
    halves: dict[str, tuple[tuple[int, ...], ...]]


def read_text(domain: str, source: str, tokenizer: Tokenizer) -> Text:
    """Reads and tokenises a text.

    Args:
      domain: its name.
      source: ``prose`` or ``code`` for those of the library, or the path of a text file.
      tokenizer: the model's.

    Raises:
      ConfigError: the file cannot be read, or has fewer than 20 lines with something in them.
    """
    if source in LIBRARY:
        raw = "\n".join(_library_text(module) for module in LIBRARY[source])
    else:
        try:
            raw = pathlib.Path(source).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"The text {source!r} of domain {domain!r} cannot be read: {error}."
            ) from error
    lines = [line.rstrip() + "\n" for line in raw.splitlines() if re.search(r"\w", line)]
    if len(lines) < 20:
        raise ConfigError(
            f"The text of domain {domain!r} has {len(lines)} lines; give at least 20."
        )
    ids = tuple(tuple(tokenizer.encode(line, bos=False)) for line in lines)
    middle = len(ids) // 2
    return Text(domain, {"profile": ids[:middle], "test": ids[middle:]})


def make_sample(
    task: str, text: Text, tokenizer: Tokenizer, *, tokens: int, seed: int, half: str
) -> Sample:
    """One context with its questions; the same arguments give the same sample.

    Args:
      task: one of ``TASKS``.
      text: what lies between the facts.
      tokenizer: the model's.
      tokens: length of the context.
      seed: of names, numbers and places.
      half: ``"profile"`` or ``"test"``: which half of the text.

    Raises:
      ConfigError: there is no such task, or the context is too short for its facts.
    """
    if task not in TASKS:
        raise ConfigError(f"There is no task {task!r}; choose among {', '.join(TASKS)}.")
    rng = random.Random(f"{task}/{text.domain}/{half}/{seed}")
    lines = text.halves[half]
    start = [tokenizer.bos_id] if tokenizer.bos_id is not None else []
    if task == PERPLEXITY:
        stream = _from(lines, rng, tokens + PERPLEXITY_TOKENS - len(start))
        whole = [*start, *stream]
        context, rest = whole[:tokens], whole[tokens:]
        questions = (Question(tuple(rest[:1]), tuple(rest[1:])),)
    else:
        facts, asked = _FACTS[task](rng)
        context = _hide([_encode(tokenizer, fact) for fact in facts], lines, rng, tokens, start)
        questions = tuple(
            Question(_encode(tokenizer, prompt), _encode(tokenizer, answer))
            for prompt, answer in asked
        )
    return Sample(task, text.domain, tuple(context), questions)


Facts = tuple[list[str], list[tuple[str, str]]]


def _single_needle(rng: random.Random) -> Facts:
    facts, asked = _multi_needle(rng)
    return facts[:1], asked[:1]


def _multi_needle(rng: random.Random) -> Facts:
    cities = rng.sample(_CITIES, 4)
    numbers = {city: _number(rng) for city in cities}
    facts = [f"The secret number of {city} is {number}.\n" for city, number in numbers.items()]
    asked = [(f"\nThe secret number of {city} is ", numbers[city]) for city in cities]
    return facts, asked


def _key_value(rng: random.Random) -> Facts:
    keys = [f"{a}-{b}" for a, b in zip(rng.sample(_WORDS, 10), rng.sample(_WORDS, 10), strict=True)]
    values = {key: _number(rng) for key in keys}
    table = "".join(f'"{key}": "{value}",\n' for key, value in values.items())
    return [table], [(f'\n"{key}": "', values[key]) for key in keys[::3]]


def _prefix_suffix(rng: random.Random) -> Facts:
    words = rng.sample(_WORDS, 24)
    facts, asked = [], []
    for first, second, last in zip(words[::3], words[1::3], words[2::3], strict=True):
        middle = _number(rng)
        facts.append(f"{first} {second} {middle} {last}\n")
        asked.append((f"\nends with {last}: {first} {second} ", middle))
    return facts, asked[::2]


def _variable_tracking(rng: random.Random) -> Facts:
    names = rng.sample([f"V{letter}" for letter in "ABCDEFGHJKLMNPQRSTUWXYZ"], 8)
    facts, asked = [], []
    for chain in range(4):
        first, second = names[2 * chain : 2 * chain + 2]
        number = _number(rng)
        facts += [f"{first} = {number}\n", f"{second} = {first}\n"]
        asked.append((f"\n{second} = {first} = ", number))
    return facts, asked


PERPLEXITY = "perplexity"
PERPLEXITY_TOKENS = 72
_FACTS: dict[str, Callable[[random.Random], Facts]] = {
    "single_needle": _single_needle,
    "multi_needle": _multi_needle,
    "key_value": _key_value,
    "prefix_suffix": _prefix_suffix,
    "variable_tracking": _variable_tracking,
}
TASKS = (*_FACTS, PERPLEXITY)


def _number(rng: random.Random) -> str:
    return str(rng.randrange(10_000, 100_000))


def _encode(tokenizer: Tokenizer, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, bos=False))


def _from(lines: Sequence[tuple[int, ...]], rng: random.Random, tokens: int) -> list[int]:
    """So many tokens of consecutive lines from a random place, round the end if need be."""
    stream: list[int] = []
    line = rng.randrange(len(lines))
    while len(stream) < tokens:
        stream += lines[line % len(lines)]
        line += 1
    return stream[:tokens]


def _hide(
    facts: Sequence[tuple[int, ...]],
    lines: Sequence[tuple[int, ...]],
    rng: random.Random,
    tokens: int,
    start: Sequence[int],
) -> list[int]:
    """The facts, in order, between lines of text; ``tokens`` tokens in all."""
    filler = tokens - len(start) - sum(map(len, facts))
    if filler < tokens // 5:
        raise ConfigError(
            f"A context of {tokens} tokens is too short for facts of {sum(map(len, facts))}; raise "
            "context_tokens."
        )
    stream = _from(lines, rng, filler)
    newlines = {line[-1] for line in lines}
    # Not in the last tenth: recent tokens are protected, and nothing would have to be remembered.
    ends = [i + 1 for i, token in enumerate(stream[: filler * 9 // 10]) if token in newlines]
    cuts = sorted(rng.choices(ends or [0], k=len(facts)))
    context = list(start)
    done = 0
    for cut, fact in zip(cuts, facts, strict=True):
        context += [*stream[done:cut], *fact]
        done = cut
    return context + stream[done:]


def _library_text(module: ModuleType) -> str:
    if module is topics:
        return "\n".join(topics.topics[name] for name in sorted(topics.topics))
    assert module.__file__ is not None
    return pathlib.Path(module.__file__).read_text(encoding="utf-8")
