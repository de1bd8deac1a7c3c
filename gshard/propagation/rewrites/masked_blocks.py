"""Skipping blocks of scores that are masked entirely: half of them under a causal mask."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax.extend.core import Jaxpr, Literal
from jax.extend.core import primitives as p

from gshard.graph import Graph, needed_for
from gshard.propagation.rewrites.scores import Scoring
from gshard.rules.base.ring_pass import BlockMask, Softmax, Sum
from gshard.rules.base.uses import linear_groups


def block_mask(
    region: Scoring,
    exits: Sequence[Sum],
    online: Softmax | None,
    body: Jaxpr,
    around: Graph,
) -> BlockMask | None:
    """The mask by which blocks of a ring pass can be skipped, if there is one.

    `around` is the enclosing program, `online` the softmax that the pass computes. In other passes
    all sums must be zero where the exponentials of the logits are.
    """
    own = Graph.of(body)
    known = Graph([*around.eqns, *body.eqns], aliases=region.sources)
    if online:
        if len(exits) > len(online.sums):
            return None
        return _of_mask(online.maximum.scores, None, known, body)
    for power in (e for e in body.eqns if e.primitive is p.exp_p):
        shifted = own.maker(power.invars[0])
        if shifted is None or shifted.primitive is not p.sub_p:
            continue
        logits, shift = shifted.invars
        if isinstance(shift, Literal) or own.maker(shift) or shift not in region.sources:
            continue
        zero = _zero_with(power.outvars[0], body, known)
        if all(e.scores in zero for e in exits):
            return _of_mask(logits, shift, known, body)
    return None


def _of_mask(logits: Any, shift: Any, graph: Graph, body: Jaxpr) -> BlockMask | None:
    """The mask that logits are selected by: `where(mask, logits, fill)`."""
    eqn = graph.maker(logits)
    if eqn is None or eqn.primitive is not p.select_n_p or len(eqn.invars) != 3:
        return None
    mask, without, within = eqn.invars
    fills = [graph.fill(without), graph.fill(within)]
    makers = needed_for([mask], body.eqns)
    known = [f for f in fills if f is not None]
    if len(known) != 1 or not makers or any(e.primitive is p.dot_general_p for e in makers):
        return None
    own = Jaxpr([], body.invars, [mask], makers, set(), debug_info=body.debug_info)
    return BlockMask(own, fills[0] is not None, float(known[0]), shift)


def _zero_with(source: Any, body: Jaxpr, graph: Graph) -> set[Any]:
    """The variables that are zero where `source` is: linear in it, or in zeros, as rules say."""
    zero = {source}

    def is_zero(atom: Any) -> bool:
        known = not isinstance(atom, Literal) and atom in zero
        return known or bool(graph.fill(atom) == 0)

    for eqn in body.eqns:
        if any(all(is_zero(eqn.invars[n]) for n in group) for group in linear_groups(eqn)):
            zero.update(eqn.outvars)
    return zero
