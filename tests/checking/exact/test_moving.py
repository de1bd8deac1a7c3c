"""Operators that move exact numbers, beside NumPy's own indexing."""

import jax
import numpy as np
from jax import lax

from gshard.checking.exact.moving import OF_ANY


def test_windows_out_of_bounds_are_moved_into_the_array_on_every_device():
    """Without XLA: two of its releases disagree about starts before the first row."""
    x, u = np.arange(60).reshape(3, 5, 4), -np.ones((1, 2, 3), int)
    taken = jax.make_jaxpr(lambda x, a, b: lax.dynamic_slice(x, (a, b), (2, 3)))(x[0], 0, 0)
    written = jax.make_jaxpr(lambda x, u, a, b: lax.dynamic_update_slice(x, u, (a, b)))
    cut, put = taken.eqns[-1], written(x[0], u[0], 0, 0).eqns[-1]
    for a, b in (([-7, 1, 9], [2]), ([-7, 1, 9], [-1, 0, 5]), ([9], [-3])):
        starts = np.array(a, np.int32), np.array(b, np.int32)
        got, changed = OF_ANY["dynamic_slice"](cut, x, *starts), np.array(x)
        after = OF_ANY["dynamic_update_slice"](put, x, u, *starts)
        for d in range(3):
            first, second = (
                min(max(int(s[d % len(s)]), 0), n) for s, n in zip(starts, (3, 1), strict=True)
            )
            place = d, slice(first, first + 2), slice(second, second + 3)
            np.testing.assert_array_equal(got[d], x[place])
            changed[place] = -1
        np.testing.assert_array_equal(after, changed)
