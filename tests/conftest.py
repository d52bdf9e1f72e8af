"""Strictness of the whole suite: no silent broadcasting or dtype promotion, warnings are errors."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

LONG_FIRST = ("sharding", "experiments", "engine", "budgets")


def pytest_collection_modifyitems(items):
    """Folders of long files first, so that no worker waits for another one at the end."""
    folders = {name: place for place, name in enumerate(LONG_FIRST)}
    items.sort(key=lambda item: folders.get(item.path.parent.name, len(folders)))
