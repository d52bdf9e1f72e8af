"""The config of a table, checked: enters a config, leaves the units of work that it asks for.

A table is a list of cells, each measured with several variants (systems, or settings of one system)
and perhaps repeated. Fields of a config:

  name, title    of the table; ``name`` is that of the config file.
  size           ``full``, ``headline`` or ``smoke``: which of the file's tables it is.
  notes          sentences for the reader of the result: where our set-up differs.
  paper          names of the paper's tables, see ``experiments.paper_numbers``.
  platform       ``"gpu"``, or ``"any"`` for a table that can be made without one.
  memory_gib     device memory that the largest cell needs.
  model, dtype   as in ``experiments.serve``; a cell may name another model.
  engine         fields of ``EngineConfig`` for all cells and variants.
  variants       ``{"name": …, "system": …, FIELD: …}``: a system of ``kvgrain_jax.engine.SYSTEMS`` and
                 the fields of ``EngineConfig`` in which the variant differs. Where kernels are timed,
                 the name is that of an implementation.
  reference      the variant that speed-ups are against; empty for none.
  workload       fields that a cell has where it does not say otherwise.
  axes           fields of a cell that tell it from the others, columns of the rendered table.
  metrics        what the rendered table shows, see ``experiments.table_rows.METRICS``.
  derive         what is computed from several rows, see ``experiments.table_rows.DERIVED``.
  picture        kind of picture, see ``experiments.table_pictures.PICTURES``.
  must_agree     all variants must generate the same tokens (exact arithmetic only).
  cells          the cells. ``how`` says how one is measured, see ``HOW``; ``repetitions``,
                 ``variants`` (names of some of them), ``engine`` (fields for this cell), ``model``,
                 ``tp`` (devices that run the model together) and ``not_run`` (a reason why it is
                 listed only) may be given, and what the way of measuring needs.
  out            folder for the results.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments import paper_numbers
from experiments.report import plain
from kvgrain_jax.engine import EngineConfig, system_config
from kvgrain_jax.errors import ConfigError

FIELDS = (
    "name",
    "title",
    "size",
    "notes",
    "paper",
    "platform",
    "memory_gib",
    "model",
    "dtype",
    "engine",
    "variants",
    "reference",
    "workload",
    "axes",
    "metrics",
    "derive",
    "picture",
    "must_agree",
    "cells",
    "out",
)
# Ways of measuring a cell, as the rendered table explains them.
HOW = {
    "poisson": "requests arrive as a Poisson process faster than any system serves them",
    "burst": "as many requests as the batch has rows, all at once",
    "replay": "a recorded trace, replayed by its clock",
    "steps": "steady decode steps of a full batch; output tok/s is B / step, without any prefill",
    "paired": "steady steps with the dispatch and with the backend that it takes, turn about; the "
    "median difference of paired turns, with its 95% interval",
    "kernels": "one kernel in a jitted loop",
    "profile": "kernel times of decode steps, from a profiler trace",
}


@dataclasses.dataclass(frozen=True)
class Unit:
    """One measurement: a cell, a variant, a repetition.

    Attributes:
      cell: fields of the cell, those of the config's ``workload`` included.
      variant: name of the variant.
      repetition: 0, 1, …
      engine: configuration of the engine; None where none runs.
      model: source of the model.
      dtype: dtype of the weights.
      name: file name of its result, without suffix.
      fingerprint: digest of all that decides what is measured.
    """

    cell: Mapping[str, Any]
    variant: str
    repetition: int
    engine: EngineConfig | None
    model: str
    dtype: str
    name: str
    fingerprint: str


def units(config: Mapping[str, Any]) -> list[Unit]:
    """Checks a config and lists its measurements, cell by cell; cells that are not run have none.

    Raises:
      ConfigError: a field is unknown, missing or wrong.
    """
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(
            f"The fields of a table are {', '.join(FIELDS)}; check {', '.join(wrong)}."
        )
    for table in config["paper"]:
        paper_numbers.read(table)
    if config["reference"] and config["reference"] not in variants(config):
        raise ConfigError(f"config.reference is {config['reference']!r}; it is no variant.")
    found = []
    for cell in cells(config):
        if not cell.get("not_run"):
            for variant in variants_of(config, cell):
                found += [_unit(config, cell, variant, i) for i in range(cell["repetitions"])]
    if not found:
        reasons = {f"{cell['not_run']}" for cell in cells(config)}
        raise ConfigError(f"Nothing can be measured: {'; '.join(sorted(reasons))}.")
    names = [unit.name for unit in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"config.axes {config['axes']} do not tell these apart: {', '.join(repeated)}."
        )
    return found


def cells(config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells, with what ``workload`` gives to all of them.

    Raises:
      ConfigError: a cell lacks a key or is measured in a way that does not exist.
    """
    result = []
    for given in config["cells"]:
        cell = {"repetitions": 1, "tp": 1, **config["workload"], **given}
        cell.setdefault("model", config["model"])
        if "trace" in cell:
            _choose_trace(cell)
        if cell.get("how") not in HOW:
            raise ConfigError(
                f"A cell has how={cell.get('how')!r}; choose one of {', '.join(HOW)}."
            )
        if missing := [key for key in config["axes"] if key not in cell]:
            raise ConfigError(f"A cell lacks {', '.join(missing)}: {given}.")
        result.append(cell)
    return result


def _choose_trace(cell: dict[str, Any]) -> None:
    """Leaves of ``traces`` the one that the cell replays; without a file it is not run."""
    cell["traces"] = cell["traces"][cell["trace"]]
    if not cell["traces"]["path"]:
        cell["not_run"] = f"no file given: --config.workload.traces.{cell['trace']}.path=FILE"


def variants(config: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The variants by name, in their order."""
    found = {variant["name"]: dict(variant) for variant in config["variants"]}
    for fields in found.values():
        del fields["name"]
    return found


def variants_of(config: Mapping[str, Any], cell: Mapping[str, Any]) -> list[str]:
    """Names of the variants that a cell is measured with.

    Raises:
      ConfigError: the cell names one that the config does not have.
    """
    names = list(cell.get("variants") or variants(config))
    if unknown := sorted(set(names) - set(variants(config))):
        raise ConfigError(
            f"A cell names {', '.join(unknown)}; config.variants has no such variant."
        )
    return names


def check_device(config: Mapping[str, Any], work: Sequence[Unit]) -> None:
    """Checks that the device can hold the table's largest cell.

    Raises:
      ConfigError: there is no GPU and the table needs one, or JAX has too little of its memory.
    """
    device = jax.devices()[0]
    small = f"python -m experiments.tables --config=configs/granikv/{config['name']}.py:smoke"
    if config["platform"] == "gpu" and device.platform != "gpu" and work:
        raise ConfigError(
            f"{config['name']} at full size needs a GPU with {config['memory_gib']} GiB, and JAX sees "
            f"only {device.platform.upper()} devices here. Its small variant runs anywhere: {small}"
        )
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "gpu" and limit and limit < config["memory_gib"] * 2**30:
        raise ConfigError(
            f"{config['name']} needs {config['memory_gib']} GiB; JAX may use {limit / 2**30:.0f} GiB of "
            f"this {device.device_kind}. Raise XLA_PYTHON_CLIENT_MEM_FRACTION (0.95 leaves the rest "
            "to the driver, 0.85 with several devices also to their communication), take a GPU with "
            "more memory, or lower config.engine.pool_tokens."
        )


def _unit(
    config: Mapping[str, Any], cell: Mapping[str, Any], variant: str, repetition: int
) -> Unit:
    engine = None if cell["how"] == "kernels" else _engine(config, cell, variant)
    parts = [cell["how"], *(_word(cell[key]) for key in config["axes"]), variant, str(repetition)]
    measured = {
        "cell": {k: v for k, v in cell.items() if k not in ("repetitions", "variants")},
        "variant": variants(config)[variant],
        "engine": engine,
        "dtype": config["dtype"],
    }
    return Unit(
        cell=cell,
        variant=variant,
        repetition=repetition,
        engine=engine,
        model=cell["model"],
        dtype=config["dtype"],
        name="-".join(re.sub(r"[^\w.]+", "_", part) for part in parts),
        fingerprint=hashlib.sha256(json.dumps(plain(measured)).encode()).hexdigest()[:16],
    )


def _engine(config: Mapping[str, Any], cell: Mapping[str, Any], variant: str) -> EngineConfig:
    own = variants(config)[variant]
    name = own.pop("system", None)
    if name is None:
        raise ConfigError(f"config.variants: {variant!r} names no system.")
    fields = {**config["engine"], **cell.get("engine", {}), **own}
    if cell["how"] == "poisson":
        fields |= {"max_batch": cell["batch"], "batch_buckets": (cell["batch"],)}
    elif "batch" in cell and cell["batch"] < fields["max_batch"]:
        # One shape for all batch sizes, so that the prefill is compiled once.
        fields["batch_buckets"] = (cell["batch"], fields["max_batch"])
    return system_config(
        name, **{k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    )


def _word(value: Any) -> str:
    return "_".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
