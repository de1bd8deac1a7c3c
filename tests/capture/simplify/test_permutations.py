"""What a permutation makes known is not computed; program in, program out."""

import jax
import jax.numpy as jnp
import numpy as np

from gshard.capture.simplify.permutations import fold_permutation_checks
from tests.capture.simplify.texts import after, primitives

KEYS, ROWS = np.zeros(6, np.float32), np.zeros((6, 2), np.float32)


def gradient_of_an_update(order_of):
    def fn(keys, rows):
        def put(rows):
            return jnp.zeros((6, 2)).at[order_of(keys)].set(rows)

        return jax.vjp(put, rows)[1](jnp.ones((6, 2)))[0]

    return fn


def test_the_gradient_of_an_update_by_argsort_scatters_nothing():
    fn = gradient_of_an_update(jnp.argsort)
    assert primitives(fn, KEYS, ROWS).count("scatter") == 1  # JAX numbers the updates
    assert "scatter" not in after(fold_permutation_checks, fn, KEYS, ROWS)


def test_indices_that_may_repeat_are_compared():
    fn = gradient_of_an_update(lambda keys: keys.astype(jnp.int32) % 3)
    assert "scatter" in after(fold_permutation_checks, fn, KEYS, ROWS)


def test_one_element_that_is_set_and_compared():
    """An update without dims has no rows: splines of interpax set their first slope like this."""

    def fn(keys):
        slopes = keys.astype(jnp.int32).at[0].set(1)
        return jnp.where(slopes == 0, slopes, keys.astype(jnp.int32))

    assert "scatter" in after(fold_permutation_checks, fn, KEYS)
