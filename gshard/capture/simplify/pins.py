"""Pins: rounded values that a compiler cannot join with the operators around them.

Whether a multiplication and an addition become one instruction, or a function is computed by one
library or another, would depend on the operators between them and on the sizes of tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.rules.base.primitives import pin_p

# Rounded, and possibly made of products: pinned.
ROUNDED = frozenset((
    "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "integer_pow", "lu",
    "mul", "one_minus_square", "qr", "schur", "sqrt", "square", "svd", "tridiagonal",
))  # fmt: skip

# Rounded as the library that computes them pleases: pinned before and after.
FUNCTIONS = frozenset((
    "acos", "acosh", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e", "bessel_i1e", "cos",
    "cosh", "digamma", "erf_inv", "erfc", "exp", "exp2", "expm1", "lgamma", "log1p", "pow", "rsqrt",
    "sin", "sinh", "tan", "tanh",
))  # fmt: skip


def is_rounded(eqn: JaxprEqn, constants: set[Any]) -> bool:
    """Whether an operator that is exact by itself has to be pinned for what it might join with."""
    if eqn.primitive is p.convert_element_type_p:
        old, new = (jnp.dtype(v.aval.dtype) for v in (eqn.invars[0], eqn.outvars[0]))
        return not jnp.issubdtype(old, jnp.inexact) or new.itemsize < old.itemsize
    if eqn.primitive in (p.add_p, p.sub_p):  # constants would be added to each other first
        return any(isinstance(a, Literal) or a in constants for a in eqn.invars)
    return eqn.primitive is p.iota_p


def pinned(eqn: JaxprEqn) -> list[JaxprEqn]:
    """An equation whose float results are pinned."""
    made: list[Any] = []
    pins: list[JaxprEqn] = []
    for var in eqn.outvars:
        if not jnp.issubdtype(var.aval.dtype, jnp.inexact):
            made.append(var)
            continue
        made.append(Var(var.aval))
        pins.append(_pin(eqn, [made[-1]], var))
    return [eqn.replace(outvars=made), *pins]


def _pin(eqn: JaxprEqn, operands: Sequence[Any], result: Any) -> JaxprEqn:
    return eqn.replace(
        invars=list(operands), outvars=[result], primitive=pin_p, params={}, effects=set()
    )


def apart(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A function whose operands are pinned, too.

    Libraries that reduce take some functions of the result along, with bits of their own, if there
    is enough to reduce.
    """
    pins: list[JaxprEqn] = []
    operands: list[Any] = []
    for atom in eqn.invars:
        if not isinstance(atom, Literal) and jnp.issubdtype(atom.aval.dtype, jnp.inexact):
            pins.append(_pin(eqn, [atom], Var(atom.aval)))
            atom = pins[-1].outvars[0]
        operands.append(atom)
    return [*pins, *pinned(eqn.replace(invars=operands))]


def divided(eqn: JaxprEqn) -> list[JaxprEqn]:
    """A division that stays one.

    XLA multiplies by the reciprocal of a divisor that is broadcast. On a device that has one column
    of the result nothing is broadcast, and XLA divides: other bits. Here no divisor is broadcast.
    """
    x, y = eqn.invars
    if isinstance(x, Literal) or isinstance(y, Literal):
        return pinned(eqn)
    shape = np.broadcast_shapes(x.aval.shape, y.aval.shape)
    divisor = Var(ShapedArray(shape, y.aval.dtype))
    return [_pin(eqn, [y, x], divisor), *pinned(eqn.replace(invars=[x, divisor]))]
