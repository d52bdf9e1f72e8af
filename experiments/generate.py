"""Completes one prompt and prints the text as it is generated.

python -m experiments.generate --model=smollm2-135m --prompt="The capital of France is"
python -m experiments.generate --prompt="Why is the sky blue?" --chat --temperature=0.7 --seed=1
"""

import math
import sys
import time
from typing import Any, TextIO

from absl import flags

import models
from experiments import flags as shared_flags
from experiments.running import engine_configs
from kvgrain_jax.engine import Engine, Request, SamplingParams
from kvgrain_jax.errors import ConfigError, RequestError

MIN_CONTEXT = 512


def generate(
    *,
    model: str,
    prompt: str,
    dtype: str | None = None,
    chat: bool = False,
    system_prompt: str | None = None,
    max_new_tokens: int = 64,
    sampling: SamplingParams | None = None,
    system: str = "kvgrain",
    output: TextIO | None = None,
) -> tuple[int, ...]:
    """Generates text for one prompt.

    Args:
      model, dtype: see ``models.load``.
      prompt: text to complete, or the user's message.
      chat: put the prompt into the model's chat format.
      system_prompt: first message of the chat.
      max_new_tokens: tokens to generate at most.
      sampling: how tokens are drawn; greedy where None.
      system: name of the system that generates.
      output: where the text goes; the terminal where None.

    Returns:
      The generated tokens.

    Raises:
      ConfigError: unknown model or system, or a system prompt without chat.
      RequestError: an empty prompt, or a limit out of range.
    """
    out = output or sys.stdout
    if not prompt:
        raise RequestError("The prompt is empty; give --prompt=TEXT.")
    if max_new_tokens < 1:
        raise RequestError(f"max_new_tokens is {max_new_tokens}; give at least 1.")
    if system_prompt is not None and not chat:
        raise ConfigError("A system prompt belongs to a chat; give --chat as well.")
    engine_configs([system], {"pool_tokens": 1024})
    loaded = models.load(model, dtype=dtype)
    tokenizer = loaded.tokenizer
    if tokenizer is None:
        raise ConfigError(f"Model {model} has no tokenizer, so it cannot read text.")
    tokens = _prompt_tokens(tokenizer, prompt, chat, system_prompt)
    # Few sizes, so that the next prompt finds its programs in the compilation cache.
    context = max(MIN_CONTEXT, 2 ** math.ceil(math.log2(len(tokens) + max_new_tokens)))
    context = min(context, loaded.model.max_context)
    config = engine_configs(
        [system],
        {
            # HOT and COLD each have room for the whole request.
            "pool_tokens": 4 * context,
            "max_context": context,
            "max_batch": 1,
            "chunk_tokens": 256,
            "chunk_buckets": (64, 256),
            "decode_steps": 4,
        },
    )[system]
    engine = Engine(loaded.model, config)
    engine.submit(
        Request(
            id="prompt",
            prompt=tokens,
            max_new_tokens=max_new_tokens,
            stop_tokens=tuple(sorted(tokenizer.stop_ids)),
            sampling=sampling or SamplingParams(),
        )
    )
    generated: list[int] = []
    stream = tokenizer.stream()
    while engine.has_work:
        for event in engine.step():
            generated += event.tokens
            out.write("".join(map(stream.push, event.tokens)))
            out.flush()
    out.write(stream.finish() + "\n")
    return tuple(generated)


def _prompt_tokens(tokenizer: Any, prompt: str, chat: bool, system_prompt: str | None) -> list[int]:
    if not chat:
        return tokenizer.encode(prompt)
    messages = [{"role": "user", "content": prompt}]
    if system_prompt is not None:
        messages.insert(0, {"role": "system", "content": system_prompt})
    return tokenizer.encode_chat(messages, add_generation_prompt=True)


def main() -> int:
    """Runs the flags; the figures go to stderr, so that stdout is the text alone."""
    begin = time.perf_counter()
    tokens = generate(
        model=MODEL.value,
        prompt=PROMPT.value,
        dtype=DTYPE.value,
        chat=CHAT.value,
        system_prompt=SYSTEM_PROMPT.value,
        max_new_tokens=MAX_NEW_TOKENS.value,
        sampling=SamplingParams(
            TEMPERATURE.value, top_k=TOP_K.value, top_p=TOP_P.value, seed=SEED.value
        ),
        system=SYSTEM.value,
    )
    seconds = time.perf_counter() - begin
    print(f"{len(tokens)} tokens in {seconds:.1f} s, loading included", file=sys.stderr)
    return 0


if __name__ == "__main__":
    MODEL = flags.DEFINE_string("model", "smollm2-135m", "Name, file, folder or random:NAME.")
    DTYPE = flags.DEFINE_string("dtype", None, "Dtype; the device's usual one if unset.")
    PROMPT = flags.DEFINE_string("prompt", "", "Text to complete.")
    CHAT = flags.DEFINE_bool("chat", False, "Put the prompt into the model's chat format.")
    SYSTEM_PROMPT = flags.DEFINE_string("system_prompt", None, "System prompt of the chat.")
    MAX_NEW_TOKENS = flags.DEFINE_integer("max_new_tokens", 64, "Tokens to generate at most.")
    TEMPERATURE = flags.DEFINE_float("temperature", 0.0, "0 takes the most likely token.")
    TOP_K = flags.DEFINE_integer("top_k", 0, "Draw from so many tokens; 0 from all.")
    TOP_P = flags.DEFINE_float("top_p", 1.0, "Draw from tokens of this total probability.")
    SEED = flags.DEFINE_integer("seed", 0, "The same seed gives the same text.")
    SYSTEM = flags.DEFINE_string("system", "kvgrain", "System that generates.")
    flags.declare_key_flag("compilation_cache")
    shared_flags.run(main)
