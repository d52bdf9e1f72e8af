"""The config of a Tangram serving experiment, checked: enters a config, leaves its units of work.

An experiment is a list of cells, each one system in one situation. Fields of a config:

  name, title    of the experiment; ``name`` is that of the config file.
  notes          sentences for the reader of the result: where our set-up differs.
  measure        what is measured in each cell, see ``experiments.tangram.MEASURES``.
  platform       ``"gpu"``, or ``"any"`` for an experiment that can be made without one.
  memory_gib     device memory that the largest cell needs.
  model, dtype   as in ``experiments.serve``.
  max_context    context of the model, where its weights are random: checkpoints of one shape differ
                 in it. 0 leaves it.
  profile        ``path`` of a head profile, ours or a published one, resampled where the model has
                 other heads; ``sinks`` and ``window``: tokens that every head keeps.
  engine         fields of ``HeadEngineConfig`` for all cells.
  workload       fields that a cell has where it does not say otherwise.
  axes           fields of a cell that tell it from the others, columns of the rendered table.
  cells          the cells; ``system`` is one of ``experiments.tangram_systems.SYSTEMS``, ``evicted`` the
                 share of the tokens that is dropped, in percent.
  picture        ``x`` and ``series``: fields of a cell; ``y``: metrics, a panel each; ``stack``: metrics
                 that are parts of one bar.
  out            folder for the results.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from experiments.report import plain
from experiments.table_spec import Unit
from experiments.tangram_systems import SYSTEMS
from kvgrain_jax.errors import ConfigError

FIELDS = (
    *("name", "title", "notes", "measure", "platform", "memory_gib", "model", "dtype"),
    *("max_context", "profile", "engine", "workload", "axes", "cells", "picture", "out"),
)


def units(config: Mapping[str, Any], measures: Sequence[str]) -> list[Unit]:
    """Checks a config and lists its measurements.

    Args:
      config: the config.
      measures: names of what can be measured.

    Raises:
      ConfigError: a field is unknown, missing or wrong.
    """
    if wrong := sorted(set(config) ^ set(FIELDS)):
        raise ConfigError(f"The fields are {', '.join(FIELDS)}; check {', '.join(wrong)}.")
    if config["measure"] not in measures:
        raise ConfigError(
            f"config.measure is {config['measure']!r}; choose one of {', '.join(measures)}."
        )
    found = [_unit(config, {**config["workload"], **cell}) for cell in config["cells"]]
    names = [unit.name for unit in found]
    if repeated := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(
            f"config.axes {config['axes']} do not tell these apart: {', '.join(repeated)}."
        )
    return found


def check_device(config: Mapping[str, Any]) -> None:
    """Checks that the device can run the largest cell.

    Raises:
      ConfigError: there is no GPU and the experiment needs one, or it has too little memory.
    """
    device = jax.devices()[0]
    if config["platform"] == "gpu" and device.platform != "gpu":
        raise ConfigError(
            f"{config['name']} at full size needs a GPU with {config['memory_gib']} GiB, and JAX sees "
            f"only {device.platform.upper()} devices here. Its small variant runs anywhere: python -m "
            f"experiments.tangram --config=configs/tangram/{config['name']}.py:smoke"
        )
    limit = (device.memory_stats() or {}).get("bytes_limit")
    if device.platform == "gpu" and limit and limit < config["memory_gib"] * 2**30:
        raise ConfigError(
            f"{config['name']} needs {config['memory_gib']} GiB; JAX may use {limit / 2**30:.0f} GiB of "
            f"this {device.device_kind}. Raise XLA_PYTHON_CLIENT_MEM_FRACTION, or lower "
            "config.workload.full_rows."
        )


def _unit(config: Mapping[str, Any], cell: dict[str, Any]) -> Unit:
    if missing := [key for key in (*config["axes"], "system") if key not in cell]:
        raise ConfigError(f"A cell lacks {', '.join(missing)}: {cell}.")
    if cell["system"] not in SYSTEMS:
        raise ConfigError(
            f"There is no system {cell['system']!r}; choose one of {', '.join(SYSTEMS)}."
        )
    fields = ("measure", "model", "dtype", "max_context", "profile", "engine")
    measured = {"cell": cell, **{name: config[name] for name in fields}}
    words = "-".join(str(cell[key]) for key in config["axes"])
    return Unit(
        cell=cell,
        variant=cell["system"],
        repetition=0,
        engine=None,
        model=config["model"],
        dtype=config["dtype"],
        name=re.sub(r"[^\w.-]+", "_", words),
        fingerprint=hashlib.sha256(json.dumps(plain(measured)).encode()).hexdigest()[:16],
    )
