"""Sessions of coding agents as kv-cache-tester records them (trace format ``kvct``).

What enters is the text of a file: one session as a JSON document, or one session a line. What
leaves are ``TraceRecord`` of all its requests, those of nested sub-agents included.

A session: ``id``, ``block_size``, ``hash_id_scope`` (``local``: ids mean nothing in another
session), ``tool_tokens`` and ``system_tokens`` (the head of the prompt, which sessions have in
common), ``requests``. A request: ``t`` (s after the start of the session), ``in``, ``out``,
``hash_ids`` (one for every full block) or ``hash_ranges`` (``[[first, count], …]``), and, not
always, ``api_time`` (s the service took) and ``think_time`` (s the client waited before). An entry
of type ``subagent`` has ``requests`` of its own, whose ``t`` counts from the ``t`` of the entry.
"""

import json
import pathlib
from collections.abc import Iterator
from typing import Any

from experiments.trace_records import (
    Blocks,
    TraceError,
    TraceRecord,
    block_ids,
    json_lines,
    runs_of,
    seconds,
    whole,
)


def read_sessions(
    path: pathlib.Path,
    text: str,
    *,
    api_time_scale: float = 1.0,
    session_gap: float = 0.0,
    max_sessions: int | None = None,
) -> Iterator[TraceRecord]:
    """Requests of all sessions of a file.

    The traces give no times between sessions, so session ``i`` starts at ``i * session_gap``. The
    blocks of the tool and system tokens get identities that all sessions have in common (and
    likewise all sub-agents of one type); every other block is known in its own session only. The
    tokens after the last full block are known to no other request.

    Args:
      path: for messages.
      text: content of the file.
      api_time_scale: 1 keeps the recorded times. Otherwise a request comes ``think_time`` plus this
        multiple of its predecessor's ``api_time`` after its predecessor: 0 is a service that takes
        no time. Entries without these times keep their recorded distance.
      session_gap: seconds between the starts of sessions.
      max_sessions: read so many sessions; None reads all.

    Raises:
      TraceError: a session or request is malformed.
    """
    seen: set[str] = set()
    for index, (where, session) in enumerate(_sessions(path, text)):
        if max_sessions is not None and index >= max_sessions:
            return
        name = session.get("id")
        if not isinstance(name, str) or name in seen:
            raise TraceError(f"{where}: the session's 'id' is {name!r}; a new name is expected.")
        seen.add(name)
        size = whole(session, "block_size", where, minimum=1)
        space = "kvct" if session.get("hash_id_scope") == "global" else f"kvct/{name}"
        reader = _SessionReader(space, size, api_time_scale)
        yield from reader.read(session, name, "agent", index * session_gap, where)


def _sessions(path: pathlib.Path, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    first = text.lstrip().split("\n", 1)[0]
    try:
        json.loads(first)
    except ValueError:
        # Not one session a line: one pretty-printed session, or a damaged file.
        try:
            document = json.loads(text)
        except ValueError as error:
            line = getattr(error, "lineno", 1)
            raise TraceError(f"{path}:{line}: not valid JSON ({error}).") from error
        if not isinstance(document, dict):
            raise TraceError(f"{path}:1: a session is a JSON object.") from None
        yield f"{path}:1", document
        return
    yield from json_lines(path, text)


class _SessionReader:
    """Reads the timelines of one session; knows which of its ids are common to all sessions."""

    def __init__(self, space: str, block_size: int, api_time_scale: float):
        self.space = space
        self.block_size = block_size
        self.api_time_scale = api_time_scale
        # Runs of local ids with the names that all sessions use for them, by kind of timeline.
        self.common: dict[str, list[tuple[Blocks, Blocks]]] = {}

    def read(
        self, timeline: dict[str, Any], name: str, kind: str, start: float, where: str
    ) -> Iterator[TraceRecord]:
        """Requests of a session or sub-agent that starts at ``start`` seconds."""
        entries = timeline.get("requests")
        if not isinstance(entries, list):
            raise TraceError(f"{where}: 'requests' is not a list.")
        head = sum(
            whole(timeline, key, where) if key in timeline else 0
            for key in ("tool_tokens", "system_tokens")
        )
        time, recorded, api_time = start, 0.0, None
        for index, entry in enumerate(entries):
            here = f"{where}, request {index}"
            if not isinstance(entry, dict):
                raise TraceError(f"{here}: a JSON object is expected.")
            at = seconds(entry, "t", here)
            if at < recorded:
                raise TraceError(f"{here}: 't' is {at}, before the request that precedes it.")
            gap = self._gap(entry, at - recorded, api_time, here)
            if entry.get("type") == "subagent":
                label = f"subagent {entry.get('subagent_type')}"
                yield from self.read(entry, f"{name}/{index}", label, time + gap, here)
                continue
            time, recorded = time + gap, at
            api_time = seconds(entry, "api_time", here) if "api_time" in entry else None
            yield self._record(entry, f"{name}/{index}", time, head, f"kvct-common/{kind}", here)

    def _gap(self, entry: dict[str, Any], gap: float, api_time: float | None, where: str) -> float:
        """Seconds from the preceding request to this entry."""
        if self.api_time_scale == 1.0 or api_time is None:
            return gap
        if "think_time" in entry:
            think = seconds(entry, "think_time", where)
        elif entry.get("type") == "subagent":
            think = max(0.0, gap - api_time)
        else:
            return gap
        return think + self.api_time_scale * api_time

    def _record(
        self, entry: dict[str, Any], name: str, time: float, head: int, common: str, where: str
    ) -> TraceRecord:
        length = whole(entry, "in", where, minimum=1)
        full, rest = divmod(length, self.block_size)
        runs = self._runs(entry, where)
        count = sum(run.length for run in runs)
        if count != full:
            raise TraceError(
                f"{where}: {count} block ids for {length} tokens; {full} blocks of "
                f"{self.block_size} tokens are needed."
            )
        # The first request of a kind settles the names: were a later one with another head given
        # them too, two different ids of this session would become one.
        if common not in self.common:
            self.common[common] = list(_head(runs, head // self.block_size, common))
        blocks = list(self._renamed(runs))
        shared = 0
        for run in blocks:
            if run.space != common or run.first != shared:
                break
            shared += run.length
        if rest:
            blocks.append(Blocks(f"kvct/{name}/tail", 0, 1))
        return TraceRecord(
            id=name,
            arrival=time,
            input_tokens=length,
            output_tokens=whole(entry, "out", where),
            block_size=self.block_size,
            blocks=tuple(blocks),
            shared_blocks=shared,
        )

    def _runs(self, entry: dict[str, Any], where: str) -> tuple[Blocks, ...]:
        if "hash_ranges" not in entry:
            return runs_of(block_ids(entry.get("hash_ids"), where), self.space)
        ranges = entry["hash_ranges"]
        if not isinstance(ranges, list):
            raise TraceError(f"{where}: 'hash_ranges' is not a list of [first, count].")
        runs = []
        for pair in ranges:
            if len(block_ids(pair, where, "hash_ranges")) != 2 or pair[1] < 1:
                raise TraceError(f"{where}: {pair!r} in 'hash_ranges' is not [first, count].")
            runs.append(Blocks(self.space, pair[0], pair[1]))
        return tuple(runs)

    def _renamed(self, runs: tuple[Blocks, ...]) -> Iterator[Blocks]:
        """The runs, with the ids that all sessions have in common under their common names."""
        names = [pair for pairs in self.common.values() for pair in pairs]
        for run in runs:
            start, end = run.first, run.first + run.length
            while start < end:
                yield (piece := _leading_piece(run.space, start, end, names))
                start += piece.length


def _head(runs: tuple[Blocks, ...], limit: int, name: str) -> Iterator[tuple[Blocks, Blocks]]:
    """The first ``limit`` blocks of a prompt, each run with its common name."""
    position = 0
    for run in runs:
        count = min(run.length, limit - position)
        if count <= 0:
            return
        yield run._replace(length=count), Blocks(name, position, count)
        position += count


def _leading_piece(space: str, start: int, end: int, names: list[tuple[Blocks, Blocks]]) -> Blocks:
    """The longest leading part of ``[start, end)`` that lies in one named run, or in none."""
    for local, common in names:
        if local.first <= start < local.first + local.length:
            offset = start - local.first
            return common._replace(
                first=common.first + offset, length=min(end - start, local.length - offset)
            )
    stop = min((local.first for local, _ in names if start < local.first < end), default=end)
    return Blocks(space, start, stop - start)
