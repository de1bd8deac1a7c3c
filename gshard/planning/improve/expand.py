"""Nodes merged, and their code: a reshard, a reduction or a halo as local work and collectives.

What several collectives do is one node while plans are made and improved. Then `expand` replaces it
by its code, in which every collective is a node of its own: these can be combined. Before that,
`share` makes equal nodes one.

Equal nodes on operands of the same type are traced once, however many layers there are. A table
lookup by the device's number happens once in a program or body.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.extend.core import primitives as p

from gshard._jax import Var, drop_unused
from gshard.graph import Names, renamed, renaming
from gshard.graph.reason import NO_REASON, Reason
from gshard.graph.source import reason_of
from gshard.moving.nodes import UNEXPLAINED, Code, Node, Sizes, code_of, node_of
from gshard.tensors.devices import lookup_p


def expand(plan: Jaxpr) -> tuple[Jaxpr, Names]:
    """The plan, in which all nodes are collectives."""
    expanded, names = with_code(plan, (), lambda node: node.needs_device)
    # Most nodes do not use the device's number, which they have as an operand.
    return (plan if expanded is plan else drop_unused(expanded)), names


@renaming
def with_code(plan: Jaxpr, same: Names, sizes: Sizes, which: Callable[[Node], bool]) -> Jaxpr:
    """The plan with the nodes that `which` is true of replaced by their code.

    `sizes` are those of the axes of the mesh, which only the code of collectives needs.
    """
    eqns: list[JaxprEqn] = []
    names: dict[Any, Any] = {}  # variables that equal others
    rows: dict[Any, Any] = {}  # table lookups so far
    nodes = {eqn: node for eqn in plan.eqns if (node := node_of(eqn)) and which(node)}
    for eqn in plan.eqns:
        node, eqn = nodes.get(eqn), renamed(eqn, names) if names else eqn
        for new in _inlined(eqn, node, names, sizes) if node else [eqn]:
            new = renamed(new, names) if names else new
            if new.primitive is lookup_p:
                first = rows.setdefault((new.invars[0], new.params["table"]), new.outvars[0])
                if first is not new.outvars[0]:
                    names[new.outvars[0]] = first
                    continue
            eqns.append(new)
    if not nodes and not names:
        return plan
    same |= names
    outvars = [a if isinstance(a, Literal) else names.get(a, a) for a in plan.outvars]
    return plan.replace(eqns=eqns, outvars=outvars)


def _inlined(eqn: JaxprEqn, node: Node, names: dict[Any, Any], sizes: Sizes) -> list[JaxprEqn]:
    """The equations that replace a node; `names` if its result is its operand."""
    array, *device = (a.aval for a in eqn.invars)
    dtypes = (array.dtype, *(number.dtype for number in device))
    axes = () if node.needs_device else sizes
    found = code_of(node.unexplained(), tuple(array.shape), dtypes, axes)
    (result,), (out,) = found.results, eqn.outvars
    if result in found.inputs:
        names[out] = eqn.invars[found.inputs.index(result)]
        return []
    return inlined(found, eqn.invars, [out], lambda inner: (eqn, _reason(node, reason_of(inner))))


def inlined(
    code: Code,
    operands: Sequence[Any],
    results: Sequence[Any],
    origin: Callable[[JaxprEqn], tuple[JaxprEqn, Reason]],
) -> list[JaxprEqn]:
    """The equations of a code; `origin` says for which one of the plan each is, and why."""
    names = {v: Var(v.aval) for inner in code.eqns for v in inner.outvars}
    names |= zip((*code.inputs, *code.results), (*operands, *results), strict=True)
    found = []
    for inner in code.eqns:
        (eqn, reason), node, params = origin(inner), node_of(inner), inner.params
        info = eqn.source_info
        if node is not None:
            params = {**params, "node": replace(node, reason=reason)}
        elif reason != NO_REASON:
            info = info.replace(name_stack=info.name_stack.extend(reason.encoded()))
        found.append(renamed(inner, names, ctx=eqn.ctx, source_info=info, params=params))
    return found


def _reason(node: Node, step: Reason) -> Reason:
    """The reason of a step of a node's code."""
    if step == NO_REASON:
        return step
    why = node.reason if step.kind == UNEXPLAINED.kind else replace(node.reason, kind=step.kind)
    return why.then(step.detail) if step.detail else why


@renaming
def share(plan: Jaxpr, names: Names) -> Jaxpr:
    """The plan with equal nodes merged: those that do the same to the same value, for whomever.

    Equal slices are merged, too: what is read of a value is cut for each of its readers.
    """
    eqns: list[JaxprEqn] = []
    made: dict[Any, Any] = {}
    for eqn in plan.eqns:
        eqn = renamed(eqn, names) if names else eqn
        node, key = node_of(eqn), None
        if node is not None and not node.reason.is_asked:
            key = node.unexplained(), eqn.invars[0]
        elif eqn.primitive is p.slice_p:
            key = (*eqn.params.values(), eqn.invars[0])
        if key is not None and not isinstance(key[-1], Literal):
            (out,) = eqn.outvars
            first = made.setdefault(key, out)
            if first is not out:
                names[out] = first
                continue
        eqns.append(eqn)
    if len(eqns) == len(plan.eqns):
        return plan
    outvars = [a if isinstance(a, Literal) else names.get(a, a) for a in plan.outvars]
    return plan.replace(eqns=eqns, outvars=outvars)
