"""Workloads: what a config asks for, checked at once and turned into requests later.

What enters is the ``workload`` part of a config; what leaves is a list of ``Request``. This is done
in two steps, so that a wrong name, number or trace line is reported before a model is loaded:
``prepare(config)`` checks and reads, and the function it returns makes the requests once the
vocabulary, the context and the tokenizer are known.

Kinds:
  ``synthetic``  random tokens: ``k`` distinct prefixes of equal or different lengths, interleaved,
                 each request with a suffix of its own.
  ``agents``     text: system prompts and user questions from files, see ``experiments.agents``.
  ``trace``      replay of a recorded trace, see ``experiments.traces``.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from experiments import agents, traces
from experiments.trace_records import TraceRecord, prompt_tokens, scaled_length, synthetic_tokens
from experiments.workload_specs import Agents, Synthetic, Trace, read_spec
from kvgrain_jax.engine.request import Request
from kvgrain_jax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Target:
    """What a workload must know of the model that will serve it.

    Attributes:
      vocabulary: number of token ids.
      max_context: longest request, prompt and output together, in tokens.
      tokenizer: the model's tokenizer; None serves all but text.
    """

    vocabulary: int
    max_context: int
    tokenizer: Any = None


@dataclasses.dataclass(frozen=True)
class Workload:
    """Requests to serve.

    Attributes:
      requests: in order of arrival.
      groups: for each request id the name of the prefix it shares.
      facts: what a reader of the result must know of how the requests were made.
      questions: for each request id what the user asked, where the workload is text.
    """

    requests: tuple[Request, ...]
    groups: dict[str, str]
    facts: dict[str, Any]
    questions: dict[str, str] = dataclasses.field(default_factory=dict)


def prepare(config: Mapping[str, Any]) -> Callable[[Target], Workload]:
    """Checks a workload config and reads its files.

    Args:
      config: see ``workload_specs.read_spec``.

    Returns:
      The function that makes the requests for a model. It raises ``ConfigError`` where they cannot
      be made for it: no tokenizer, or a context too short.

    Raises:
      ConfigError: unknown kind or field, a value out of range, a missing or malformed file.
    """
    spec = read_spec(config)
    if isinstance(spec, Synthetic):
        return lambda target: _synthetic(spec, target)
    if isinstance(spec, Agents):
        texts = [agents.read_agent(spec.folder, name) for name in spec.agents]
        return lambda target: _agents(spec, texts, target)
    records = traces.read_trace(
        spec.path,
        spec.format,
        api_time_scale=spec.api_time_scale,
        session_gap=spec.session_gap_s,
        max_sessions=spec.max_sessions,
    )
    chosen = records[spec.skip :][: spec.requests]
    if not chosen:
        raise ConfigError(
            f"workload.skip is {spec.skip}, but {spec.path} holds {len(records)} requests."
        )
    return lambda target: _replay(spec, chosen, len(records), target)


def arrival_times(count: int, arrivals: str, rate: float, seed: int) -> list[float]:
    """Seconds at which ``count`` requests arrive: all at 0, or a Poisson process of ``rate`` /s."""
    if arrivals == "burst":
        return [0.0] * count
    gaps = np.random.default_rng(seed).exponential(1 / rate, count)
    return np.cumsum(gaps).tolist()


def _synthetic(spec: Synthetic, target: Target) -> Workload:
    longest = max(spec.lengths) + max(spec.suffixes) + spec.output_tokens
    if longest > target.max_context:
        raise ConfigError(
            f"A request of the workload takes {longest} tokens; the context is "
            f"{target.max_context}. Shorten the prefix, the suffix or the output."
        )
    times = arrival_times(spec.requests, spec.arrivals, spec.rate, spec.seed)
    requests, groups = [], {}
    for index, arrival in enumerate(times):
        which = index % len(spec.lengths)
        prefix = _distinct_text(f"{spec.seed}/prefix", which, spec.lengths[which], target)
        length = spec.suffixes[index % len(spec.suffixes)]
        suffix = _distinct_text(f"{spec.seed}/suffix", index, length, target)
        requests.append(
            Request(
                id=f"r{index}",
                prompt=np.concatenate([prefix, suffix]),
                max_new_tokens=spec.output_tokens,
                arrival=arrival,
                shared_tokens=len(prefix),
            )
        )
        groups[f"r{index}"] = f"prefix {which}"
    return Workload(tuple(requests), groups, {"kind": "synthetic"})


def _distinct_text(space: str, index: int, length: int, target: Target) -> np.ndarray:
    """Random tokens whose first one differs from that of all others in the space, as long as the
    vocabulary lasts: what requests share is then the prefix and not a token more."""
    text = synthetic_tokens(f"synthetic/{space}/{index}", 0, length, target.vocabulary)
    text[:1] = index % target.vocabulary
    return text


def _agents(spec: Agents, texts: list[agents.AgentText], target: Target) -> Workload:
    if target.tokenizer is None:
        raise ConfigError(
            "The agents workload is text, and this model has no tokenizer; choose another workload."
        )
    chats = [agents.tokenize(text, target.tokenizer) for text in texts]
    count = spec.requests or sum(len(text.questions) for text in texts)
    times = arrival_times(count, spec.arrivals, spec.rate, spec.seed)
    requests, groups, questions = [], {}, {}
    for index, arrival in enumerate(times):
        chat, text = chats[index % len(chats)], texts[index % len(chats)]
        which = index // len(chats) % len(text.questions)
        prompt = chat.prompts[which]
        total = len(prompt) + spec.output_tokens
        if total > target.max_context:
            raise ConfigError(
                f"Agent {chat.name} takes {total} tokens, prompt and output; the context is "
                f"{target.max_context}."
            )
        name = f"{chat.name}-{index // len(chats)}"
        requests.append(
            Request(
                id=name,
                prompt=prompt,
                max_new_tokens=spec.output_tokens,
                stop_tokens=chat.stop_tokens,
                arrival=arrival,
                shared_tokens=chat.shared_tokens,
            )
        )
        groups[name] = chat.name
        questions[name] = text.questions[which]
    facts = {"kind": "agents", "system_tokens": {c.name: c.shared_tokens for c in chats}}
    return Workload(tuple(requests), groups, facts, questions)


def _replay(spec: Trace, records: list[TraceRecord], total: int, target: Target) -> Workload:
    block_size = records[0].block_size
    requests, groups = [], {}
    clamped_prompts = clamped_outputs = 0
    output_scale = spec.output_scale or spec.length_scale
    time, previous = 0.0, records[0].arrival
    for record in records:
        gap = (record.arrival - previous) / spec.time_compression
        time += gap if spec.max_gap_s is None else min(gap, spec.max_gap_s)
        previous = record.arrival
        block_tokens = max(1, round(record.block_size * spec.length_scale))
        wanted = max(1, round(record.output_tokens * output_scale))
        output = min(wanted, target.max_context // 2)
        room = target.max_context - output
        length = scaled_length(record, block_tokens)
        prompt = prompt_tokens(record, target.vocabulary, block_tokens, limit=room)
        clamped_outputs += output < wanted
        clamped_prompts += room < length
        requests.append(
            Request(
                id=record.id,
                prompt=prompt,
                max_new_tokens=output,
                arrival=time,
                shared_tokens=min(record.shared_blocks * block_tokens, len(prompt)),
            )
        )
        groups[record.id] = record.blocks[0].space
    facts = {
        "kind": "trace",
        "trace_requests": total,
        "replayed_requests": len(requests),
        "length_scale": max(1, round(block_size * spec.length_scale)) / block_size,
        "prompts_cut_to_context": clamped_prompts,
        "outputs_cut_to_context": clamped_outputs,
        "max_context": target.max_context,
    }
    return Workload(tuple(requests), groups, facts)
