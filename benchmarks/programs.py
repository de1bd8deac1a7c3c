"""The programs on which partitioners differ: the paper's, and those on which XLA's falls short.

Each is written for one huge device and annotated; `needed` is what a device must send at the least,
in bytes, derived beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import gshard
from examples.moe_layer import moe_layer, moe_loss, shapes

D = 8


@dataclass(frozen=True)
class Program:
    """An annotated function, arguments for it, and the bytes that a device must send."""

    name: str
    fn: Callable
    args: tuple
    needed: int
    timed: bool = False


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def all_to_all(local: int) -> int:
    return local * 4 * (D - 1) // D


def all_reduce(size: int) -> int:
    return 2 * size * 4 * (D - 1) // D


def programs() -> list[Program]:
    return [*moe(), *matmuls(), *windows(), *formatting(), *along_the_split_dim()]


def moe() -> list[Program]:
    """G = E = 8, S = 256, M = 128, H = 512: two exchanges forwards, two more backwards."""
    args = tuple(normal(*s.shape, seed=i) / 8 for i, s in enumerate(shapes()))
    exchange = all_to_all(8 * 64 * 128)  # a device's dispatched inputs, [E, G/D, C, M]
    gradient = jax.value_and_grad(moe_loss, argnums=(0, 1, 2, 3))
    return [
        Program("MoE layer, forward", moe_layer, args, 2 * exchange + all_reduce(1), True),
        Program(
            "MoE layer, value and gradient",
            gradient,
            args,
            4 * exchange + all_reduce(128 * 8) + 2 * all_reduce(1),  # and the gate's gradient
            True,
        ),
    ]


def matmuls() -> list[Program]:
    def contracted(x, w):
        x, w = gshard.split(x, 1, D), gshard.split(w, 0, D)
        return gshard.split(x @ w, 0, D)

    def data_parallel(x, w):
        def loss(w):
            return jnp.sum(jnp.tanh(gshard.split(x, 0, D) @ w) ** 2)

        return gshard.split(jax.grad(loss)(w), 0, D)

    def two_dims(x):
        mesh = np.arange(D).reshape(4, 2)  # axes b, a
        x = gshard.shard(x, mesh.reshape(4, 1, 2))  # P(b, None, a)
        return gshard.shard(x * 2, mesh.T.reshape(1, 8, 1))  # P(None, (a, b))

    whole = 512 * 512
    return [
        Program(
            "matmul, contracting dim split, result split",
            contracted,
            (normal(128, 2048), normal(2048, 256)),
            128 * 256 * 4 * (D - 1) // D,
        ),
        Program(
            "data-parallel gradient kept split",
            data_parallel,
            (normal(1024, 512), normal(512, 512)),
            whole * 4 * (D - 1) // D,
        ),
        Program(
            "P(b, None, a) -> P(None, (a, b))",
            two_dims,
            (normal(32, 64, 16),),
            all_to_all(32 * 64 * 16 // D),
        ),
    ]


def _conv(x, kernel, **how):
    return lax.conv_general_dilated(x, kernel, dimension_numbers=("NHWC", "HWIO", "NHWC"), **how)


def windows() -> list[Program]:
    """Halos of a few columns, of [batch, height, columns, channels]."""
    column = 4 * 16 * 8 * 4

    def strided(x, kernel):
        x = gshard.split(x, 2, D)[:, :, :69]
        return gshard.split(_conv(x, kernel, window_strides=(2, 2), padding="SAME"), 2, D)

    def dilated(x, kernel):
        x = gshard.split(x, 2, D)[:, :, :59]
        how = {"window_strides": (1, 2), "padding": [(1, 1), (2, 2)], "lhs_dilation": (1, 3)}
        return gshard.split(_conv(x, kernel, **how), 2, D)

    def grouped(x, kernel):
        how = {"window_strides": (1, 1), "padding": "SAME", "feature_group_count": 4}
        return gshard.split(_conv(gshard.split(x, 0, D), kernel, **how), 0, D)

    def stack(x, *kernels):
        x = gshard.split(x, 2, D)
        for kernel in kernels:
            x = jax.nn.relu(_conv(x, kernel, window_strides=(1, 1), padding="SAME"))
        return x

    kernels = tuple(normal(3, 3, 8, 8, seed=i) / 8 for i in range(6))
    return [
        Program(  # the 7th device needs columns 60 to 68, and holds 54 to 62
            "conv, stride 2, 69 columns",
            strided,
            (normal(4, 16, 72, 8), kernels[0]),
            6 * column,
        ),
        Program(  # the 8th device needs columns 51 to 58, and holds 56 to 58
            "conv, base dilation 3, stride 2",
            dilated,
            (normal(4, 16, 64, 8), normal(3, 5, 8, 8)),
            5 * column,
        ),
        Program(
            "grouped conv, batch split", grouped, (normal(16, 16, 64, 8), normal(3, 3, 2, 8)), 0
        ),
        Program(  # a column to the left and one to the right, 6 times, of 64 rows each
            "stack of 6 convs, width split",
            stack,
            (normal(4, 64, 256, 8), *kernels),
            12 * 4 * column,
            True,
        ),
    ]


def formatting() -> list[Program]:
    def reverse(x):
        return gshard.split(jnp.flip(gshard.split(x, 0, D)[:61], 0), 0, D)

    def shifted(x, v):
        x = gshard.split(x, 0, D)
        s = x.at[:-1].set(x[1:])
        return gshard.split(s.at[-1].set(v), 0, D)

    return [
        Program("reverse, 61 rows", reverse, (normal(64, 80),), 8 * 80 * 4),
        Program(
            "x.at[:-1].set(x[1:]).at[-1].set(v)", shifted, (normal(64, 80), normal(80)), 80 * 4
        ),
    ]


def along_the_split_dim() -> list[Program]:
    def cumsum(x):
        return gshard.split(jnp.cumsum(gshard.split(x, 0, D), 0), 0, D)

    def fft(x):
        return jnp.abs(jnp.fft.fft2(gshard.split(x, 0, D)))

    def sort(x):
        return gshard.split(jnp.sort(gshard.split(x, 0, D), 0), 0, D)

    def lookup(table, ids):
        return jnp.take(gshard.split(table, 0, D), gshard.replicate(ids), axis=0)

    rows, columns = 1 << 12, 16
    ids = np.random.default_rng(0).integers(0, 4096, 512).astype(np.int32)
    return [
        Program(
            "cumsum along the split dim", cumsum, (normal(rows, columns),), 7 * columns * 4, True
        ),
        Program("fft2, batch split", fft, (normal(16, 64, 64),), 0),
        Program(
            "sort along the split dim",
            sort,
            (normal(rows, columns),),
            2 * all_to_all(rows * columns // D),
            True,
        ),
        Program(
            "embedding split by vocabulary", lookup, (normal(4096, 64), ids), all_reduce(512 * 64)
        ),
    ]
