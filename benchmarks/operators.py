"""The paper's table of partitioned operators: how work and communication on a device grow in D.

Dims that the paper marks O(D) are multiples of D here; the growth is that of the forecast's
arithmetic and of the links' busy time on a 2-D torus, from 64 to 1024 devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

import gshard
from gshard.forecast import Forecast, hardware

FEW, MANY = 64, 1024


@dataclass(frozen=True)
class PaperOperator:
    """A row: the function and its shapes for D devices, and the paper's growth exponents in D."""

    fn: Callable[[int], Callable[..., Any]]
    shapes: Callable[[int], list[tuple[int, ...]]]
    compute: float
    communication: float | None  # None: nothing is sent


def _split(dims: tuple[int | None, ...], result: int | None, fn: Callable[..., Any]) -> Any:
    """`fn` for D devices, with one dim of each operand and of the result split."""

    def made(devices: int) -> Callable[..., Any]:
        def annotated(x: Any, dim: int | None) -> Any:
            return gshard.replicate(x) if dim is None else gshard.split(x, dim, devices)

        def run(*args: Any) -> Any:
            return annotated(fn(*map(annotated, args, dims)), result)

        return run

    return made


def _conv(x: Any, w: Any) -> Any:
    return jax.lax.conv(x, w, (1, 1), "SAME")


def _dispatch(mask: Any, x: Any) -> Any:
    return jnp.einsum("gsec,gsm->egcm", mask, x)


OPERATORS = {
    "Add(A', A' -> A')": PaperOperator(
        _split((0, 0), 0, jnp.add), lambda d: [(8 * d,), (8 * d,)], 0, None
    ),
    "Matmul(AB', B'C -> AC)": PaperOperator(
        _split((1, 0), None, jnp.matmul), lambda d: [(64, 8 * d), (8 * d, 64)], 0, 0
    ),
    "Matmul(A'B, BC -> A'C)": PaperOperator(
        _split((0, None), 0, jnp.matmul), lambda d: [(8 * d, 64), (64, 64)], 0, None
    ),
    "Matmul(A'B, B'C -> A'C)": PaperOperator(
        _split((0, 0), 0, jnp.matmul), lambda d: [(8 * d, 8 * d), (8 * d, 64)], 1, 1
    ),
    "Matmul(A'B, BC' -> AC')": PaperOperator(
        _split((0, 1), 1, jnp.matmul), lambda d: [(8 * d, 64), (64, 8 * d)], 1, 1
    ),
    "Reduce(A'B -> A')": PaperOperator(
        _split((0,), 0, lambda x: jnp.sum(x, 1)), lambda d: [(8 * d, 64)], 0, None
    ),
    "Reduce(A'B -> B)": PaperOperator(
        _split((0,), None, lambda x: jnp.sum(x, 0)), lambda d: [(8 * d, 64)], 0, 0
    ),
    "Einsum(G'SEC, G'SM -> E'GCM)": PaperOperator(
        _split((0, 0), 0, _dispatch), lambda d: [(d, 1024, d, 1024 // d), (d, 1024, 64)], 0, 0.5
    ),
    "Convolution(BIX'Y, xyIO -> BOX'Y)": PaperOperator(
        _split((2, None), 2, _conv), lambda d: [(2, 4, 8 * d, 16), (4, 4, 3, 3)], 0, 0
    ),
}


def growth(name: str) -> tuple[float, float | None]:
    """The exponents of D in a device's arithmetic and in the links' busy time."""
    row = OPERATORS[name]
    machine = hardware("tpu-v3")
    # Without latencies and skew: the paper's analysis is of bytes.
    network = replace(machine.network, hop_seconds=0.0)
    quiet = machine.replace(
        network=network, efficiency=replace(machine.efficiency, skew_seconds=0.0)
    )
    found: list[Forecast] = []
    for devices in (FEW, MANY):
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in row.shapes(devices)]
        lowered = gshard.jit(row.fn(devices), devices=devices, hardware=quiet).lower(*shapes)
        found.append(lowered.forecast(quiet))
    flops = [sum(t.flops * t.count for t in f.operators) or 1.0 for f in found]
    links = [sum(t.link_seconds * t.count for t in f.operators) for f in found]
    times = math.log(MANY / FEW)
    sent = math.log(links[1] / links[0]) / times if links[0] else None
    return math.log(flops[1] / flops[0]) / times, sent
