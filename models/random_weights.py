"""Random weights from a seed: a config enters, the weights leave, where the mesh wants them.

Every matrix is drawn by its own program, so that no float32 copy of the model is ever held, and
each device draws its own part. The values depend on seed and config, not on the mesh.
"""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, Sharding
from jaxtyping import Array, DTypeLike

from kvgrain_jax import sharding
from models.config import ModelConfig
from models.decoder import Params, abstract_params
from models.tensor_parallel import parallel_config, placement, replicate_kv_heads


def random_params(
    config: ModelConfig, dtype: DTypeLike, seed: int = 0, mesh: Mesh | None = None
) -> Params:
    """Draws weights that keep activations and logits near unit variance.

    Norms are one and biases zero. A matrix has variance ``1 / in``: the final norm gives features
    of unit mean square, so this also makes logits of variance about one, tied or not. The two
    matrices of a layer that add to the residual stream are smaller by ``sqrt(2 L)``, as many do.

    Args:
      config: the model.
      dtype: of the weights.
      seed: the same seed gives the same weights.
      mesh: where to draw them; the default device where None.

    Raises:
      ConfigError: the model cannot be cut for the mesh.
    """
    drawn = abstract_params(config, dtype)
    params = {}
    for index, (name, leaf) in enumerate(
        abstract_params(parallel_config(config, mesh), dtype).items()
    ):
        place = placement(name, leaf.shape, mesh)
        if name.endswith(("norm.weight", ".bias")):
            value = float(name.endswith("norm.weight"))
            params[name] = sharding.put(np.full(leaf.shape, value, leaf.dtype), place)
        else:
            shape = drawn[name].shape
            ends_branch = name.endswith((".output.weight", ".down.weight"))
            gain = (2 * config.layers) ** -0.5 if ends_branch else 1.0
            draw = _program(shape, leaf.dtype, leaf.shape[0] // shape[0], place)
            params[name] = draw(
                np.uint32(seed % 2**32), np.uint32(index), np.float32(gain / math.sqrt(shape[-1]))
            )
    return params


@functools.cache
def _program(
    shape: tuple[int, ...], dtype: jnp.dtype, copies: int, place: Sharding | None
) -> Callable[..., Array]:
    def draw(seed, index, scale):
        key = jax.random.fold_in(jax.random.key(seed), index)
        values = (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)
        return values if copies == 1 else replicate_kv_heads(values, copies)

    return jax.jit(draw, out_shardings=place)
