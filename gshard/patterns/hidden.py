"""Blocks of scores that a mask hides altogether: half of them, where it is causal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.patterns.scores import Exit, Region, needed_for
from gshard.visiting import Hides


def hidden(
    region: Region,
    exits: Sequence[Exit],
    online: Sequence[Exit] | None,
    body: Jaxpr,
    around: Mapping[Any, JaxprEqn],
) -> Hides | None:
    """The mask by which blocks of a round can be left out, if there is one.

    `around` is what makes the variables of the program. `online` are the sums of a softmax that the
    round makes, its maximum first. In other rounds everything that is summed has to be zero where
    the powers of the logits are.
    """
    made = {v: eqn for eqn in body.eqns for v in eqn.outvars}
    outside = {v: around[a] for v, a in region.sources.items() if a in around}
    known = {**around, **outside, **made}
    if online:
        if len(exits) > len(online):
            return None
        return _of_mask(online[0].scores, None, known, body)
    for power in (e for e in body.eqns if e.primitive is p.exp_p):
        shifted = made.get(power.invars[0])
        if shifted is None or shifted.primitive is not p.sub_p:
            continue
        logits, shift = shifted.invars
        if isinstance(shift, Literal) or shift in made or shift not in region.sources:
            continue
        zero = _zero_with(power.outvars[0], body.eqns, known)
        if all(e.scores in zero for e in exits):
            return _of_mask(logits, shift, known, body)
    return None


def _of_mask(logits: Any, shift: Any, made: Mapping[Any, JaxprEqn], body: Jaxpr) -> Hides | None:
    """The mask that logits are selected by: `where(mask, logits, fill)`."""
    eqn = made.get(logits)
    if eqn is None or eqn.primitive is not p.select_n_p or len(eqn.invars) != 3:
        return None
    mask, without, within = eqn.invars
    fills = [_constant(without, made), _constant(within, made)]
    makers = needed_for([mask], body.eqns)
    known = [f for f in fills if f is not None]
    if len(known) != 1 or not makers or any(e.primitive is p.dot_general_p for e in makers):
        return None
    own = Jaxpr([], body.invars, [mask], makers, set(), debug_info=body.debug_info)
    return Hides(own, fills[0] is not None, known[0], shift)


def _constant(atom: Any, made: Mapping[Any, JaxprEqn]) -> float | None:
    """The number that stands everywhere in a tensor."""
    while not isinstance(atom, Literal):
        eqn = made.get(atom)
        if eqn is None or eqn.primitive not in (p.broadcast_in_dim_p, p.convert_element_type_p):
            return None
        atom = eqn.invars[0]
    return float(atom.val) if np.ndim(atom.val) == 0 else None


def _zero_with(source: Any, eqns: Sequence[JaxprEqn], made: Mapping[Any, JaxprEqn]) -> set[Any]:
    """The variables that are zero wherever `source` is."""
    zero = {source}
    nothing = {v for e in eqns for v in e.outvars if _constant(v, made) == 0}
    for eqn in eqns:
        of = [not isinstance(a, Literal) and a in zero for a in eqn.invars]
        either = eqn.primitive is p.mul_p and any(of)
        first = eqn.primitive in _KEEPING_ZERO and of[0]
        rest = [a for a, z in zip(eqn.invars[1:], of[1:], strict=True) if not z]
        chosen = eqn.primitive is p.select_n_p and any(of) and all(_is_in(a, nothing) for a in rest)
        summed = eqn.primitive in (p.add_p, p.sub_p, p.add_jaxvals_p) and all(of)
        if either or first or chosen or summed:
            zero.update(eqn.outvars)
    return zero


_KEEPING_ZERO = (
    p.div_p, p.neg_p, p.convert_element_type_p, p.transpose_p, p.reshape_p, p.broadcast_in_dim_p,
    p.squeeze_p, p.copy_p,
)  # fmt: skip


def _is_in(atom: Any, variables: set[Any]) -> bool:
    if isinstance(atom, Literal):
        return np.ndim(atom.val) == 0 and atom.val == 0
    return atom in variables
