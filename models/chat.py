"""Renders a conversation with the Jinja template of the model file.

A template and messages enter, the prompt text leaves. Templates come with downloaded files, so they
run in Jinja's immutable sandbox.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from kvgrain_jax.errors import RequestError
from models.errors import CheckpointError

Message = Mapping[str, Any]

# Unicode noncharacters: text that is exchanged never holds them.
_NONCHARACTERS = [chr(code) for code in range(0xFDD0, 0xFDF0)]


def compile_template(source: str) -> jinja2.Template:
    """Compiles a chat template as Hugging Face transformers does.

    ``strftime_now`` is left undefined on purpose: templates then fall back to a fixed date, and the
    same conversation gives the same tokens, and hits the same prefix, on every day.

    Raises:
      CheckpointError: the template is no valid Jinja.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise CheckpointError(f"The model's chat template cannot be compiled: {error}.") from error


def render(template: jinja2.Template, messages: Sequence[Message], **variables: Any) -> str:
    """Renders messages to the prompt text.

    Args:
      template: from ``compile_template``.
      messages: each with string values for ``role`` and ``content``, oldest first.
      **variables: further names that the template may use (``bos_token``, ``tools`` …).

    Raises:
      RequestError: no messages, a malformed message, or one that the template refuses.
    """
    if not messages:
        raise RequestError("A conversation needs at least one message.")
    for index, message in enumerate(messages):
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise RequestError(
                    f"Message {index} of the conversation must have a string {key!r}, got "
                    f"{message.get(key)!r:.60}."
                )
    try:
        return template.render(messages=[dict(message) for message in messages], **variables)
    except (jinja2.TemplateError, TypeError) as error:
        raise RequestError(
            f"The model's chat template refuses the conversation: {error}."
        ) from error


def shield(messages: Sequence[Message], special: re.Pattern[str]) -> tuple[list[Message], str]:
    """Breaks up what looks like a special token inside the messages.

    A mark, a character that no message holds, is put into every match of ``special``. After
    rendering, whatever matches ``special`` is the template's own; then the mark is removed.

    Returns:
      The messages with marks, and the mark.

    Raises:
      RequestError: the messages hold all 32 characters that could serve as the mark.
    """
    text = json.dumps([dict(message) for message in messages], ensure_ascii=False, default=str)
    mark = next((character for character in _NONCHARACTERS if character not in text), None)
    if mark is None:
        raise RequestError("The conversation holds every Unicode noncharacter; it is not text.")

    def broken(value: Any) -> Any:
        if isinstance(value, str):
            # Once more after each pass: breaking one match can leave another that overlapped it.
            while special.search(value):
                value = special.sub(lambda match: match[0][0] + mark + match[0][1:], value)
            return value
        if isinstance(value, Mapping):
            return {key: broken(item) for key, item in value.items()}
        return [broken(item) for item in value] if isinstance(value, list | tuple) else value

    return [broken(message) for message in messages], mark


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
