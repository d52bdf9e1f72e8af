"""What the suites of the operations share; a suite is what every implementation of one shows.

A suite names its implementation. ``xla`` is the specification and is held against float64 NumPy;
every other implementation is held against ``xla``, on the same inputs upcast to float32. Without a
GPU the kernels run in Pallas's interpreter. The Mosaic interpreter takes seconds a case, so there
only the cases marked ``essential`` run; on a GPU all do.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.implementation import interpreted

# Absolute tolerance for values of size one: what the narrow type of the weights costs.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
HEAD_SHAPES = [  # (K, G)
    (1, 1),
    (2, 3),
    (1, 5),
    (2, 6),
    (1, 7),
    (1, 16),
    (8, 4),
    (32, 1),
]
HEAD_DIMS = [64, 80, 96, 112, 128, 256]


def draw(seed, shape, dtype, scale=1.0):
    """Standard normal values, times ``scale``, rounded to ``dtype``."""
    values = np.random.default_rng(seed).standard_normal(shape, np.float32) * np.float32(scale)
    return jnp.asarray(values).astype(dtype)


def wide(x):
    return np.asarray(x.astype(jnp.float32))


def close(actual, expected, dtype):
    """Output and log-sum-exp agree, the second as strictly as the first; both are float32."""
    for got, want in zip(actual, expected, strict=True):
        assert got.dtype == jnp.float32
        got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
        np.testing.assert_array_equal(np.isneginf(got), np.isneginf(want))
        got, want = (np.where(np.isneginf(x), 0.0, x) for x in (got, want))
        error = np.abs(got - want) / np.maximum(1.0, np.abs(want))
        assert error.max(initial=0.0) <= TOLERANCE[jnp.dtype(dtype).name]


def essential(test):
    """Mark a case that also runs in a slow interpreter."""
    test.essential = True
    return test


class Suite:
    """What every suite has: the implementation under test and how to run it here."""

    implementation = "xla"
    dtype = "float32"
    slow_interpreter = False

    @pytest.fixture(autouse=True)
    def _here(self, request):
        interpret = self.implementation != "xla" and jax.default_backend() != "gpu"
        if interpret and self.slow_interpreter and not hasattr(request.function, "essential"):
            pytest.skip("the interpreter is slow; this case runs on a GPU")
        with contextlib.ExitStack() as stack:
            stack.enter_context(jax.default_matmul_precision("float32"))
            if interpret:
                stack.enter_context(interpreted())
            yield

    def refuses(self, *, dtype, slots=None, row_positions=None) -> bool:
        """Whether the implementation refuses the case, by its name."""
        return False


def spoil(pool, visible, unused):
    """The pool with ``unused`` in every slot that no row sees."""
    hidden = np.ones(len(pool), bool)
    hidden[np.concatenate(visible).astype(int)] = False
    values = np.asarray(pool).copy()
    values[hidden] = unused
    return jnp.asarray(values)
