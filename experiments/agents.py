"""Agents of the demo: a system prompt and the questions that users ask, as tokens of a model.

What enters is a folder with ``system.txt`` and ``questions.txt`` (one question a line); what leaves
are prompts in the model's chat format, and how many leading tokens of them are the system prompt.
"""

import dataclasses
import pathlib
from typing import Any

from kvgrain_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class AgentText:
    """An agent as text: its name, its system prompt, the questions of its users."""

    name: str
    system: str
    questions: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class AgentTokens:
    """An agent as tokens.

    Attributes:
      name: name of the agent.
      prompts: one for each question.
      shared_tokens: leading tokens that all prompts have in common: the rendered system prompt.
      stop_tokens: tokens that end an answer.
    """

    name: str
    prompts: tuple[list[int], ...]
    shared_tokens: int
    stop_tokens: tuple[int, ...]


def read_agent(folder: str | pathlib.Path, name: str) -> AgentText:
    """Reads ``folder/name/system.txt`` and ``folder/name/questions.txt``.

    Raises:
      ConfigError: there is no such agent, or one of the texts is empty.
    """
    place = pathlib.Path(folder) / name
    texts = []
    for file in ("system.txt", "questions.txt"):
        try:
            text = (place / file).read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            known = sorted(p.parent.name for p in pathlib.Path(folder).glob("*/system.txt"))
            raise ConfigError(
                f"Agent {name!r} cannot be read from {place / file}: {error}. There are "
                f"{', '.join(known) or 'no agents'} in {folder}."
            ) from error
        if not text:
            raise ConfigError(f"{place / file} is empty.")
        texts.append(text)
    questions = tuple(line.strip() for line in texts[1].splitlines() if line.strip())
    return AgentText(name, texts[0], questions)


def tokenize(agent: AgentText, tokenizer: Any) -> AgentTokens:
    """Prompts of an agent in the chat format of a model.

    Raises:
      ConfigError: the tokens of the system prompt are no prefix of the tokens of a whole prompt,
        so nothing can be shared (a chat format that joins the two).
    """
    system = [{"role": "system", "content": agent.system}]
    shared = tokenizer.encode_chat(system, add_generation_prompt=False)
    prompts = []
    for question in agent.questions:
        messages = [*system, {"role": "user", "content": question}]
        prompt = tokenizer.encode_chat(messages, add_generation_prompt=True)
        if prompt[: len(shared)] != shared:
            raise ConfigError(
                f"Agent {agent.name}: the model's chat format does not put the system prompt first "
                "and whole, so its tokens are no shared prefix."
            )
        prompts.append(prompt)
    stop = tuple(sorted(tokenizer.stop_ids))
    return AgentTokens(agent.name, tuple(prompts), len(shared), stop)
