"""Linear algebra: batch dims split for free, at every rank; the rest is gathered.

A matrix is factorised on one device. Padding of batch dims is made zero first: some libraries loop
for long, or forever, on what may stand there.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard import _jax
from gshard.factors import Factors, Shape
from gshard.rule import Context, Doc, Rule, bind_local, register
from gshard.tile import Tile


def batch_dims(eqn: JaxprEqn, core: int) -> Factors:
    """The dims before the last `core` of the first operand; all operands and results have them."""
    shape = eqn.invars[0].aval.shape
    batch = [f"b{i}" for i in range(len(shape) - core)]

    def names(atom: Any) -> list[str | None]:
        return [*batch, *[None] * (len(atom.aval.shape) - len(batch))]

    return Factors.of(eqn, [names(a) for a in eqn.invars], [names(v) for v in eqn.outvars])


def _without_garbage(
    ctx: Context, eqn: JaxprEqn, tiles: list[Tile], shapes: list[Shape]
) -> Sequence[jax.Array]:
    clean = [t.masked(ctx.place, jnp.zeros((), t.array.dtype)) for t in tiles]
    return bind_local(ctx, eqn, clean, shapes)


_MATRICES = (
    p.cholesky_p,
    p.eig_p,
    p.eigh_p,
    p.hessenberg_p,
    p.householder_product_p,
    p.lu_p,
    p.qr_p,
    p.schur_p,
    p.svd_p,
    p.triangular_solve_p,
    p.tridiagonal_p,
    *_jax.private_primitives("lax.linalg", "geqrf_p", "geqp3_p", "ormqr_p", "symmetric_product_p"),
    *_jax.private_primitives("lax.linalg", "cholesky_update_p"),
)
_VECTORS = (
    p.tridiagonal_solve_p,
    *_jax.private_primitives("lax.linalg", "lu_pivots_to_permutation_p"),
)


def _register() -> None:
    gathered = "the dims of the {}: AllGather"
    for core, primitives, what in ((2, _MATRICES, "matrix"), (1, _VECTORS, "system")):
        factors = functools.partial(batch_dims, core=core)
        register(
            Rule(
                factors,
                local=_without_garbage,
                doc=Doc(free="batch dims", gather=gathered.format(what)),
            ),
            *primitives,
        )


_register()
