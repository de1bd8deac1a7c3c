"""Elementwise operators: any split of any dim, without communication."""

from __future__ import annotations

from typing import Any

import jax
from jax.extend.core import JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import optimization_barrier_p, private_primitives
from gshard.graph.source import source_of, warn_once
from gshard.rules.base.primitives import edge_p
from gshard.rules.base.rule import (
    Context,
    Doc,
    Elementwise,
    Linear,
    Rule,
    Way,
    linear_in,
    register,
    rule,
)
from gshard.rules.base.unreduced import added
from gshard.tensors.annotate import annotate_p
from gshard.tensors.factors import Factors, all_dims
from gshard.tensors.sharding import Targets
from gshard.tensors.tile import Tile, Tiles


def one_to_one(eqn: JaxprEqn) -> Factors:
    """Result i is operand i, whatever the dims; there may be fewer results."""
    names = [[f"v{i}d{d}" for d in range(len(a.aval.shape))] for i, a in enumerate(eqn.invars)]
    return Factors.of(eqn, names, names[: len(eqn.outvars)], ordered=())


MARKS = (annotate_p, p.sharding_constraint_p)  # the operand, under another sharding
POINTWISE = (
    "abs", "acos", "acosh", "add_jaxvals", "add", "and", "asin", "asinh", "atan2", "atan", "atanh",
    "bessel_i0e", "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj",
    "convert_element_type", "copy", "cos", "cosh", "digamma", "div", "eq", "eq_to", "erf_inv",
    "erf", "erfc", "exp2", "exp", "expm1", "floor", "ge", "gt", "igamma_grad_a", "igamma",
    "igammac", "imag", "integer_pow", "is_finite", "le", "le_to", "lgamma", "log1p", "log2", "log",
    "logistic", "lt", "lt_to", "max", "min", "mul", "mulhi", "name", "ne", "neg", "nextafter",
    "not", "one_minus_square", "or", "polygamma", "polynomial", "population_count", "pow", "real",
    "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n",
    "shift_left", "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt",
    "square", "stage", "stop_gradient", "sub", "tan", "tanh", "xor", "zeta",
)  # fmt: skip


@rule(
    optimization_barrier_p,
    p.device_put_p,
    edge_p,
    factors=one_to_one,
    ways=lambda eqn, shardings, targets, limit: [
        Way(tuple(shardings), tuple(shardings[: len(eqn.outvars)]))
    ],
    level=0,
    doc=Doc(free="every dim"),
)
def _each_by_itself(ctx: Context, eqn: JaxprEqn, way: Way, tiles: Tiles, targets: Targets) -> Tiles:
    """Results that are the operands, each with its own sharding."""
    if eqn.primitive is optimization_barrier_p:
        arrays = optimization_barrier_p.bind(*(t.array for t in tiles))
    else:
        arrays = [t.array for t in tiles]
        if any(map(_is_host, eqn.params.get("devices", ()))):
            shape = eqn.outvars[0].aval.str_short(short_dtypes=True)
            message = f"gshard.jit keeps {shape} on the devices: it does not offload to host memory"
            warn_once(source_of(eqn), message, OffloadWarning)
    own = tiles[: len(eqn.outvars)]
    return [Tile(a, t.sharding, t.shape) for a, t in zip(arrays, own, strict=False)]


class OffloadWarning(UserWarning):
    """A move to host memory, such as those of `jax.checkpoint`'s policies, is not done."""


def _is_host(target: Any) -> bool:
    """Whether `jax.device_put` goes to host memory; a CPU's own memory is called unpinned."""
    return target is jax.memory.Space.Host or getattr(target, "memory_kind", "") == "pinned_host"


_ONE, _BOTH, _EITHER = linear_in((0,)), linear_in((0, 1), run=added), linear_in((0,), (1,))
_LINEAR = {
    "add": _BOTH,
    "add_jaxvals": _BOTH,
    "conj": _ONE,
    "convert_element_type": _ONE,
    "copy": _ONE,
    "div": _ONE,
    "mul": _EITHER,
    "neg": _ONE,
    "select_n": Linear(lambda eqn: (range(1, len(eqn.invars)),)),
    "sub": _BOTH,
}

for _name in POINTWISE:
    # Some releases of JAX export fewer, or have fewer.
    _exported = getattr(p, f"{_name}_p", None)
    for _primitive in [_exported] if _exported else private_primitives("lax.lax", f"{_name}_p"):
        register(Elementwise(linear=_LINEAR.get(_name)), _primitive)
register(
    Rule(
        all_dims,
        local=lambda ctx, eqn, tiles, shapes: [tiles[0].array],
        level=0,
        doc=Doc(free="every dim"),
    ),
    *MARKS,
)
