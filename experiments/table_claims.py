"""The GraniKV paper's claims: which result decides each, and how.

A claim enters with the rows of a ``result.json``; out come our figures and whether they confirm it. No
figure is written that is not in a result.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.table_rows import Row, mean

type Finding = tuple[str, bool]  # our figures in words; whether they confirm the claim


@dataclasses.dataclass(frozen=True)
class Claim:
    """One claim of the paper.

    Attributes:
      where: section or table.
      says: the claim.
      paper: its figures.
      config: the config that decides it.
      read: from the rows of its result to our figures and whether they confirm it; None where the
        rows that it needs were not measured.
      otherwise: how to read figures made under another condition, and which; they decide nothing.
      devices: how many it needs.
    """

    where: str
    says: str
    paper: str
    config: str
    read: Callable[["Rows"], Finding | None]
    otherwise: tuple[Callable[["Rows"], Finding | None], str] | None = None
    devices: int = 1


class Rows:
    """Rows of a result, to be looked up."""

    def __init__(self, rows: list[Row]):
        self.rows = rows

    def get(
        self, metric: str, variant: str = "kvgrain", how: str = "", **cell: Any
    ) -> float | None:
        """Our mean of a metric in the first row that fits; None where there is none."""
        for row in self.rows:
            fits = all(row["cell"].get(key) == value for key, value in cell.items())
            if fits and row["variant"] == variant and how in ("", row["how"]):
                return mean(row, metric)
        return None

    def all(self, metric: str) -> list[float]:
        """Our means of a metric in all rows that have it."""
        return [value for row in self.rows if (value := mean(row, metric)) is not None]


def at_least(bar: float, metric: str, form: str = "{:.2f}x", **where: Any):
    """Confirmed where our mean is ``bar`` or more."""

    def read(rows: Rows) -> Finding | None:
        value = rows.get(metric, **where)
        return None if value is None else (form.format(value), value >= bar)

    return read


def between(low: float, high: float, metric: str, form: str = "{:.2f}x", **where: Any):
    """Confirmed where our mean lies in a range."""

    def read(rows: Rows) -> Finding | None:
        value = rows.get(metric, **where)
        return None if value is None else (form.format(value), low <= value <= high)

    return read


def _over_cascade(rows: Rows) -> Finding | None:
    ratios = []
    for p in (4096, 8192, 16384):
        ours, cascade = (
            rows.get("tok_s", variant, "poisson", prefix_tokens=p, batch=256)
            for variant in ("kvgrain", "cascade16")
        )
        if ours is None or not cascade:
            return None
        ratios.append(ours / cascade)
    return " / ".join(f"{r:.2f}x" for r in ratios), min(ratios) >= 1.05


def _monotone(rows: Rows) -> Finding | None:
    speedups = [
        rows.get("speedup", "kvgrain", "poisson", prefix_tokens=p, batch=256)
        for p in (4096, 8192, 16384)
    ]
    if None in speedups:
        return None
    known = [s for s in speedups if s is not None]
    return " / ".join(f"{s:.2f}x" for s in known), known == sorted(known)


def _ttft(rows: Rows) -> Finding | None:
    ours, base = (
        rows.get("ttft_p50_s", v, "burst", prefix_tokens=8192, batch=256)
        for v in ("kvgrain", "uniform16")
    )
    if ours is None or base is None:
        return None
    return f"{ours:.2f} s against {base:.2f} s", ours <= 1.1 * base


def _spread(metric: str, limit: float):
    """Confirmed where the means of all variants of the system lie within ``limit`` of each other."""

    def read(rows: Rows) -> Finding | None:
        own = [r for r in rows.rows if r["variant"] != "cascade16" and r["how"] == "burst"]
        values = [value for row in own if (value := mean(row, metric)) is not None]
        if len(values) < len(own) or not values:
            return None
        spread = (max(values) - min(values)) / max(values)
        return f"{100 * spread:.1f}% between the settings", spread <= limit

    return read


def _layouts(rows: Rows) -> Finding | None:
    found = {v: rows.get("slowdown", v, storage="unique") for v in ("jax-triton", "mosaic")}
    known = {name: value for name, value in found.items() if value is not None}
    if not known:
        return None
    return ", ".join(f"{n} {v:.1f}x" for n, v in known.items()), max(known.values()) >= 15.6


def _memory_bound(rows: Rows) -> Finding | None:
    values = [
        rows.get("flop_per_byte", v, storage=s)
        for s in ("unique", "shared")
        for v in ("jax-triton", "mosaic")
    ]
    unique, shared = values[0] or values[1], values[2] or values[3]
    if unique is None or shared is None:
        return None
    return f"{unique:.2f} and {shared:.0f} FLOP/byte", shared > 100 * unique


def _collapse(rows: Rows) -> Finding | None:
    one, many = (rows.get("tok_s", classes=k) for k in (1, 64))
    ratio = rows.get("speedup", classes=64)
    if not one or many is None or ratio is None:
        return None
    return f"-{100 * (1 - many / one):.0f}%, {ratio:.2f}x", many < 0.25 * one and 0.9 < ratio < 1.1


def _fit(rows: Rows) -> Finding | None:
    ratios = sorted(
        (m_eff, ratio)
        for row in rows.rows
        if (m_eff := mean(row, "m_eff")) and (ratio := mean(row, "to_cascade"))
    )
    if not ratios:
        return None
    wins = [m for i, (m, _) in enumerate(ratios) if all(later < 1 for _, later in ratios[i:])]
    text = f"dense from M_eff {wins[0]:.0f} on" if wins else "dense nowhere ahead to the end"
    return text, bool(wins) and wins[0] > ratios[0][0]


def _overhead(rows: Rows) -> Finding | None:
    values = rows.all("overhead_bound_percent")
    return (f"{max(values):.2f}% of a step at most", max(values) < 0.2) if values else None


def _peak(rows: Rows) -> Finding | None:
    values = {b: rows.get("tok_s", "kvgrain", batch=b) for b in (256, 512, 1024)}
    known = {b: v for b, v in values.items() if v is not None}
    if len(known) < 3:
        return None
    text = ", ".join(f"{v:.0f} at B {b}" for b, v in known.items())
    return text, max(known.values()) <= 1.01 * known[256]


def _amdahl(rows: Rows) -> Finding | None:
    predicted, measured = (
        rows.get(metric, "kvgrain", prefix_tokens=16384, batch=256)
        for metric in ("speedup_predicted", "speedup")
    )
    if predicted is None or measured is None:
        return None
    gap = predicted / measured - 1
    return f"{predicted:.2f}x against {measured:.2f}x", abs(gap) <= 0.058


def _falls_with_tp(rows: Rows) -> Finding | None:
    where = {"model": "random:qwen2.5-14b"}
    two, four = (rows.get("speedup", "kvgrain", tp=tp, **where) for tp in (2, 4))
    if two is None or four is None:
        return None
    return f"{two:.2f}x / {four:.2f}x", four < two


HEADLINE: dict[str, Any] = {"how": "poisson", "batch": 256}


def _ladder(p: int, bar: float, says: str) -> Claim:
    read = at_least(bar, "speedup", prefix_tokens=p, **HEADLINE)
    return Claim("Table 3", says, f"{bar}x", "sharegpt_llama8b", read)


def _parallel(config: str, tp: int, bar: float, says: str) -> Claim:
    read, one = (at_least(bar, "speedup", prefix_tokens=16384, tp=n, **HEADLINE) for n in (tp, 1))
    return Claim("Table 3", says, f"{bar}x", config, read, (one, "one device"), devices=tp)


def _hetero(says: str, paper: str, read: Callable[[Rows], Finding | None]) -> Claim:
    return Claim("Table 21", says, paper, "hetero_prefix", read)


STEPS = "steady steps, no requests served"
SHORT: dict[str, Any] = {"prefix_tokens": 512, "batch": 256}
CLAIMS = (
    _ladder(16384, 2.16, "throughput over the default, Llama-3.1-8B, P 16K"),
    _ladder(8192, 1.71, "the same, P 8K"),
    _ladder(4096, 1.35, "the same, P 4K"),
    Claim(
        "§4.5",
        "the gain grows with P, 4K to 16K",
        "1.35x / 1.71x / 2.16x",
        "sharegpt_llama8b",
        _monotone,
    ),
    Claim(
        "§4.5",
        "over cascade on 16-token pages, P 4K to 16K",
        "1.11x / 1.09x / 1.05x",
        "sharegpt_llama8b",
        _over_cascade,
    ),
    Claim(
        "§4.5",
        "no regression at P 512, B 256",
        ">= 0.97x",
        "sharegpt_llama8b",
        at_least(0.97, "speedup", how="poisson", **SHORT),
        (at_least(0.97, "speedup", how="steps", **SHORT), STEPS),
    ),
    _parallel("sharegpt_qwen14b", 2, 1.98, "Qwen2.5-14B, TP 2, P 16K"),
    _parallel("sharegpt_qwen32b", 4, 1.57, "Qwen2.5-32B, TP 4, P 16K"),
    _hetero("four prefixes of 2K to 16K", "1.95x", at_least(1.95, "speedup", classes=4)),
    _hetero(
        "there, cascade is at parity with the default",
        "0.99x",
        between(0.9, 1.1, "speedup", variant="cascade16", classes=4),
    ),
    _hetero("eight prefixes of 1K to 16K", "1.82x", at_least(1.82, "speedup", classes=8)),
    Claim(
        "Table 20",
        "four prefixes of 8K",
        "1.36x",
        "multi_prefix",
        at_least(1.36, "speedup", classes=4),
    ),
    Claim("Table 20", "at k 64 every system collapses", "-92%, 0.97x", "multi_prefix", _collapse),
    Claim("Table 6", "TTFT at parity, P 8K, B 256", "6.64 s against 6.03 s", "grid_llama8b", _ttft),
    Claim("Table 5", "a contiguous layout, same kernel", "15.6x", "layout_microbench", _layouts),
    Claim(
        "Table 23",
        "it turns a memory-bound kernel into a compute-bound one",
        "3.99 and 936 FLOP/byte",
        "roofline",
        _memory_bound,
    ),
    Claim(
        "Table 16",
        "above a device's threshold dense wins, below it cascade",
        "dense from M_eff 1024 on",
        "dispatch_fit",
        _fit,
    ),
    Claim(
        "Table 15",
        "dense steps at P 8K, B 256",
        "100%",
        "dispatch_trace",
        at_least(98, "dense_percent", "{:.0f}%", prefix_tokens=8192, batch=256),
    ),
    Claim("Table 17", "the dispatch is free", "< 0.2% of a step", "dispatch_overhead", _overhead),
    Claim(
        "Table 18",
        "COLD page size does not matter",
        "0.2% between the settings",
        "page_size",
        _spread("tok_s", 0.02),
    ),
    Claim(
        "Table 24",
        "the HOT share does not matter",
        "1% between the settings",
        "hot_fraction",
        _spread("tok_s", 0.02),
    ),
    Claim(
        "Table 12",
        "throughput peaks at B 256",
        "2943 at B 256, 2960 at B 512, 2767 at B 1024",
        "concurrency",
        lambda rows: None,
        (_peak, STEPS),
    ),
    Claim(
        "Table 22",
        "Amdahl predicts the speed-up within 6%, P 16K",
        "2.29x against 2.16x",
        "amdahl",
        _amdahl,
    ),
    Claim(
        "Table 19",
        "the gain falls from TP 2 to TP 4, Qwen2.5-14B, P 8K",
        "1.39x / 1.18x",
        "tp_envelope",
        _falls_with_tp,
        devices=4,
    ),
)
