"""The cases of the kernel benchmark: shapes of real models, and the bar that each is held against."""

from collections.abc import Callable, Iterator

import numpy as np

from experiments.kernel_cases import (
    ARG_SPECS,
    LLAMA,
    QWEN_RANK,
    Case,
    append_case,
    prefix_case,
    suffix_case,
    whole_case,
)
from experiments.prefill_cases import chunk_case

EVEN = "suffix B256 S256"  # what rows of mixed lengths are held against


def cases() -> Iterator[tuple[str, Callable[[], Case]]]:
    """Names and makers of the cases; only those that are chosen are made."""
    everywhere = ("mosaic", "triton", "xla")
    for prefix, bar, peer in ((16384, 0.85, 189.0), (8192, 0.75, 103.0), (2048, 0.55, 43.0)):
        yield (
            f"dense prefix B256 P{prefix}",
            lambda p=prefix, b=bar, f=peer: prefix_case(
                f"dense prefix B256 P{p}",
                LLAMA,
                [(256, p)],
                implementations=everywhere if p == 8192 else ("mosaic", "triton"),
                bar=("matmul", b),
                peers={"flashinfer prefix": f},
            ),
        )
    yield (
        "four classes B256 P2K-16K",
        lambda: prefix_case(
            "four classes B256 P2K-16K",
            LLAMA,
            [(64, 2048), (64, 4096), (64, 8192), (64, 16384)],
            bar=("matmul", 0.6),
        ),
    )
    yield (
        "few heads B256 P8192",
        lambda: prefix_case(
            "few heads B256 P8192",
            QWEN_RANK,
            [(256, 8192)],
            bar=("matmul", 0.55),
            peers={"flashinfer prefix": 49.0},
        ),
    )
    for n_rows, bar, peers in ((32, 25.0, {"flashinfer prefix": 34.0}), (8, 16.0, {})):
        yield (
            f"cascade prefix B{n_rows} P8192",
            lambda n=n_rows, b=bar, f=peers: prefix_case(
                f"cascade prefix B{n} P8192",
                LLAMA,
                [(n, 8192)],
                rotate=4,
                implementations=("mosaic", "triton"),
                bar=("us", b),
                peers=f,
            ),
        )
    both = ("triton", "mosaic")
    yield (
        EVEN,
        lambda: suffix_case(
            EVEN,
            LLAMA,
            np.full(256, 256),
            implementations=(*both, "xla"),
            bar=("us", 80.0),
            peers={"flashinfer suffix": 95.0},
        ),
    )
    lengths = np.random.default_rng(1).integers(1, 512, 256)
    lengths = with_sum(lengths, 256 * 256)
    for ordered in (False, True):
        name = "suffix B256 S1-511" + (", longest first" if ordered else "")
        yield (
            name,
            lambda n=name, o=ordered: suffix_case(
                n, LLAMA, lengths, ordered=o, implementations=both, bar=(EVEN, 1.1)
            ),
        )
    for n_rows, page_size in ((8, 1), (32, 1), (64, 1), (8, 16), (32, 16), (64, 16), (256, 16)):
        name = f"suffix B{n_rows} S256 page {page_size}"
        yield (
            name,
            lambda n=name, b=n_rows, p=page_size: suffix_case(
                n, LLAMA, np.full(b, 256), page_size=p, implementations=both
            ),
        )
    for prefix, bar, peer in ((8192, 160.0, 977.0), (16384, 215.0, 1874.0)):
        yield (
            f"whole B256 P{prefix} S256",
            lambda p=prefix, b=bar, f=peer: whole_case(
                f"whole B256 P{p} S256",
                LLAMA,
                256,
                p,
                256,
                bar=("us", b),
                peers={"flashinfer paged": f},
            ),
        )
    yield "append B256", lambda: append_case("append B256", LLAMA, 256, 1 << 17)
    for earlier, new in ((4096, 4096), (28_672, 4096), (16_384, 512)):
        name = f"prefill {new} behind {earlier}"
        yield name, lambda m=name, e=earlier, n=new: chunk_case(m, LLAMA, e, n)
    for shape in dict.fromkeys(ARG_SPECS.values()):
        model = ", ".join(name for name, other in ARG_SPECS.items() if other == shape)
        yield (
            f"{model} dense B128 P4096",
            lambda m=model, s=shape: prefix_case(f"{m} dense B128 P4096", s, [(128, 4096)]),
        )
        yield (
            f"{model} suffix B128 S256",
            lambda m=model, s=shape: suffix_case(f"{m} suffix B128 S256", s, np.full(128, 256)),
        )
    yield "baseline uniform16 B256 P8192 S256", _uniform
    for shared in (True, False):
        yield f"baseline two layouts shared={shared}", lambda s=shared: _layout(s)


def with_sum(lengths: np.ndarray, total: int) -> np.ndarray:
    """Lengths in 1 to 511, some of them moved by one, so that they add up to ``total``."""
    step = 1 if lengths.sum() < total else -1
    while lengths.sum() != total:
        free = np.flatnonzero((lengths + step >= 1) & (lengths + step <= 511))
        lengths[free[: abs(int(total - lengths.sum()))]] += step
    return lengths


def _uniform() -> Case:
    from experiments.kernel_baseline_cases import uniform_case

    return uniform_case(
        "baseline uniform16 B256 P8192 S256",
        LLAMA,
        256,
        8192,
        256,
        bar=("us", 977.0 * 1.15),
        peers={"flashinfer paged": 977.0},
    )


def _layout(shared: bool) -> Case:
    from experiments.kernel_baseline_cases import layout_case

    return layout_case(f"baseline two layouts shared={shared}", LLAMA, 256, 8192, shared=shared)
