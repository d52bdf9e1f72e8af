"""Config sections with every field of the class they stand for.

A field that a config does not mention can then be set on the command line all the same, and
``result.json`` tells the whole configuration.
"""

import dataclasses
import types
import typing
from typing import Any

import jax.numpy as jnp
from ml_collections import ConfigDict, config_dict

from experiments.workload_specs import KINDS
from kvgrain_jax.engine import EngineConfig
from kvgrain_jax.errors import ConfigError


def engine_fields(**values: Any) -> ConfigDict:
    """The ``engine`` section: all fields of ``EngineConfig``, those given with their values."""
    values.setdefault("kv_dtype", jnp.dtype(EngineConfig.kv_dtype).name)
    return _section(EngineConfig, values)


def workload_fields(kind: str, **values: Any) -> ConfigDict:
    """The ``workload`` section of one kind, see ``experiments.workload_specs``."""
    section = _section(KINDS[kind], values)
    section.kind = kind
    return section


def _section(cls: type, values: dict[str, Any]) -> ConfigDict:
    hints = typing.get_type_hints(cls)
    section = ConfigDict()
    for field in dataclasses.fields(cls):
        value = values.pop(field.name, field.default)
        if value is dataclasses.MISSING:
            raise ConfigError(f"{cls.__name__} needs {field.name}.")
        if value is None:
            value = config_dict.placeholder(_plain_type(hints[field.name]))
        section[field.name] = value
    if values:
        raise ConfigError(f"{cls.__name__} has no field {', '.join(values)}.")
    return section


def _plain_type(hint: Any) -> type:
    """``T`` of ``T | None``."""
    members = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    (plain,) = (member for member in members if member is not types.NoneType)
    return plain
