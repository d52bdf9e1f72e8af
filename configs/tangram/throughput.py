"""Figure 10: throughput and running batch by compression rate, and what each part of Tangram adds.

    python -m experiments.tangram --config=configs/tangram/throughput.py --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/throughput.py:qwen2.5-7b \\
        --config.profile.path=FILE
    python -m experiments.tangram --config=configs/tangram/throughput.py:smoke

FILE is a head profile, for Qwen3-4B a published one (see ``published_profiles.py``); where the model has
other heads its fractions are resampled, and the result says so. Variants are ``MODEL``, ``MODEL-headline``
(the whole cache, and all parts at 75%), ``MODEL-crowded`` and ``MODEL-long`` (98,304 tokens; eight
conversations, two questions each, room for two whole caches) for ``qwen3-4b`` and ``qwen2.5-7b``. The headline
cells of Qwen3-4B take 5.8 minutes on one H200, compilation included, those of Qwen2.5-7B without ``budgets`` 3.4;
the crowded ones with ``cached first``, their programs compiled before, run for 48 and 45 seconds. All crowded ones
take 5 minutes, all cells of a model 14, the long ones 4 (estimated, not measured).

Twelve conversations ask five questions each, in turn, over contexts of their own (as many as a conversation
of SCBench has in the mean); the pool holds four whole caches, and at 75% evicted those of 13 conversations to
their ends. ``crowded`` has sixteen. A conversation whose cache is dropped is computed again, as in vLLM.
``budgets`` has one page table for all heads and layers, ``groups`` one for each four heads, ``balanced`` also
the split table. ``order`` is in what order questions are taken: ``first come`` as in vLLM, or ``cached first``,
where a question whose cache is there goes before one that would drop it (``HeadEngineConfig.patience``).

Where this differs: random conversations in place of SCBench's, all of one length; budgets of equal bytes
(no margin), which the profile of this model calls for.
"""

from ml_collections import ConfigDict

from configs.tangram import base

# The order in which questions are taken: how many may go before one that came first.
ORDERS = {"first come": 0, "cached first": 64}


def get_config(variant: str = base.MODELS[0]) -> ConfigDict:
    title = "Throughput by compression rate (Figure 10)"
    config = base.serving("throughput", variant, title, "headline", "crowded", "long")
    config.measure = "throughput"
    config.workload = {
        **config.workload,
        "conversations": 12,
        "turns": 5,
        "question_tokens": 64,
        **_order("first come"),
    }
    config.axes = ("order", "system", "evicted")
    config.picture.y = ("requests_s", "rows_peak")
    parts = ("budgets", "groups", "balanced")
    full = _cell("full", 0)
    config.cells = (full, *(_cell(part, rate) for rate in (25, 50, 75) for part in parts))
    if variant.endswith("headline"):
        cached = [{**cell, **_order("cached first")} for cell in (full, _cell("balanced", 75))]
        config.cells = (full, *(_cell(part, 75) for part in parts), *cached)
        config.picture.x = "order"
    if variant.endswith("crowded"):
        config.title += ", 16 conversations"
        config.workload.update(conversations=16)
        config.cells = tuple(
            {**cell, **_order(order)}
            for order in ("cached first", "first come")
            for cell in (full, _cell("balanced", 75))
        )
        config.picture.x = "order"
    if variant.endswith("long"):
        config.memory_gib = 110
        config.max_context = config.engine.max_context = 99_328
        config.profile.window = 4096
        config.workload.update(
            context_tokens=98_304, full_rows=2, conversations=8, turns=2, output_tokens=256
        )
        config.cells = (full, _cell("balanced", 75))
        config.notes = config.notes[:2]
    if variant == "smoke":
        cells = (full, *(_cell(part, 75) for part in parts[1:]))
        base.shrink(config, cells, conversations=6, turns=2, question_tokens=4)
    return config


def _cell(system: str, evicted: int) -> dict:
    return {"system": system, "evicted": evicted}


def _order(name: str) -> dict:
    return {"order": name, "patience": ORDERS[name]}
