"""Strictness of the whole suite: no silent broadcasting or dtype promotion, warnings are errors."""

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
