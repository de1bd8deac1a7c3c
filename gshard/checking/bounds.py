"""How far two right results of one operator may be apart: what rounding allows, element by element.

Both results are of the same operands, so the bound is that of one operator alone:

- An operator on single elements, or one that moves elements, rounds once: some units in the last
  place.
- A sum of products is bounded by u * (sqrt(terms) + devices) * sum |terms|, where u is the unit
  roundoff of the type that it is accumulated in: rounding errors are as likely up as down, so that
  they grow like the square root of their number. The sum of absolute values is computed in float64,
  by the operator itself. Partial sums that pass between devices in 16 bits are rounded to them:
  u * sum |partial sums| more. The operator's own error, measured against float64, counts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard.checking.replaying.tiles import plain, wide
from gshard.graph.evaluate import bind

# Sums, and the operands in which they are linear.
_LINEAR = {
    "dot_general": (0, 1),
    "ragged_dot_general": (0, 1),
    "ragged_dot": (0, 1),
    "conv_general_dilated": (0, 1),
    "reduce_sum": (0,),
    "cumsum": (0,),
    "reduce_window_sum": (0,),
    "scatter-add": (0, 2),
    "select_and_scatter_add": (0,),
}
_PRODUCTS = ("reduce_prod", "cumprod", "cumlogsumexp")
# Functions with zeros, around which implementations differ by some units of the operand's rounding.
_WITH_ZEROS = ("sin", "cos", "tan", "log", "log1p", "lgamma", "digamma", "erf_inv", "exp2", "pow")
# One operator to us, many inside: solvers, and kernels that nothing is known of.
_COMPOSED = (
    "cholesky", "eig", "eigh", "svd", "qr", "lu", "householder_product", "geqrf", "geqp3", "schur",
    "hessenberg", "triangular_solve", "tridiagonal", "tridiagonal_solve", "pallas_call", "fft",
    "custom_partitioning", "pure_callback", "io_callback", "reduce", "reduce_window", "custom_root",
    "regularized_incomplete_beta", "igamma", "igammac", "random_gamma", "bessel_i0e", "bessel_i1e",
)  # fmt: skip
_OF_SCATTER = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
ULPS, ULPS_16, ULPS_COMPOSED = 32, 4, 4096


def roundoff(dtype: Any) -> float:
    """The unit roundoff of a type of floats."""
    return float(jnp.finfo(dtype).eps) / 2


def is_inexact(dtype: Any) -> bool:
    """Whether numbers of a type are rounded."""
    return bool(jnp.issubdtype(dtype, jnp.inexact))


def magnitude(array: np.ndarray) -> np.ndarray:
    """Absolute values in float64; of what is not finite, 0: it has to be equal."""
    found = np.abs(wide(array)).astype(np.float64)
    return np.where(np.isfinite(found), found, 0.0)


def bound(
    eqn: JaxprEqn, operands: Sequence[Any], result: np.ndarray, devices: int
) -> tuple[np.ndarray, np.ndarray | float]:
    """What a result of these operands is expected to be, and how far from it is right."""
    name = eqn.primitive.name
    if not is_inexact(result.dtype):
        return result, 0.0
    u = roundoff(result.dtype)
    tiny = 8 * float(jnp.finfo(result.dtype).tiny)  # what is below may be taken for 0
    sizes = magnitude(result)
    if name in _LINEAR:
        return result, _of_sum(eqn, operands, result, devices) + tiny
    if name in _PRODUCTS:
        terms = math.sqrt(max(1, np.size(operands[0])))
        return result, 4 * (terms + devices + 8) * u * (sizes + (name == "cumlogsumexp")) + tiny
    if name in _COMPOSED:
        return result, ULPS_COMPOSED * u * (sizes + sizes.max(initial=0.0)) + tiny
    ulps = ULPS_16 if result.dtype.itemsize <= 2 else ULPS
    return result, ulps * u * sizes + (4 * u if name in _WITH_ZEROS else 0.0) + tiny


def _of_sum(eqn: JaxprEqn, operands: Sequence[Any], result: np.ndarray, devices: int) -> np.ndarray:
    linear = _LINEAR[eqn.primitive.name]
    exact = in_float64(eqn, operands)
    absolute = in_float64(
        eqn, [np.abs(wide(np.asarray(x))) if i in linear else x for i, x in enumerate(operands)]
    )
    total = magnitude(absolute)
    error = np.abs(wide(result) - exact)
    finite = np.isfinite(error) & (total > 0)
    measured = float(np.max(error[finite] / total[finite], initial=0.0))
    accumulated = min(roundoff(result.dtype), roundoff(jnp.float32))
    relative = 4 * (math.sqrt(_terms(eqn, operands, result)) + devices) * accumulated
    found = (relative + 4 * measured) * total
    if result.dtype.itemsize <= 2:
        u = roundoff(result.dtype)
        found = found + 4 * u * (magnitude(result) + _partial_sums(eqn, operands, total, devices))
    return found + 4 * roundoff(result.dtype) * magnitude(result)


def _terms(eqn: JaxprEqn, operands: Sequence[Any], result: np.ndarray) -> int:
    """At most how many terms are added for an element of the result."""
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return max(1, math.prod(np.shape(operands[0])[d] for d in contracted))
    if eqn.primitive.name == "reduce_sum":
        return max(1, np.size(operands[0]) // max(1, result.size))
    return max(1, min(np.size(operands[i]) for i in _LINEAR[eqn.primitive.name]))


def _partial_sums(
    eqn: JaxprEqn, operands: Sequence[Any], total: np.ndarray, devices: int
) -> np.ndarray:
    """The sum of absolute values of what each device would sum, whichever dim is split.

    Sums over as many blocks as there are devices; where that is not worked out, all of `total`.
    """
    if eqn.primitive.name == "dot_general":
        pairs = list(zip(*eqn.params["dimension_numbers"][0], strict=True))
        cuts = [{0: a, 1: b} for a, b in pairs]
    elif eqn.primitive.name == "reduce_sum":
        cuts = [{0: axis} for axis in eqn.params["axes"]]
    else:
        return total
    found = np.zeros_like(total)
    for dims in cuts:
        size = np.shape(operands[0])[dims[0]]
        rows = max(1, -(-size // devices))
        blocks = [
            in_float64(eqn, [_rows(x, dims.get(i), start, rows) for i, x in enumerate(operands)])
            for start in range(0, size, rows)
        ]
        if blocks:
            found = np.maximum(found, np.sum([magnitude(b) for b in blocks], axis=0))
    return found


def _rows(array: Any, dim: int | None, start: int, count: int) -> Any:
    if dim is None:
        return array
    return np.asarray(array)[(slice(None),) * dim + (slice(start, start + count),)]


def in_float64(eqn: JaxprEqn, operands: Sequence[Any]) -> np.ndarray:
    """The result of an operator in float64, or complex128."""
    with jax.enable_x64(True), jax.default_device(jax.local_devices(backend="cpu")[0]):
        values = [x if _is_key(x) else wide(np.asarray(x)) for x in operands]
        changed: dict[str, Any] = {}
        if eqn.params.get("preferred_element_type") is not None:
            changed["preferred_element_type"] = np.result_type(*(v.dtype for v in values))
        if eqn.primitive is p.scatter_add_p:  # its parameter has the sum of two numbers, in float32
            return np.asarray(lax.scatter_add(*values, **{k: eqn.params[k] for k in _OF_SCATTER}))
        return np.asarray(bind(eqn, values, **changed)[0])


def _is_key(value: Any) -> bool:
    return bool(jnp.issubdtype(getattr(value, "dtype", np.float32), jax.dtypes.prng_key))


Evaluate = Callable[[JaxprEqn, Sequence[Any]], Sequence[Any]]


def spread(
    eqn: JaxprEqn,
    operands: Sequence[Any],
    slacks: Sequence[np.ndarray | None],
    results: Sequence[np.ndarray],
    evaluate: Evaluate,
) -> list[np.ndarray]:
    """How far results move when operands move within their slacks: four times what is tried.

    All move up, all down, every other one down, and each element at random. A result that is not a
    float may change altogether: infinity where it does.
    """
    rng = np.random.default_rng(0)
    found = [np.zeros(r.shape) for r in results]
    for first, second in ((1.0, 1.0), (-1.0, -1.0), (1.0, -1.0), (None, None)):
        moved = []
        for number, (x, slack) in enumerate(zip(operands, slacks, strict=True)):
            if slack is None:
                moved.append(x)
                continue
            sign = second if number % 2 else first
            signs = rng.choice([-1.0, 1.0], np.shape(x)) if sign is None else sign
            moved.append((wide(x) + signs * slack).astype(x.dtype))
        for number, other in enumerate(evaluate(eqn, moved)):
            result, other = results[number], plain(other)
            if is_inexact(result.dtype):
                gap = 4 * np.abs(wide(other) - wide(result))
                gap = np.where(np.isfinite(gap), gap, np.inf)
                gap = np.where(_same(other, result), 0.0, gap)
            else:
                gap = np.where(other == result, 0.0, np.inf)
            found[number] = np.maximum(found[number], gap)
    return found


def _same(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return (a == b) | ((a != a) & (b != b))
