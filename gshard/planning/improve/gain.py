"""What it gains to run chains in pieces: the transfers that products then hide, less the overhead.

Times are in bytes that could be sent meanwhile, as everywhere in plans (`moving/costs.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

from gshard.forecast.ops import product_of, size_of
from gshard.graph import Graph
from gshard.graph.schedule import Step, overlapped
from gshard.moving.costs import cost_model, worked
from gshard.moving.nodes import node_bytes
from gshard.planning.improve.chains import Chain, is_light, is_product, is_sending
from gshard.planning.improve.cuts import Cut
from gshard.planning.improve.rings import Ring

_TILE = 128  # rows and columns that matrix units take at once: smaller products lose their rate


def transfer(eqn: JaxprEqn) -> float:
    """The time of a node, without its latency."""
    return node_bytes(eqn) * cost_model().distance


def multiplication(eqn: JaxprEqn, cut: Cut | None = None, count: int = 1) -> float:
    """The time of a product, or of one of `count` pieces of it.

    It is limited by arithmetic, in which small dims count as a tile, or by memory.
    """
    shape = eqn.outvars[0].aval.shape
    work = product_of(eqn, cut.shape(shape, count) if cut else shape).in_tiles(_TILE).flops
    touched = sum(map(size_of, (*eqn.invars, *eqn.outvars))) / count
    return worked(work, touched)


def exposed(steps: Sequence[Step[JaxprEqn]]) -> dict[JaxprEqn, float]:
    """Of each node's time what no product of the program hides as it is."""
    sends = {eqn: transfer(eqn) for eqn, _, _ in steps if is_sending(eqn)}
    products = {eqn: multiplication(eqn) for eqn, _, _ in steps if is_product(eqn)}
    found = overlapped(steps, sends, products, products.keys())
    return {eqn: sent.exposed for eqn, sent in found.items()}


def gain(
    graph: Graph, chains: Sequence[Chain], exposure: Mapping[JaxprEqn, float], latency: float
) -> float:
    """The time that these chains save together; `exposure` is `exposed` of the program."""
    total = 0.0
    for chain in chains:
        sums = sum(exposure[eqn] for eqn in chain.nodes)
        sums += sum(multiplication(eqn) for eqn in chain.products)
        starts = latency * (len(chain.nodes) + len(chain.products) / 2)
        total += sums - _in_pieces(chain, exposure) - (chain.count - 1) * starts
    return total - worked(touched=copies(graph, chains))


def gain_of_ring(ring: Ring, exposure: Mapping[JaxprEqn, float], latency: float) -> float:
    """The time that a ring of permutes saves.

    Its products are as many as it has tiles, or halves of tiles, and all transfers but what is
    longer than the products are hidden. A scatter also adds up, and a gather fills its results.
    """
    parts = ring.size if ring.gathers else 2 * ring.size
    dims = [dim for _, _, dim in ring.dims]
    pairs = list(zip(ring.products, dims, strict=True))
    before = exposure[ring.node] + sum(multiplication(e) for e in ring.products)
    one = sum(multiplication(e, Cut(dim), parts) for e, dim in pairs)
    sent = transfer(ring.node)
    copied = sum(map(size_of, ring.results)) * (1 if ring.gathers else 3 * ring.size)
    starts = latency * (parts - 1 + (parts - 1) * len(ring.products) / 2)
    after = max(parts * one, sent + one) + starts + worked(touched=copied)
    return before - after


def _in_pieces(chain: Chain, exposure: Mapping[JaxprEqn, float]) -> float:
    """The time of a chain in pieces: transfers and products each one after the other."""
    done: dict[tuple[Any, int], float] = {}
    busy = {True: 0.0, False: 0.0}  # until when the links, and the matrix units
    early = chain.leading
    late = [eqn for eqn in chain.members if eqn not in early]
    for eqn, number in [(e, i) for part in (early, late) for i in range(chain.count) for e in part]:
        read = [a for a in eqn.invars if not isinstance(a, Literal)]
        end = ready = max((done.get((a, number), 0.0) for a in read), default=0.0)
        if is_sending(eqn) or is_product(eqn):
            sends = is_sending(eqn)
            cut = chain.members[eqn].results[0]
            time = exposure[eqn] / chain.count if sends else multiplication(eqn, cut, chain.count)
            end = busy[sends] = max(ready, busy[sends]) + time
        done.update(((v, number), end) for v in eqn.outvars)
    return max(done.values())


def copies(graph: Graph, chains: Sequence[Chain]) -> float:
    """Bytes read and written to cut what enters chains and to join what leaves them."""
    total = 0.0
    pieces = {(v, c.cuts[v], c.count) for c in chains for v in c.cuts}
    members = {eqn for c in chains for eqn in c.members}
    for chain in chains:
        for eqn, atom, cut in {(a, c): (e, a, c) for e, a, c in chain.given()}.values():
            maker = graph.maker(atom)
            fused = maker is not None and is_light(maker)
            inside = cut.blocks == 1 and math.prod(atom.aval.shape[: cut.dim]) == 1
            free = fused or is_light(eqn) or (inside and is_product(eqn))
            if not free and (atom, cut, chain.count) not in pieces:
                total += 2 * size_of(atom)
        for var in chain.leaving(graph):
            outside = [u for u in graph.users(var) if u not in members]
            made = is_product(graph.makers[var])
            read = any(not is_light(u) or (made and _ends_product(u)) for u in outside)
            if read or var in graph.results:
                total += 2 * size_of(var)
    return total


def _ends_product(eqn: JaxprEqn) -> bool:
    """Whether it is a relu: computed by the product before it, which then writes all at once."""
    return eqn.primitive.name == "max" and isinstance(eqn.invars[1], Literal)
