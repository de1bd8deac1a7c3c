"""What is computed by element of one tensor is computed after its row maps.

Where other row maps move rows of that tensor, too: `roll(u, 2)` and `roll(8 * u, 1)` read the same
rows at the borders of tiles, and so do the parts of a gradient that are `g`, `-g` and `8 * g`.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from jax.extend.core import JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var
from gshard.graph import Graph, renamed
from gshard.rules.base.layers import ROW_MAPS
from gshard.rules.base.rule import RULES, Elementwise


def moved_first(graph: Graph) -> list[JaxprEqn]:
    """The equations, with what is computed by element after row maps where others move rows."""
    chains: dict[JaxprEqn, list[JaxprEqn]] = {}  # what is computed before a row map, the last first
    moved: dict[Any, set[tuple[int, ...]]] = {}  # the chains before the row maps of each tensor
    for eqn in graph.eqns:
        tensors = [a for a in eqn.invars if not isinstance(a, Literal)]
        if eqn.primitive in ROW_MAPS and tensors:
            source, *others = tensors
            chains[eqn] = [] if others else _chain(eqn, source, graph)
            first: Any = _only_tensor(chains[eqn][-1]) if chains[eqn] else source
            moved.setdefault(first, set()).add(tuple(map(id, chains[eqn])))
    eqns: list[JaxprEqn] = []
    for eqn in graph.eqns:
        chain = chains.get(eqn, [])
        root: Any = _only_tensor(chain[-1]) if chain else None
        if len(moved.get(root, ())) < 2:
            eqns.append(eqn)
            continue
        out, shape = eqn.outvars[0], eqn.outvars[0].aval.shape
        names = {root: (part := Var(root.aval.update(shape=shape)))}
        turned = sum((_factor(maker) or 1) < 0 for maker in chain) % 2
        numbers = [_negative(a) if turned else a for a in eqn.invars if isinstance(a, Literal)]
        operands = [numbers.pop(0) if isinstance(a, Literal) else root for a in eqn.invars]
        eqns.append(eqn.replace(invars=operands, outvars=[part]))
        for maker in reversed(chain):
            (made,) = maker.outvars
            names[made] = out if maker is chain[0] else Var(made.aval.update(shape=shape))
            eqns.append(renamed(maker, names))
    return eqns


def _chain(eqn: JaxprEqn, source: Any, graph: Graph) -> list[JaxprEqn]:
    """What may be computed after a row map: of few rows nothing, and of zeros only products."""
    size, numbers = eqn.outvars[0].aval.size, [a for a in eqn.invars if isinstance(a, Literal)]
    found = list[JaxprEqn]()
    if size > source.aval.size * (2 if numbers else 1) or any(a.val != 0 for a in numbers):
        return found
    while (maker := graph.maker(source)) is not None:
        users, scales = graph.users(source), _factor(maker) is not None
        alone = graph.uses(source) == 1
        only = len(users) == graph.uses(source) and all(e.primitive in ROW_MAPS for e in users)
        operand = _only_tensor(maker)
        if operand is None or not (alone or (only and scales)) or (numbers and not scales):
            break
        found.append(maker)
        source = operand
    return found


def _factor(eqn: JaxprEqn) -> float | None:
    """The number that a product multiplies by, or a negation."""
    if eqn.primitive is p.neg_p:
        return -1.0
    numbers = [a.val for a in eqn.invars if isinstance(a, Literal)]
    real = eqn.primitive is p.mul_p and eqn.outvars[0].aval.dtype.kind in "fiu"
    return float(numbers[0]) if real and len(numbers) == 1 and np.isfinite(numbers[0]) else None


def _negative(zero: Literal) -> Literal:
    return Literal(np.asarray(-np.asarray(zero.val), zero.aval.dtype), zero.aval)


def _only_tensor(eqn: JaxprEqn) -> Any:
    """The one tensor that an elementwise result is computed from, apart from scalars; or None."""
    if not isinstance(RULES.get(eqn.primitive), Elementwise) or len(eqn.outvars) != 1:
        return None
    tensors = {a for a in eqn.invars if a.aval.shape and not isinstance(a, Literal)}
    if len(tensors) != 1 or eqn.effects:
        return None
    (source,), shape = tensors, eqn.outvars[0].aval.shape
    return source if source.aval.shape == shape else None
