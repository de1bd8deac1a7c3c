"""Ring attention: over split sequences, keys and values pass around a ring.

If queries and keys are split alike and gathering the keys would exceed the memory limit, the scores
are never materialized in full: blocks of keys and values pass through all devices, and each device
accumulates the results for its queries (Ring Attention, with the online softmax of FlashAttention).
A gradient recomputes the scores block by block. Blocks that are masked entirely are skipped: half
of them under a causal mask.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard.graph import Graph, at_every_level, in_order, inputs_of, live, needed_for, upstream
from gshard.graph.source import source_of
from gshard.propagation.rewrites.scores import Finder, Scoring
from gshard.propagation.rewrites.softmax import in_one_form
from gshard.rules.base.ring_pass import (
    KEYS,
    QUERIES,
    BlockMask,
    RingPass,
    Softmax,
    Sum,
    ring_pass_p,
)
from gshard.rules.base.rule import RULES, factors_of
from gshard.rules.base.uses import linear_groups
from gshard.tensors.sharding import Sharding, Split
from gshard.tensors.tile import byte_size

_NO_SOFTMAX = "only the scores are too large, and their sums over keys are not those of a softmax"


@at_every_level
def ring_attention(
    jaxpr: Jaxpr, shardings: Mapping[Any, Sharding], memory_limit: int, remarks: list[str]
) -> Jaxpr:
    """The program with ring attention, where attention would exceed the memory limit.

    `remarks` gets a line for every product that exceeds it: whether its scores are in a ring now.
    """
    eqns = jaxpr.eqns
    done: set[JaxprEqn] = set()
    for seed in jaxpr.eqns:
        found = _too_large(seed, shardings, memory_limit)
        if not found or seed in done:
            continue
        graph = Graph(eqns, jaxpr.outvars)
        region = Finder(graph).region(seed, *found[:2])
        if isinstance(region, str):
            remarks.append(f"not applied at {source_of(seed)}: {region}")
            continue
        online = None
        if form := in_one_form(graph, region):
            graph = Graph(in_order(live(form.eqns, jaxpr.outvars)), jaxpr.outvars)
            region = Finder(graph).region(seed, *found[:2])
            assert isinstance(region, Scoring)
            online = form.softmax(graph, region)
        if not found[3] and online is None:
            # An ordinary product with a large result.
            remarks.append(f"not applied at {source_of(seed)}: {_NO_SOFTMAX}")
            continue
        done |= {e for e in eqns if set(region.dims).intersection(e.outvars)}
        eqns = _replaced(graph, region, online, found[2], jaxpr)
        rings = sum(e.primitive is ring_pass_p for e in set(eqns).difference(graph.eqns))
        kind = "an online softmax" if online else "no softmax"
        remarks.append(f"applied at {source_of(seed)}: {kind}; passes around the ring: {rings}")
    return jaxpr if eqns is jaxpr.eqns else jaxpr.replace(eqns=eqns)


def _too_large(
    eqn: JaxprEqn, shardings: Mapping[Any, Sharding], limit: int
) -> tuple[int, int, Split, bool] | None:
    """The dims of queries and keys of a product whose operands are split alike, and their split.

    Only if a gathered operand, or the scores of a device's own queries, would exceed the limit; the
    last says whether it is the former.
    """
    if eqn.primitive is not p.dot_general_p or any(isinstance(a, Literal) for a in eqn.invars):
        return None
    (out,), factors = eqn.outvars, factors_of(RULES[eqn.primitive], eqn)
    here = [shardings[a] for a in eqn.invars if a in shardings]
    if len(here) < 2 or any(s.manual for s in here) or out not in shardings:
        return None
    (lhs, rhs), (result,) = factors.operands, factors.results
    for l, r in itertools.product(range(len(lhs)), range(len(rhs))):
        free = lhs[l] in result and rhs[r] in result and lhs[l] not in rhs and rhs[r] not in lhs
        split = here[0].splits[l]
        if not free or not split or split.idle or split is not here[1].splits[r]:
            continue
        whole = [
            byte_size(s.replace(d, None).local_shape(a.aval.shape), a.aval.dtype)
            for s, d, a in zip(here, (l, r), eqn.invars, strict=True)
        ]
        dims = result.index(lhs[l]), result.index(rhs[r])
        splits = list(shardings[out].splits)
        splits[dims[0]], splits[dims[1]] = split, None
        scores = Sharding(tuple(splits), shardings[out].num_devices)
        local = byte_size(scores.local_shape(out.aval.shape), out.aval.dtype)
        if max(min(whole), local) > limit:
            # If the scores are split, they are split by queries.
            turned = shardings[out].splits[dims[1]] is split
            queries, keys = dims[::-1] if turned else dims
            return queries, keys, split, min(whole) > limit
    return None


# ---------------------------------------------------------------- the passes of a region


def _replaced(
    graph: Graph, region: Scoring, online: Softmax | None, split: Split, jaxpr: Jaxpr
) -> list[JaxprEqn]:
    """The program, with the region's sums computed by ring passes."""
    summed = {e.out for e in region.exits}
    kept = [e for e in graph.eqns if not summed.intersection(e.outvars)]
    for exits in _rounds(graph.eqns, region, online):
        computed = online if online and online.maximum in exits else None
        info = jaxpr.debug_info.with_unknown_names()
        kept.append(_round(region, exits, computed, split, graph, info))
    return in_order(live(kept, jaxpr.outvars))


def _rounds(eqns: Sequence[JaxprEqn], region: Scoring, online: Softmax | None) -> list[list[Sum]]:
    """The sums in as few passes as their dependences allow."""
    marks = {e.out: number for number, e in enumerate(region.exits)}
    before = upstream(eqns, marks)
    together = {marks[e.out] for e in online.sums} if online else set()
    level: dict[int, int] = {}
    for number, exit in enumerate(region.exits):
        needs = before[exit.out] - {number} - (together if number in together else set())
        level[number] = 1 + max((level[n] for n in needs), default=-1)
    return [
        [e for n, e in enumerate(region.exits) if level[n] == now]
        for now in sorted(set(level.values()))
    ]


def _round(
    region: Scoring,
    exits: Sequence[Sum],
    online: Softmax | None,
    split: Split,
    graph: Graph,
    info: Any,
) -> JaxprEqn:
    """One pass, as an equation."""
    computed = online.sums[1:] if online else ()  # of the logits, without a variable
    wanted = list(dict.fromkeys(e.scores for e in exits if e not in computed))
    body = needed_for(wanted, region.eqns)
    values = [
        a
        for e in exits
        for n, a in enumerate(e.eqn.invars)
        if n != e.number and not isinstance(a, Literal)
    ]
    own = {v for eqn in body for v in eqn.outvars}
    read = [v for v in wanted if v not in own]
    inputs = list(dict.fromkeys([*inputs_of(body), *read, *values]))
    seed = region.seed
    jaxpr = Jaxpr([], inputs, wanted, body, set(), debug_info=info)
    ring = RingPass(
        tuple(exits), online, region.names, frozenset(region.whole),
        region.name_of(QUERIES), region.name_of(KEYS), split,
        block_mask(region, exits, online, jaxpr, graph),
    )  # fmt: skip
    return seed.replace(
        invars=[region.sources.get(v, v) for v in inputs],
        outvars=[e.out for e in exits],
        primitive=ring_pass_p,
        params={"body": jaxpr, "ring": ring},
        effects=set(),
    )


# ---------------------------------------------------------------- blocks that are masked entirely


def block_mask(
    region: Scoring, exits: Sequence[Sum], online: Softmax | None, body: Jaxpr, around: Graph
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
