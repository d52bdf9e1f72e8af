"""Recorded request traces, read into one neutral form.

What enters is a file; what leaves is a list of ``TraceRecord`` in order of arrival.

Formats, found by content or named by the caller:
  ``mooncake``  JSON lines, one request each: ``timestamp`` (ms), ``input_length``,
                ``output_length``, ``hash_ids`` (one for every 512 tokens). Published with Mooncake
                (FAST'25).
  ``azure``     CSV with the header ``TIMESTAMP,ContextTokens,GeneratedTokens``: arrival times and
                lengths, no sharing. AzurePublicDataset, published with Splitwise (ISCA'24).
  ``kvct``      sessions of coding agents as kv-cache-tester records them: see
                ``experiments.agent_sessions``.
  ``dialogues`` dialogues of a tool-using assistant as tau-bench records them: see
                ``experiments.dialogues``.
Any of them may be gzipped.
"""

import csv
import dataclasses
import datetime
import gzip
import io
import json
import math
import pathlib
import zlib
from collections.abc import Iterator

from experiments import agent_sessions, dialogues
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

FORMATS = ("mooncake", "azure", "kvct", "dialogues")
MOONCAKE_BLOCK = 512
AZURE_HEADER = ["TIMESTAMP", "ContextTokens", "GeneratedTokens"]
AZURE_BLOCK = 512


def read_trace(
    path: str | pathlib.Path,
    format: str | None = None,
    *,
    api_time_scale: float = 1.0,
    session_gap: float = 0.0,
    max_sessions: int | None = None,
) -> list[TraceRecord]:
    """Reads a trace.

    Args:
      path: the file.
      format: one of ``FORMATS``; None finds it by content.
      api_time_scale: ``kvct`` only, see ``experiments.agent_sessions.read_sessions``.
      session_gap: ``kvct`` and ``dialogues``: seconds between the starts of two of them.
      max_sessions: ``kvct`` only.

    Returns:
      The records, sorted by arrival, the first one at 0 s.

    Raises:
      TraceError: the file cannot be read, is empty, has no known format, or a line is malformed
        (the message names it).
    """
    path = pathlib.Path(path)
    if format is not None and format not in FORMATS:
        raise TraceError(f"Unknown trace format {format!r}; the formats are {', '.join(FORMATS)}.")
    text = _read_text(path)
    format = format or _detect(path, text)
    if format == "azure":
        records = list(_read_azure(path, text))
    elif format == "mooncake":
        records = list(_read_mooncake(path, text))
    elif format == "dialogues":
        records = list(dialogues.read_dialogues(path, text, dialogue_gap=session_gap))
    else:
        records = list(
            agent_sessions.read_sessions(
                path,
                text,
                api_time_scale=api_time_scale,
                session_gap=session_gap,
                max_sessions=max_sessions,
            )
        )
    if not records:
        raise TraceError(f"{path} holds no request.")
    start = min(record.arrival for record in records)
    records = [dataclasses.replace(r, arrival=r.arrival - start) for r in records]
    return sorted(records, key=lambda record: record.arrival)


def _read_text(path: pathlib.Path) -> str:
    try:
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise TraceError(f"There is no trace file {path}.") from error
    except OSError as error:
        raise TraceError(f"The trace file {path} cannot be read: {error.strerror}.") from error
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise TraceError(f"{path} is damaged: it cannot be gunzipped ({error}).") from error
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise TraceError(f"{path}:{line}: not UTF-8 text.") from error
    if not text.strip():
        raise TraceError(f"The trace file {path} is empty.")
    return text


def _detect(path: pathlib.Path, text: str) -> str:
    first = text.lstrip().split("\n", 1)[0].strip()
    if first.split(",") == AZURE_HEADER:
        return "azure"
    for candidate in (first, text):
        try:
            data = json.loads(candidate)
        except ValueError:
            continue
        if isinstance(data, dict) and "requests" in data:
            return "kvct"
        if isinstance(data, dict) and ("hash_ids" in data or "input_length" in data):
            return "mooncake"
        if isinstance(data, list) and data and isinstance(data[0], dict) and "traj" in data[0]:
            return "dialogues"
    raise TraceError(
        f"{path}:1: no known trace format begins with {first[:60]!r}; the formats are "
        f"{', '.join(FORMATS)}."
    )


def _read_mooncake(path: pathlib.Path, text: str) -> Iterator[TraceRecord]:
    for index, (where, data) in enumerate(json_lines(path, text)):
        length = whole(data, "input_length", where, minimum=1)
        ids = block_ids(data.get("hash_ids"), where)
        needed = math.ceil(length / MOONCAKE_BLOCK)
        if len(ids) != needed:
            raise TraceError(
                f"{where}: {len(ids)} hash_ids for {length} tokens; {needed} blocks of "
                f"{MOONCAKE_BLOCK} tokens are needed."
            )
        yield TraceRecord(
            id=f"r{index}",
            arrival=seconds(data, "timestamp", where) / 1000,
            input_tokens=length,
            output_tokens=whole(data, "output_length", where),
            block_size=MOONCAKE_BLOCK,
            blocks=runs_of(ids, "mooncake"),
        )


def _read_azure(path: pathlib.Path, text: str) -> Iterator[TraceRecord]:
    rows = csv.reader(io.StringIO(text))
    header = next(rows)
    if [name.strip() for name in header] != AZURE_HEADER:
        raise TraceError(f"{path}:1: the header is not {','.join(AZURE_HEADER)}.")
    epoch = None
    for row in rows:
        if not row:
            continue
        where = f"{path}:{rows.line_num}"
        if len(row) != len(AZURE_HEADER):
            raise TraceError(f"{where}: {len(row)} fields; {len(AZURE_HEADER)} are expected.")
        try:
            time = datetime.datetime.fromisoformat(row[0].strip())
            context, generated = int(row[1]), int(row[2])
            epoch = epoch or time
            arrival = (time - epoch).total_seconds()
        except (ValueError, TypeError) as error:
            raise TraceError(f"{where}: {','.join(row)!r} cannot be read ({error}).") from error
        if context < 1 or generated < 0:
            raise TraceError(f"{where}: {context} context and {generated} generated tokens.")
        name = f"r{rows.line_num - 2}"
        yield TraceRecord(
            id=name,
            arrival=arrival,
            input_tokens=context,
            output_tokens=generated,
            block_size=AZURE_BLOCK,
            blocks=(Blocks(f"azure/{name}", 0, math.ceil(context / AZURE_BLOCK)),),
        )
