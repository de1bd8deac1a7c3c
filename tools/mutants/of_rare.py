"""Programs for one mistake each: what few programs do, two alike operators, groups that leave out
devices."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import mlir

import gshard
from gshard import replicate, shard, split
from tools.mutants.programs import array, given

_SIX = np.arange(6)  # of eight devices: the others have nothing


@given(array(16, 6), array(16, 6))
def _alike(a: Any, b: Any) -> Any:
    """Equal operators on equal operands, whose results are sharded differently."""
    a, b = replicate(a * 2), replicate(b * 2)
    y = replicate(jnp.tanh(a))
    z = split(jnp.tanh(b), 0, 8)  # here
    return y.sum() + 1, z + 1


@given(array(16, 6), array(16, 6, dtype="int32"))
def _same_bytes(x: Any, n: Any) -> Any:
    """Zeros of two types."""
    x, n = split(x * 2, 0, 8), split(n * 2, 0, 8)
    return jnp.maximum(x, 0.0), jnp.maximum(n, 0)  # here


@given(array(16, 5), np.array([3, 9, 14, 0], np.int32))
def _pairs_of_odd_columns(x: Any, i: Any) -> Any:
    x = split((x * 2).astype(jnp.bfloat16), 0, 8)
    y = x[replicate(i)]  # here
    return y + 1


@given(array(16, 4, 5), array(2, 3, 4))
def _batch_groups(x: Any, w: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = lax.conv_general_dilated(x, jnp.tile(w, (4, 1, 1)).transpose(0, 2, 1)[:, :, :3],
                                 (1,), "SAME", batch_group_count=8)  # fmt: skip  # here
    return y + 1


@given(array(16, 3), np.array([2, 13, 7, 0, 11], np.int32))
def _windows_looked_up(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jax.vmap(lambda n: lax.dynamic_slice(x, (n, 0), (3, 3)))(i)  # here
    return y + 1


@given(array(16, 3), np.array([2, 11, 7, 0, 5], np.int32))
def _parts_of_windows(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 2)
    y = jax.vmap(lambda n: lax.dynamic_slice(x, (n, 0), (4, 3)))(i)  # here
    return shard(y, np.arange(2).reshape(1, 2, 1)) + 1


@given(array(6, 4, 6, 4))
def _mixed_twice(x: Any) -> Any:
    x = shard(x * 2, np.arange(4).reshape(2, 1, 2, 1))
    y = shard(x.reshape(4, 6, 4, 6), np.arange(4).reshape(2, 1, 2, 1))  # here
    return y + 1


@given(array(6, 3), array(10, 3))
def _padded_by_numbers(x: Any, y: Any) -> Any:
    x, y = split(x * 2, 0, 2), split(y * 2, 0, 2)
    z = lax.pad(x, 7.0, [(0, 10, 0), (0, 0, 0)]) + lax.pad(y, 7.0, [(6, 0, 0), (0, 0, 0)])  # here
    return z + 1


@given(array(16, 3), array(6, 3))
def _updated_twice(x: Any, u: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.at[2:8].add(u).at[5:11].add(u * 2)  # here
    z = x.at[2:8].mul(u).at[5:11].mul(u * 2)  # here
    return y + 1, z + 1


@given(array(6, 6), np.array([3, 0, 5, 1, 2, 2], np.int32))
def _one_of_each_row(x: Any, i: Any) -> Any:
    x = split(x * 2, 0, 2)
    y = x.at[jnp.arange(6) + 2, i].get(mode="clip")  # here
    return y + 1


@given(array(16, 3))
def _beyond(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.at[jnp.arange(5) + 13].get(mode="clip")  # here
    z = x.at[jnp.arange(5) + 13].get(mode="fill", fill_value=3.0)  # here
    return y + 1, z + 1


@given(array(32, 3))
def _slices_of_slices(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.concatenate([x[::2], x[1::2]])[5:27:3]  # here
    return split(y, 0, 8) + 1


@given(array(4, 8, 6))
def _turned_back(x: Any) -> Any:
    x = split(x * 2, 1, 8)
    t = replicate(jnp.transpose(x, (1, 2, 0)))
    y = replicate(x)  # here
    return t.sum(0) + 1, y + 1


@given(array(4, 16, 6))
def _rows_again(x: Any) -> Any:
    x = split(x * 2, 1, 8)
    a = x[:, 1:] - x[:, :-1]
    t = jnp.transpose(jnp.tanh(x), (1, 2, 0))
    y = t[1:] - t[:-1]  # here
    z = jnp.concatenate([x, jnp.tanh(x)], 1)
    return a + 1, y + 1, z[:, 1:] - z[:, :-1]  # here


@given(array(2, 6, 3))
def _flattened(x: Any) -> Any:
    x = shard(x * 2, np.arange(8).reshape(2, 4, 1))
    y = x.reshape(12, 3)  # here
    return y + 1


@given(array(16, 5), array(16, 8), array(16, 7), array(16, 8))
def _scattered_together(a: Any, g: Any, b: Any, h: Any) -> Any:
    a, g, b, h = (split(x * 2, 0, 8) for x in (a, g, b, h))
    return split(a.T @ g, 1, 8), split(b.T @ h, 1, 8)  # here


@given(array(12, 600))
def _sorted_among_six(x: Any) -> Any:
    x = shard(x * 2, _SIX.reshape(3, 2))
    y = jnp.sort(x, 0)  # here
    z = lax.cumsum(x, 0)  # here
    return y + 1, z + 1


@given(array(16, 4, 4).astype("uint8"))
def _floats_of_bytes(x: Any) -> Any:
    x = split(x * 2, 2, 4)
    y = lax.bitcast_convert_type(x, jnp.float32)  # here
    return y


def _pad(x: Any, first: int, number: float = 0.0) -> Any:
    return lax.pad(x, number, [(first, 2 - first, 0), (0, 0, 0)])


@given(array(16, 3))
def _overlapping(x: Any) -> Any:
    x = jnp.tanh(split(x * 2, 0, 8))
    y = (_pad(x, 0) + _pad(x, 1))[1:17]  # here
    return y + 1


@given(array(16, 3))
def _subtracted(x: Any) -> Any:
    x = jnp.tanh(split(x * 2, 0, 8))
    y = (_pad(x, 0) - _pad(x, 2))[1:17]  # here
    return y + 1


@given(array(16, 3))
def _in_sevens(x: Any) -> Any:
    x = jnp.tanh(split(x * 2, 0, 8))
    y = (_pad(x, 0, 7.0) + _pad(x, 2, 7.0))[1:17]  # here
    return y + 1


@given(array(16, 30, dtype="int32"), array(16, 30, dtype="int32"))
def _divided_sums(x: Any, z: Any) -> Any:
    x, z = split(x * 2, 0, 8), split(z * 2, 0, 8)
    y = lax.div(jnp.sum(x, 0), jnp.int32(3)) + lax.div(jnp.sum(z, 0), jnp.int32(5))  # here
    return y + 1


@given(array(24, 6), array(6), shows=["rowmap-update-computed"])
def _applied_to_rows(x: Any, w: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = x.at[2:5].apply(jnp.tanh)  # here
    return y + w


@given(array(24, 8), shows=["map-narrow"])
def _rows_of_columns(x: Any) -> Any:
    x = split(x * 2, 0, 8)
    y = jnp.pad(x[1:, 2:6:2], ((0, 1), (1, 0)))  # here
    return y + 1


@given(array(4, 16, 3), shows=["map-runs"])
def _fields_of_a_stack(x: Any) -> Any:
    """Two of the fields go each way: they are fetched side by side."""
    x = split(x * 2, 1, 8)
    fields = [jnp.roll(x[q : q + 1], (1, -1)[q % 2], 1) for q in range(4)]
    y = jnp.concatenate(fields)  # here
    return y + 1


@given(array(16, 6), array(16, 6, dtype="int32"), shows=["devices-zeros-key"])
def _row_of_each_type(x: Any, n: Any) -> Any:
    x, n = split(x * 2, 0, 8), split(n * 2, 0, 8)
    return x[5:6] * 2, n[5:6] * 2  # here


@given(array(16, 6), array(6, 8), array(16, 6), array(6, 8), shows=["choose-key-targets"])
def _products_apart(a: Any, v: Any, b: Any, w: Any) -> Any:
    """Equal products of equal shardings, one by rows and the other by columns."""
    a, b, v, w = split(a * 2, 0, 8), split(b * 2, 0, 8), replicate(v * 2), replicate(w * 2)
    return split(a @ v, 0, 8) + 1, split(b @ w, 1, 8) + 1  # here


@given(array(1600, 2), shows=["rows-scatter-when"], devices=16)
def _windows_of_one_tile(x: Any) -> Any:
    """One tile has the rows of more windows than there may be rounds, with rows between them."""
    x = split(x * 2, 0, 16)
    y = lax.reduce_window(x, -np.inf, lax.max, (2, 1), (3, 1), [(0, -1552), (0, 0)])  # here
    return split(y, 0, 16) + 1


@given(array(16, 40), shows=["available-reversed"])
def _reversed_again(x: Any) -> Any:
    """Rows are reversed where columns are split, while the operand is known by rows, too."""
    a = split(jnp.tanh(x * 2), 0, 8)
    y = split(jnp.flip(split(a, 1, 8), (0,)), 1, 8)
    z = split(y, 0, 8)  # here
    return a + 1, y + 1, z + 1


@given(array(16, 40), shows=["again-concatenated"])
def _concatenated_copies(x: Any) -> Any:
    """Rows of copies that were concatenated need not be sent, but are others there."""
    a, b = replicate(jnp.tanh(x * 2)), replicate(jnp.sin(x * 3))
    z = jnp.tanh(split(jnp.concatenate([a, b], 0), 0, 8))
    return z + 1, z[1:] - z[:-1]  # here


@given(array(12, 2), array(12), shows=["sharding-compatible"])
def _of_six_and_of_eight(x: Any, w: Any) -> Any:
    """Rows are split over six devices, and columns over all."""
    a, b = shard(x * 2, _SIX.reshape(3, 2))[:, 0], split(w * 2, 0, 2)
    y = jnp.outer(a, b)  # here
    return y + 1, y.sum(0) + 1, y.sum(1) + 1  # here


@given(array(8, 4, 6), shows=["unreduced-reduced-dim"])
def _mixed_while_unreduced(x: Any) -> Any:
    x = shard(x * 2, np.arange(8).reshape(2, 4, 1))
    y = x.sum(0).reshape(6, 4)  # here
    return y.sum(1) + 1


@given(array(16, 6), array(16, 6), shows=["available-inner"])
def _moved_in_a_loop(x: Any, w: Any) -> Any:
    """What is moved in a loop is not there after it."""
    w = split(jnp.tanh(w * 2), 0, 8)
    y = lax.fori_loop(0, 3, lambda i, c: c + split(w, 1, 2) * i, split(x * 2, 1, 2))
    return y + 1, split(w, 1, 2) + 1  # here


def _for_sixteen() -> None:
    gshard.prove(_again_for_eight, array(16, 6), devices=16)


@given(array(16, 6), shows=["sharding-key-devices"], before=_for_sixteen)
def _again_for_eight(x: Any) -> Any:
    x = replicate(x * 2)
    return split(jnp.tanh(x), 0, 8) + 1  # here


_center_p = Primitive("center")
_center_p.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))


def _by_wrong_rule() -> None:
    """A rule of the user's, which is mended after a first program."""
    center = mlir.lower_fun(lambda x: x - x.mean(1, keepdims=True), multiple_results=False)
    mlir.register_lowering(_center_p, center)
    gshard.register_rule(_center_p, "rows columns -> rows columns")
    gshard.jit(_by_mended_rule, devices=8).lower(array(3, 16))
    gshard.register_rule(_center_p, "rows before -> rows after")


@given(array(3, 16), shows=["choose-in-place-rule"], before=_by_wrong_rule)
def _by_mended_rule(x: Any) -> Any:
    x = split(jnp.tanh(x), 1, 8)
    y = _center_p.bind(x)  # here
    return split(y, 1, 8) + 1


_own_p = Primitive("own")
_own_p.def_abstract_eval(lambda x: ShapedArray(x.shape, x.dtype))
mlir.register_lowering(_own_p, mlir.lower_fun(lambda x: jnp.tanh(x) * 2, multiple_results=False))


@given(array(16, 6), shows=["sharding-key-manual"], strict=True)
def _without_a_rule_in_a_region(x: Any) -> Any:
    part = gshard.auto_to_manual_spmd_partition(split(x * 2, 0, 8))
    part = _own_p.bind(part)  # here
    return gshard.manual_to_auto_spmd_partition(part, np.arange(8).reshape(8, 1))


@given(array(16, 6), array(16, 6), shows=["sharding-balanced"])
def _copies_that_do_not_match(x: Any, y: Any) -> Any:
    """Three devices would hold the first tile of the product, and one the next."""
    x, y = shard(x * 2, [[0], [1]]), shard(y * 2, [[0], [3]])
    return replicate(jnp.einsum("ac,bc->ab", x, y)) + 1  # here


@given(array(64, 1), array(64, 1), shows=["again-other-split"])
def _recomputed_of_other_devices(x: Any, z: Any) -> Any:
    turned = np.arange(8)[::-1].reshape(8, 1)
    x, z = split(x * 2, 0, 8), shard(z * 2, turned)
    z = shard(jnp.broadcast_to(z, (64, 400)), turned)
    y = split(jnp.broadcast_to(x, (64, 400)) + z, 0, 8)
    return y[3:] + y[:-3]  # here


@given(array(8, 4, 2, 6), shows=["factors-compose-major"])
def _merged_while_unreduced(x: Any) -> Any:
    x = shard(x * 2, np.arange(8).reshape(2, 2, 2, 1))
    y = x.sum(0).reshape(8, 6)  # here
    return y.sum(1) + 1


@given(array(20, 5), shows=["exchange-idle"], devices=16)
def _from_five_to_ten(x: Any) -> Any:
    """Five devices have tiles of columns, ten of rows, and six have nothing."""
    x = shard(x * 2, np.arange(5).reshape(1, 5))
    return shard(x, np.arange(10).reshape(10, 1)) + 1  # here


@given(array(56, 3), shows=["rows-strays"])
def _every_second_row(x: Any) -> Any:
    """Some tiles have four of these rows, others three and garbage."""
    x = split(x * 2, 0, 8)
    return split(x[:47:2], 0, 8) + 1  # here


@given(array(15, 4, 5), shows=["layout-retile"])
def _factor_beside_mixed_dims(x: Any) -> Any:
    x = shard(x * 2, np.arange(8).reshape(2, 4, 1))
    y = shard(x.reshape(3, 5, 5, 4), np.arange(8).reshape(2, 1, 4, 1))  # here
    return y + 1
