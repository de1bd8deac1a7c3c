"""Programs that move rows: slices, joins, lookups, sorts, reshards."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard import replicate, shard, split
from tools.mutants.programs import array, given, wide


@wide(array(29, 3))
def _cut(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(x[5:23], 0, 8)  # here
    return y + 1


@wide(array(29, 3))
def _thinned(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(x[2:27:3], 0, 8)  # here
    return y + 1


@wide(array(29, 3))
def _row(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x[7:10]  # here
    return jnp.tanh(y)


@wide(array(13, 3))
def _padded(x: Any) -> Any:
    x = split(x * 2, 0, 4)
    y = lax.pad(x, 7.0, [(3, 2, 1), (0, 0, 0)])  # here
    return y + 1


@wide(array(13, 3))
def _reversed(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x[::-1]  # here
    return y + 1


@wide(array(13, 3), array(6, 3))
def _joined(x: Any, z: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(jnp.concatenate([x, z, x]), 0, 8)  # here
    return y + 1


@wide(array(16, 3))
def _rolled(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.roll(x, 3, 0)  # here
    return y + 1


@wide(array(13, 3))
def _repeated(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(jnp.tile(x, (3, 1)), 0, 8)  # here
    return y + 1


@wide(array(29, 3), array(7, dtype="int32"))
def _looked_up(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x[i * 4]  # here
    return y + 1


@wide(array(29, 3), array(7, dtype="int32"), array(7, 3))
def _added_at(x: Any, i: Any, u: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.at[i * 4].add(split(u, 0, 7))  # here
    return y + 1


@wide(array(29, 3), array(1, dtype="int32"))
def _window_at(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.dynamic_slice_in_dim(x, i[0] + 11, 16), 0, 8)  # here
    return y + 1


@wide(array(29, 3), array(1, dtype="int32"))
def _window_beyond(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.dynamic_slice_in_dim(x, i[0] + 40, 16), 0, 8)  # here
    return y + 1


@wide(array(29, 3), array(6, 3), array(1, dtype="int32"))
def _written_at(x: Any, u: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = lax.dynamic_update_slice(x, u, (i[0] + 12, 0))  # here
    return y + 1


@wide(array(32, 2), np.int32(11))
def _rotated(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.dynamic_slice_in_dim(x, i, 20, 0), 0, 8)  # here
    return y + 1


@wide(array(32, 2), np.int32(3))
def _shifted(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.dynamic_slice_in_dim(x, i, 29, 0), 0, 8)  # here
    return y + 1


@wide(array(32, 2), array(28, 2), np.int32(3))
def _rotated_in(x: Any, u: Any, i: Any) -> Any:
    x, u = split(x * 2, 0, 8), split(u * 2, 0, 8)
    y = split(lax.dynamic_update_slice_in_dim(x, u, i, 0), 0, 8)  # here
    return y + 1


@wide(array(16, 3), np.int32(3))
def _window_of_all(x: Any, i: Any) -> Any:
    x = replicate(x * 2)
    y = split(lax.dynamic_slice_in_dim(x, i, 13, 0), 0, 8)  # here
    return y + 1


@given(array(8 * 8192 - 5, dtype="int32"))
def _sorted_with(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y, z = lax.sort((x, split(jnp.arange(x.size), 0, 8)), num_keys=1)  # here
    return split(y, 0, 8) + 1, split(z, 0, 8) + 1


@given(array(8 * 4096 - 5, dtype="int32"))
def _sorted_integers(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(lax.sort(x), 0, 8)  # here
    return y + 1


@given(array(101))
def _sorted(x: Any) -> Any:
    x = split(x * 2, 0, 4)
    y = jnp.sort(x)  # here
    return y + 1


@given(array(2, 61) - 3)
def _best(x: Any) -> Any:
    x = split(x * 2, 1, 8)
    y, i = lax.top_k(x, 3)  # here
    return y + 1, i + 1


@given(array(6, 4, 5))
def _mixed(x: Any) -> Any:
    x = split(x * 2, 0, 4)
    y = split(x.reshape(8, 3, 5), 0, 4)  # here
    return y + 1


@given(array(16, 24))
def _exchanged(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = split(x, 1, 8)  # here
    return y + 1


@given(array(13, 10))
def _moved(x: Any) -> Any:
    x = shard(x * 2, np.arange(8).reshape(4, 2))
    y = shard(x, np.arange(6).reshape(2, 3))  # here
    return y + 1


@given(array(13))
def _counted(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.arange(13.0)  # here
    return x + y


@given(*(array(16, 24) for _ in range(11)))
def _stacked(*xs: Any) -> Any:
    xs = [split(x * n, n % 2, 8) for n, x in enumerate(xs, 1)]
    y = split(jnp.stack(xs), 0, 8)  # here
    y = split(jnp.tanh(y), 0, 8)
    return [split(x * 2, n % 2, 8) for n, x in enumerate(y)]  # here


@wide(array(16, 2), array(16, 2))
def _stencil(x: Any, z: Any) -> Any:
    def loss(u: Any) -> Any:
        q = jnp.pad(split(u, 0, 8), ((2, 2), (0, 0)), mode="edge")
        q = q[4:] * 3 - q[:-4] + 0.5 * q[2:-2]  # here
        return jnp.sum(q * z)

    return jax.grad(loss)(x * 2) + 1  # here


@wide(array(13, 2), array(13, 2))
def _padded_sum(x: Any, z: Any) -> Any:
    x, z = split(x * 2, 0, 8), split(z * 2, 0, 8)
    q = jnp.pad(x, ((2, 0), (0, 0))) - jnp.pad(x, ((0, 2), (0, 0))) - jnp.pad(z, ((1, 1), (0, 0)))
    p = jnp.pad(x, ((1, 0), (0, 0)), constant_values=2.0) + jnp.pad(z, ((0, 1), (0, 0)))
    y = q[2:] + q[:-2] * 3 + p[1:] * p[:-1]  # here
    return y + 1


@given(*(array(8, 24) for _ in range(5)))
def _stacked_behind(*xs: Any) -> Any:
    y = split(jnp.stack([split(x * n, 1, 8) for n, x in enumerate(xs, 1)], 1), 1, 8)  # here
    y = split(jnp.tanh(y), 1, 8)
    return [split(y[:, n], 1, 8) * 2 for n in range(5)]  # here


@wide(array(29, 2))
def _diffused(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.at[1:-1].add(x[2:] + x[:-2] - 2 * x[1:-1])  # here
    y = y.at[3:27:2].multiply(y[2:26:2] - y[4:28:2])  # here
    return y + 1


@given(array(13, 3), array(13, 3))
def _turned(x: Any, u: Any) -> Any:
    x = split(x * 2, 0, 8)
    rows = jnp.arange(13)[::-1]
    y = x[rows] + x.at[rows].set(u) + x.at[12 - 2 * jnp.arange(6)].add(1.5)  # here
    return y + 1


@wide(array(29, 3))
def _in_parts(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    a, b, c = jnp.split(x, [5, 18])  # here
    return split(a, 0, 8) + 1, split(b, 0, 8) * 2, jnp.concatenate([c, a])[3:] + 1


@given(array(2, 3, 24), array(4, 3, 3))
def _padded_and_convolved(x: Any, w: Any) -> Any:
    x = split(x * 2, 2, 8)
    around = ((0, 0), (0, 0), (1, 1))
    q, r = jnp.pad(x, around, constant_values=2), jnp.pad(x, around, mode="edge")
    y = lax.conv_general_dilated(q, w, (1,), [(0, 0)])  # here
    z = lax.conv_general_dilated(r, w, (1,), [(0, 0)])  # here
    return y + z


@given(array(24, 3), shows=["update-overlap"])
def _updated_by_number(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    after = (jnp.arange(24) + 1) % 24
    x = x.at[after].add(x)
    y = x.at[:12].multiply(3.0).at[6:18].multiply(2.0)  # here
    return y + 1


@given(array(16, 3), shows=["layer-met"])
def _slice_of_a_padded_tensor(x: Any) -> Any:
    """Rows of the padding, and those of the tensor before them."""
    x = split(x * 2, 0, 8)
    y = split(lax.pad(x, 7.0, [(0, 6, 0), (0, 0, 0)])[3:], 0, 8)  # here
    return y + 1
