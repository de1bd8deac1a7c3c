"""Small programs for `python -m tools.ablation`: what a mechanism is for, and no benchmark has.

Each is a function of arrays that it splits over 8 devices itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import gshard

_D = 8
Case = tuple[str, Callable[..., Any], tuple[Any, ...], Any]


def _of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def cases() -> Iterator[Case]:
    """Names, functions, shapes and devices."""
    for name, fn, *shapes in (*_fields(), *_vectors(), *_sums()):
        yield name, fn, tuple(shapes), _D


def _fields() -> Iterator[tuple[Any, ...]]:
    field, images, kernels = _of(64, 64), _of(4, 64, 64, 8), _of(3, 3, 3, 8, 8)

    def solved(x: Any, a: Any) -> Any:
        def applied(v: Any) -> Any:
            near = sum(jnp.roll(v, k, d) for k in (1, -1) for d in (0, 1))
            return (4 + a) * v - near

        return jax.scipy.sparse.linalg.cg(applied, gshard.split(x, 1, _D), maxiter=10)[0]

    def by_index(x: Any) -> Any:
        at = jnp.arange(len(x))

        def step(u: Any, _: Any) -> Any:
            return u + 0.1 * (u[(at + 1) % len(u)] - 2 * u + u[(at - 1) % len(u)]), None

        return jnp.sum(lax.scan(step, gshard.split(x, 0, _D), length=10)[0] ** 2)

    def trained(kernels: Any, x: Any, mode: str) -> Any:
        x = gshard.split(x, 1, _D)
        for kernel in kernels:
            x = jnp.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)), mode=mode)
            names = ("NHWC", "HWIO", "NHWC")
            x = lax.conv_general_dilated(x, kernel, (1, 1), "VALID", dimension_numbers=names)
            x = jax.nn.relu(x)
        return jnp.mean(x**2)

    def pooled(x: Any) -> Any:
        size = (1, *x.shape[1:3], 1)
        return lax.reduce_window(gshard.split(x, 1, _D), 0.0, lax.add, size, size, "VALID")

    yield "conjugate gradients, columns split", solved, field, _of()
    yield "gradient of neighbours by index, in a scan", jax.grad(by_index), field
    for mode in ("edge", "wrap"):

        def gradient(kernels: Any, x: Any, mode: str = mode) -> Any:
            return jax.grad(trained)(kernels, x, mode)

        yield f"gradient of convolutions, padding {mode}", gradient, kernels, images
    yield "global pooling", pooled, images


def _vectors() -> Iterator[tuple[Any, ...]]:
    vector, table = _of(1 << 16), _of(512, 64)

    def window(x: Any, first: Any) -> Any:
        return gshard.split(lax.dynamic_slice(gshard.split(x, 0, _D), (first, 0), (500, 64)), 0, _D)

    def updated(x: Any, first: Any) -> Any:
        x = gshard.split(x, 0, _D)
        return lax.dynamic_update_slice(x, gshard.split(x[:500] * 2, 0, _D), (first, 0))

    def reordered(x: Any) -> Any:
        order = (0, 4, 1, 5, 2, 6, 3, 7)
        rows = [gshard.split(x, 0, 4)[i : i + 1] for i in order]
        return gshard.split(jnp.concatenate(rows), 0, 4)

    yield "sort of a vector", lambda x: jnp.sort(gshard.split(x, 0, _D)), vector
    yield "top 2 of a vector", lambda x: lax.top_k(gshard.split(x, 0, _D), 2), vector
    yield "slice of most rows at run time", window, table, _of(dtype=jnp.int32)
    yield "update of most rows at run time", updated, table, _of(dtype=jnp.int32)
    yield "rows of an interleaved pipeline", reordered, _of(8, 64)


def _sums() -> Iterator[tuple[Any, ...]]:
    left, right = _of(32, 64), _of(64, 48)

    def two(x: Any, a: Any, y: Any, b: Any) -> Any:
        x, y = (gshard.split(v, 1, _D) for v in (x, y))
        return (x @ a + 0.5) + y @ b

    def scattered(indices: Any, updates: Any) -> Any:
        indices, updates = (gshard.split(v, 0, 4) for v in (indices, updates))
        return gshard.split(jnp.zeros((64, 48)).at[indices].add(updates), 0, _D)

    def rows(u: Any) -> Any:
        return [gshard.split(jnp.tanh(row), 0, _D) for row in jnp.unstack(gshard.split(u, 0, _D))]

    yield "two products and a number between", two, left, right, left, right
    yield "updates over half of the devices", scattered, _of(4096, dtype=jnp.int32), _of(4096, 48)
    yield "rows of a stack, each split", rows, _of(8, 64, 32)
