"""What the GraniKV paper printed: enters the name of a table, leaves its rows.

The files ``configs/granikv/paper/tableNN.csv`` hold the numbers of Table NN as printed, one row for
each cell and system, with our names of the systems: ``uniform16`` is the paper's "SGLang default",
``cascade16`` its "SGLang-Cascade", ``kvgrain`` its "GraniKV". Columns name what they hold and its unit
(``tok_s``: output tokens per second; ``tpot_p50_ms``; ``ttft_p50_s``; lengths in tokens). All were
measured on A100-SXM4-40GB GPUs, most as means of three repetitions.
"""

import csv
import functools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from kvgrain_jax.errors import ConfigError

FOLDER = pathlib.Path(__file__).parents[1] / "configs" / "granikv" / "paper"


@functools.cache
def read(name: str) -> tuple[Mapping[str, Any], ...]:
    """Rows of a table, without the entries that the paper does not have.

    Args:
      name: such as ``"table09"``.

    Raises:
      ConfigError: there is no such table.
    """
    path = FOLDER / f"{name}.csv"
    if not path.is_file():
        known = sorted(file.stem for file in FOLDER.glob("*.csv"))
        raise ConfigError(f"There are no numbers of {name!r}; there are {', '.join(known)}.")
    with path.open(encoding="utf-8", newline="") as file:
        rows = csv.DictReader(file)
        return tuple({k: _value(text) for k, text in row.items() if text} for row in rows)


def values(
    tables: Sequence[str], keys: Sequence[str], cell: Mapping[str, Any], variant: str
) -> dict[str, Any]:
    """What the paper has for one cell and one system.

    Args:
      tables: names of tables; a later one adds to an earlier one.
      keys: fields of the cell that identify it.
      cell: values of these fields.
      variant: name of the system. A row of the paper that names none stands for all.

    Returns:
      Numbers by the names of the columns; empty where the paper has no such cell.
    """
    found: dict[str, Any] = {}
    for table in tables:
        for row in read(table):
            same_cell = all(row[key] == cell.get(key) for key in keys if key in row)
            if same_cell and row.get("variant", variant) == variant:
                found |= {k: v for k, v in row.items() if k not in keys and k != "variant"}
    return found


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
