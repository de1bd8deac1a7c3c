"""Programs of every operator with a rule of its own, drawn at random: sizes, parameters, shardings.

Sizes are small and uneven, devices come in any order, and some hold nothing. A family draws an
operator and its arguments; the lines of the family are those that a proof may name.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from gshard import shard
from tools.mutants.programs import Made, Program

Draw = np.random.Generator
Family = Callable[[Draw], tuple[Callable[..., Any], list[np.ndarray]]]
_DEVICES = 8
_FAMILIES: dict[Family, int] = {}  # and how many programs are drawn of each


def _drawn(count: int) -> Callable[[Family], Family]:
    def add(family: Family) -> Family:
        _FAMILIES[family] = count
        return family

    return add


def _array(rng: Draw, *shape: int, dtype: str = "float32") -> np.ndarray:
    if dtype == "bool":
        return rng.random(shape) < 0.5
    if dtype.startswith("int"):
        return rng.integers(-9, 10, shape).astype(dtype)
    x = rng.normal(size=shape)
    return (x + 1j * rng.normal(size=shape) if dtype == "complex64" else x).astype(dtype)


def _sizes(rng: Draw, rank: int) -> list[int]:
    return [int(n) for n in rng.choice([2, 3, 5, 7, 8, 12, 13, 16, 21], rank)]


def assignment(rng: Draw, rank: int) -> np.ndarray | None:
    """Tile counts for some dims, on devices in any order, or in their own; or nothing at all."""
    if rank == 0 or rng.random() < 0.15:
        return None
    tiles, left = [1] * rank, _DEVICES
    for dim in rng.permutation(rank)[: rng.integers(1, 3)]:
        tiles[dim] = int(rng.choice([n for n in (2, 3, 4, 8) if n <= left] or [1]))
        left //= tiles[dim]
    devices = rng.permutation(_DEVICES) if rng.random() < 0.5 else np.arange(_DEVICES)
    return devices[: math.prod(tiles)].reshape(tiles)


def _marked(rng: Draw, values: Any) -> Callable[[Any], Any]:
    """A function that shards arrays of these shapes."""
    found = [assignment(rng, len(x.shape)) for x in jax.tree.leaves(values)]

    def mark(xs: Any) -> Any:
        leaves, tree = jax.tree.flatten(xs)
        pairs = zip(leaves, found, strict=True)
        return tree.unflatten([x if a is None else shard(x, a) for x, a in pairs])

    return mark


def _made(family: Family, number: int) -> Made:
    op, arguments = family(rng := np.random.default_rng([number, *family.__name__.encode()]))
    before, after = _marked(rng, arguments), _marked(rng, jax.eval_shape(op, *arguments))

    def program(*xs: Any) -> Any:
        made = op(*before([x | False if x.dtype == bool else x * 1 for x in xs]))
        return jax.tree.map(lambda y: y ^ True if y.dtype == bool else y + 1, after(made))

    return program, arguments, {}


def drawn() -> Iterator[Program]:
    """The programs of all families."""
    for family, count in _FAMILIES.items():
        text, first = inspect.getsourcelines(family)
        lines = range(first, first + len(text))
        for number in range(count):
            make = functools.partial(_made, family, number)
            yield Program(f"drawn{family.__name__} {number}", make, __file__, lines)


# ------------------------------------------------------------------------ families


@_drawn(16)
def _convolution(rng: Draw) -> Any:
    dims = int(rng.integers(1, 3))
    groups, batches = ((1, 1), (1, 1), (2, 1), (1, 2))[rng.integers(4)]
    channels, features, batch = 2 * groups, 4, 4 if batches == 2 else int(rng.integers(1, 5))
    kernel = [int(n) for n in rng.integers(1, 6, dims)]
    windows: dict[str, Any] = {
        "window_strides": rng.integers(1, 4, dims).tolist(),
        "padding": [tuple(ends) for ends in rng.integers(0, 4, (dims, 2)).tolist()],
        "lhs_dilation": rng.choice([1, 1, 2, 3], dims).tolist(),
        "rhs_dilation": rng.choice([1, 1, 2, 3], dims).tolist(),
        "feature_group_count": groups,
        "batch_group_count": batches,
    }
    sizes = [int(n) for n in rng.integers(13, 31, dims)]

    def op(x: Any, w: Any) -> Any:
        return lax.conv_general_dilated(x, w, **windows)

    x, w = (batch, channels, *sizes), (features, channels // groups, *kernel)
    return op, [_array(rng, *x), _array(rng, *w)]


@_drawn(16)
def _window(rng: Draw) -> Any:
    dims = int(rng.integers(1, 3))
    sizes = [int(n) for n in rng.integers(9, 31, dims)]
    taps, steps = rng.integers(1, 6, dims).tolist(), rng.integers(1, 4, dims).tolist()
    pads = [tuple(ends) for ends in rng.integers(0, 3, (dims, 2)).tolist()]
    holes = rng.choice([1, 1, 2], dims).tolist()
    kind = int(rng.integers(5))

    def pooled(x: Any) -> Any:
        if kind == 0:
            return lax.reduce_window(x, -jnp.inf, lax.max, taps, steps, pads, None, holes)
        if kind == 1:
            return lax.reduce_window(x, 0.0, lax.add, taps, steps, pads, holes, None)
        if kind == 2:
            return lax.reduce_window(x, 1.0, lax.mul, taps, steps, pads)
        return lax.reduce_window(x, -jnp.inf, lax.max, taps, steps, pads)

    def op(x: Any) -> Any:
        return jax.grad(lambda x: jnp.sum(jnp.sin(pooled(x))))(x) if kind > 2 else pooled(x)

    return op, [_array(rng, *sizes) - 3]


@_drawn(24)
def _reduction(rng: Draw) -> Any:
    rank = int(rng.integers(1, 4))
    axes = tuple(int(d) for d in rng.permutation(rank)[: rng.integers(1, rank + 1)])
    dtype = str(rng.choice(["float32", "int32", "bfloat16", "complex64", "bool"]))
    kinds = {
        "bool": (jnp.any, jnp.all), "complex64": (jnp.sum, jnp.prod, jnp.max),
        "int32": (jnp.sum, jnp.max, jnp.min, jnp.argmax, jnp.argmin, jnp.bitwise_or.reduce),
    }.get(dtype, (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.argmax, jnp.argmin))  # fmt: skip
    kind = kinds[rng.integers(len(kinds))]
    chosen = axes if kind in (jnp.sum, jnp.prod, jnp.max, jnp.min, jnp.any, jnp.all) else axes[0]
    offset = rng.choice([-7, 0, 7])
    x = _array(rng, *_sizes(rng, rank), dtype=dtype)
    x = x if dtype == "bool" else (x + offset).astype(dtype)
    return lambda x: kind(x, axis=chosen), [x]


@_drawn(12)
def _cumulative(rng: Draw) -> Any:
    kinds = (lax.cumsum, lax.cumprod, lax.cummax, lax.cummin)
    kind, rank, turned = kinds[rng.integers(4)], int(rng.integers(1, 3)), bool(rng.integers(2))
    axis = int(rng.integers(rank))
    return lambda x: kind(x, axis, reverse=turned), [_array(rng, *_sizes(rng, rank))]


@_drawn(40)
def _rows(rng: Draw) -> Any:
    """Slices, pads, joins and turns of rows, some on top of each other."""
    steps = [int(n) for n in rng.integers(0, 8, rng.integers(1, 4))]
    seeds = [[int(n) for n in rng.integers(0, 1000, 4)] for _ in steps]
    axis = int(rng.integers(2))

    def one(x: Any, kind: int, seed: list[int]) -> Any:
        n, (a, b, c, d) = x.shape[axis], seed
        if kind == 0:
            start, stop = a % max(n // 2, 1), n - b % max(n // 3, 1)
            return lax.slice_in_dim(x, start, max(stop, start + 1), 1 + c % 3, axis)
        if kind == 1:
            pads = [(0, 0, 0)] * 2
            pads[axis] = (a % 7 - 2, b % 7 - 2, c % 3) if n > 4 else (a % 4, b % 4, c % 3)
            return lax.pad(x, jnp.float32(d % 3), pads)
        if kind == 2:
            return lax.rev(x, (axis,))
        if kind == 3:
            return jnp.concatenate([x, lax.slice_in_dim(x, 0, 1 + a % n, 1, axis), x * 2], axis)
        if kind == 4:
            return jnp.roll(x, a % n, axis)
        if kind == 5:
            return jnp.repeat(x, 2, axis) if a % 2 else jnp.tile(x, (2, 1) if axis == 0 else (1, 2))
        if kind == 6:
            return x.at[(slice(None),) * axis + (slice(a % n, None, 1 + b % 3),)].set(c)
        return x.at[(slice(None),) * axis + (slice(a % n, a % n + 1 + b % 4),)].add(1.5)

    def op(x: Any) -> Any:
        for kind, seed in zip(steps, seeds, strict=True):
            x = one(x, kind, seed)
        return x

    return op, [_array(rng, *(int(n) for n in rng.choice([7, 8, 13, 16, 29, 32], 2)))]


@_drawn(24)
def _lookup(rng: Draw) -> Any:
    x, count = _array(rng, *_sizes(rng, 3)), int(rng.choice([1, 3, 8, 13]))
    kind, most = int(rng.integers(7)), max(x.shape)
    i = rng.integers(-most, 2 * most, count).astype(np.int32)
    j = rng.integers(0, most, (count, 2)).astype(np.int32)
    mode = str(rng.choice(["clip", "fill"]))

    def op(x: Any, i: Any, j: Any) -> Any:
        if kind == 0:
            return x.at[i].get(mode=mode)
        if kind == 1:
            return x.at[:, i].get(mode=mode)
        if kind == 2:
            return x.at[j[:, 0], :, j[:, 1]].get(mode=mode)
        if kind == 3:
            return x.at[j].get(mode=mode)
        if kind == 4:
            return jax.vmap(lambda s: lax.dynamic_slice(x, (s, 0, 0), (2, *x.shape[1:])))(i)
        if kind == 5:
            return jax.vmap(lambda s: lax.dynamic_slice(x, (0, s[0], s[1]), (2, 2, 1)))(j)
        return jnp.take_along_axis(x, jnp.argsort(x, 1), 1)

    return op, [x, i, j]


@_drawn(24)
def _scattered(rng: Draw) -> Any:
    x, count = _array(rng, *_sizes(rng, 2)), int(rng.choice([1, 3, 8, 13]))
    name = str(rng.choice(["add", "mul", "set", "max", "min"]))
    kind, most = int(rng.integers(4)), max(x.shape)
    unique = name == "set"
    i = rng.permutation(max(2 * most, count))[:count] if unique else rng.integers(-3, most, count)
    u = _array(rng, count, *x.shape)

    def op(x: Any, i: Any, u: Any) -> Any:
        if kind == 0:
            return getattr(x.at[i], name)(u[:, 0])
        if kind == 1:
            return getattr(x.at[:, i], name)(u[:, :, 0].T)
        if kind == 2:
            return getattr(x.at[i, i % 3], name)(u[:, 0, 0], unique_indices=unique)
        numbers = lax.ScatterDimensionNumbers((1, 2), (), (0,))
        return lax.scatter_add(x, i[:, None] % 3, u[:, :2], numbers, mode="clip")

    return op, [x, i.astype(np.int32), u]


@_drawn(20)
def _slice_at(rng: Draw) -> Any:
    sizes = [int(n) for n in rng.choice([8, 13, 16, 29, 32], 2)]
    parts = [int(rng.integers(1, n + 1)) for n in sizes]
    starts = np.asarray([rng.integers(-4, n + 4) for n in sizes], np.int32)
    update = bool(rng.integers(2))

    def op(x: Any, u: Any, i: Any) -> Any:
        at = i[0], i[1]
        return lax.dynamic_update_slice(x, u, at) if update else lax.dynamic_slice(x, at, parts)

    return op, [_array(rng, *sizes), _array(rng, *parts), starts]


@_drawn(16)
def _order(rng: Draw) -> Any:
    rank = int(rng.integers(1, 3))
    dtype = str(rng.choice(["float32", "int32", "bfloat16"]))
    sizes = [*_sizes(rng, rank - 1), int(rng.choice([13, 61, 101, 400, 784, 1500]))]
    kind, stable = int(rng.integers(5)), bool(rng.integers(2))
    x = _array(rng, *sizes, dtype=dtype)

    def op(x: Any) -> Any:
        if kind == 0:
            return lax.sort(x, dimension=-1, is_stable=stable)
        if kind == 1:
            rows = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
            return lax.sort((x, rows), dimension=-1, num_keys=1, is_stable=stable)
        if kind == 2:
            return lax.top_k(x, 3)
        if kind == 3:
            return jnp.argsort(x, -1, descending=True)
        return jnp.median(x.astype(jnp.float32), -1)

    return op, [x]


@_drawn(24)
def _product(rng: Draw) -> Any:
    texts = (
        "ij,jk->ik", "ij,kj->ik", "bij,bjk->bik", "bij,jk->bik", "ij,ij->", "ij,jk->ki",
        "bhid,bhjd->bhij", "ij,i->j", "bij,bik->jk", "i,j->ij",
    )  # fmt: skip
    text = texts[rng.integers(len(texts))]
    dtype = str(rng.choice(["float32", "bfloat16", "int32", "complex64"], p=[0.6, 0.2, 0.1, 0.1]))
    names = sorted(set(text) - set(",->"))
    size = dict(zip(names, _sizes(rng, len(names)), strict=True))
    shapes = [[size[n] for n in part] for part in text.split("->")[0].split(",")]
    return lambda a, b: jnp.einsum(text, a, b), [_array(rng, *s, dtype=dtype) for s in shapes]


@_drawn(24)
def _layout(rng: Draw) -> Any:
    shapes = (
        ((6, 4, 5), (8, 3, 5)), ((6, 4, 5), (24, 5)), ((24, 5), (6, 4, 5)), ((16, 6), (4, 4, 6)),
        ((12, 10), (120,)), ((120,), (2, 3, 4, 5)), ((4, 6, 10), (8, 3, 2, 5)), ((7, 1, 5), (7, 5)),
        ((4, 12), (16, 3)), ((6, 6, 4), (4, 9, 4)), ((3, 13, 2), (39, 2)), ((2, 64), (128,)),
    )  # fmt: skip
    old, new = shapes[rng.integers(len(shapes))]
    kind, turned = int(rng.integers(4)), [int(d) for d in rng.permutation(len(old))]

    def op(x: Any) -> Any:
        if kind == 0:
            return lax.reshape(x, new, None)
        if kind == 1:
            return x.transpose(turned) * jnp.arange(x.shape[turned[-1]])
        if kind == 2:
            numbers = lax.broadcasted_iota(jnp.float32, (3, *x.shape), int(turned[0]) + 1)
            return jnp.broadcast_to(x[None], (3, *x.shape)) + numbers
        return lax.bitcast_convert_type(lax.bitcast_convert_type(x, jnp.int16) ^ 0, jnp.float32)

    return op, [_array(rng, *old)]


@_drawn(40)
def _moved(rng: Draw) -> Any:
    """One tensor under several shardings, one after the other."""
    rank = int(rng.integers(1, 4))
    found = [assignment(rng, rank) for _ in range(3)]

    def op(x: Any) -> Any:
        for each in found:
            x = x if each is None else shard(x, each)
            x = jnp.tanh(x)
        return x

    return op, [_array(rng, *_sizes(rng, rank))]


@_drawn(16)
def _unreduced(rng: Draw) -> Any:
    """Sums that may wait: products that are added, scaled, moved and converted before they end."""
    n, k, m = _sizes(rng, 3)
    split = assignment(rng, 2)
    kind = int(rng.integers(6))

    def op(a: Any, b: Any, c: Any) -> Any:
        a = a if split is None else shard(a, split)
        y = a @ b
        if kind == 0:
            y = y + (a + 1) @ b + c
        elif kind == 1:
            y = (y * 3 - c).T
        elif kind == 2:
            y = (y.astype(jnp.bfloat16) - (a * 2) @ b.astype(jnp.bfloat16)).astype(jnp.float32)
        elif kind == 3:
            y = jnp.concatenate([y[1:], (a * 2) @ b])
        elif kind == 4:
            y = jnp.pad(y, ((1, 2), (0, 0))) + jnp.pad((a - 1) @ b, ((2, 1), (0, 0)))
        else:
            y = jnp.where(c > 0, y, 0) + y.sum(0)
        return jnp.tanh(y)

    return op, [_array(rng, n, k), _array(rng, k, m), _array(rng, n, m)]


@_drawn(12)
def _loop(rng: Draw) -> Any:
    n, m, length = *_sizes(rng, 2), int(rng.integers(2, 5))
    turned, kind = bool(rng.integers(2)), int(rng.integers(4))

    def op(x: Any, w: Any) -> Any:
        if kind == 0:
            return lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, w, reverse=turned)
        if kind == 1:
            return lax.scan(lambda h, w: (h + x.T @ x, w.sum(0)), w[0], w, reverse=turned)
        if kind == 2:
            return lax.fori_loop(0, length, lambda i, h: jnp.tanh(h @ w[i]), x)
        return lax.cond(jnp.sum(x) > 0, lambda h: h @ w[0], lambda h: jnp.flip(h, 0) * 2, x)

    return op, [_array(rng, n, m), _array(rng, length, m, m)]


@_drawn(8)
def _layers(rng: Draw) -> Any:
    """A loss of two layers and attention, and its gradients."""
    n, m, h = _sizes(rng, 3)

    def op(x: Any, w: Any, v: Any) -> Any:
        def loss(w: Any, v: Any) -> Any:
            y = jax.nn.relu(x @ w) @ v
            a = jax.nn.softmax(y @ x.T, -1)
            return jnp.mean(jnp.square(a @ x))

        return jax.value_and_grad(loss, (0, 1))(w, v)

    return op, [_array(rng, n, m), _array(rng, m, h), _array(rng, h, m)]
