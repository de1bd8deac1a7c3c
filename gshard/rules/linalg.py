"""Linear algebra: batch dims split for free, at every rank, and so do the columns of a system.

A matrix is factorised on one device. A split of its own dims moves to a batch dim or to the
columns, where these have a row for every tile, and else its dims are gathered. Padding of batch
dims is set to zero first: some libraries do not terminate on arbitrary contents.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard import _jax
from gshard.rules.base.rule import Context, Doc, Rule, bind_local, linear_in, register
from gshard.tensors.factors import Factors, Shapes
from gshard.tensors.tile import Arrays, Tiles


def batch_dims(eqn: JaxprEqn, core: int) -> Factors:
    """The dims before the last `core` of the first operand; all operands and results have them."""
    return _whole_matrices(Factors.of(eqn, *_batch_names(eqn, core)))


def batch_and_columns(eqn: JaxprEqn, core: int) -> Factors:
    """The batch dims, and the columns of the right-hand side, which are independent.

    The last operand and the only result are that right-hand side. An operator that is applied from
    the right takes its rows in the place of columns.
    """
    operands, results = _batch_names(eqn, core)
    left = eqn.params.get("left_side", eqn.params.get("left", True))
    for names in (operands[-1], *results):
        names[-1 if left else -2] = "c"
    return _whole_matrices(Factors.of(eqn, operands, results))


def _whole_matrices(factors: Factors) -> Factors:
    return factors.unsplit([f for f in factors.sizes if f[0] == "m"])


Names = list[list[str]]


def _batch_names(eqn: JaxprEqn, core: int) -> tuple[Names, Names]:
    """The factors of all dims of the operands, and of the results: dims of matrices share none."""
    batch = [f"b{i}" for i in range(len(eqn.invars[0].aval.shape) - core)]
    number = itertools.count()

    def names(atom: Any) -> list[str]:
        return [*batch, *[f"m{next(number)}" for _ in atom.aval.shape[len(batch) :]]]

    return [names(a) for a in eqn.invars], [names(v) for v in eqn.outvars]


def _without_garbage(ctx: Context, eqn: JaxprEqn, tiles: Tiles, shapes: Shapes) -> Arrays:
    clean = [t.masked(ctx.place, jnp.zeros((), t.array.dtype)) for t in tiles]
    return bind_local(ctx, eqn, clean, shapes)


MATRICES = (  # functions of the last two dims of their first operand
    p.cholesky_p,
    p.eig_p,
    p.eigh_p,
    p.hessenberg_p,
    p.householder_product_p,
    p.lu_p,
    p.qr_p,
    p.schur_p,
    p.svd_p,
    p.tridiagonal_p,
    *_jax.private_primitives("lax.linalg", "geqrf_p", "geqp3_p", "symmetric_product_p"),
    *_jax.private_primitives("lax.linalg", "cholesky_update_p"),
)
VECTORS = _jax.private_primitives("lax.linalg", "lu_pivots_to_permutation_p")
_MATRIX_SYSTEMS = (p.triangular_solve_p, *_jax.private_primitives("lax.linalg", "ormqr_p"))
_VECTOR_SYSTEMS = (p.tridiagonal_solve_p,)


def _register() -> None:
    for core, factors, primitives in (
        (2, batch_dims, MATRICES),
        (1, batch_dims, VECTORS),
        (2, batch_and_columns, _MATRIX_SYSTEMS),
        (1, batch_and_columns, _VECTOR_SYSTEMS),
    ):
        columns = factors is batch_and_columns
        what = "matrix" if core == 2 else "system"
        doc = Doc(
            free="batch dims, columns of the right-hand side" if columns else "batch dims",
            gather=f"the dims of the {what}: AllToAll with one of these, or AllGather",
        )
        rule = Rule(functools.partial(factors, core=core), local=_without_garbage, doc=doc)
        for primitive in primitives:
            solves = primitive is p.triangular_solve_p
            register(replace(rule, linear=linear_in((1,)) if solves else None), primitive)


_register()
