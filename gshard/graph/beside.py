"""Which products can run while something is sent: those that neither need it nor make it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jax.extend.core import JaxprEqn, Literal

NEAR = 8  # products and transfers between a transfer and one that hides it: compilers do not move
# them across an entire program, which would keep values alive for that long

Hidden = dict[JaxprEqn, list[tuple[JaxprEqn, float]]]  # products beside a transfer, and how much


class Dependence:
    """Which of some `marked` equations every value of a program depends on."""

    def __init__(self, eqns: Sequence[JaxprEqn], marked: Sequence[JaxprEqn]):
        self.marked = list(marked)
        self.place = {eqn: i for i, eqn in enumerate(self.marked)}
        self._bits: dict[Any, int] = {}
        for eqn in eqns:
            needs = 1 << self.place[eqn] if eqn in self.place else 0
            for atom in eqn.invars:
                if not isinstance(atom, Literal):
                    needs |= self._bits.get(atom, 0)
            self._bits.update(dict.fromkeys(eqn.outvars, needs))

    def of(self, atom: Any) -> int:
        """The marked equations that a value depends on, as bits by their places."""
        return 0 if isinstance(atom, Literal) else self._bits.get(atom, 0)

    def needs(self, atom: Any, eqn: JaxprEqn) -> bool:
        """Whether a value depends on a marked equation."""
        return bool(self.of(atom) >> self.place[eqn] & 1)


def beside(
    order: Dependence, sends: Mapping[JaxprEqn, float], products: Mapping[JaxprEqn, float]
) -> Hidden:
    """For each transfer the products that hide it, and the time in which they do.

    `sends` and `products` have the time of each; all are marked. A product hides one transfer at a
    time. It depends on something that the transfer waited for, or the transfer waits for nothing
    (weights): others can be moved there too, but schedules that save memory do not do that.
    """
    free = dict(products)
    found: Hidden = {}
    for eqn, left in sends.items():
        here, hidden = order.place[eqn], found.setdefault(eqn, [])
        first = max(here - NEAR, 0)
        near = order.marked[first : here + NEAR + 1]
        recent = order.of(eqn.outvars[0]) >> first & ((1 << here - first) - 1)
        for other in sorted(near, key=lambda e: abs(order.place[e] - here)):
            if left <= 0 or free.get(other, 0) <= 0:
                continue
            made, sent = other.outvars[0], eqn.outvars[0]
            apart = not order.needs(made, eqn) and not order.needs(sent, other)
            if apart and (not recent or order.of(made) >> first & recent):
                part = min(left, free[other])
                hidden.append((other, part))
                free[other] -= part
                left -= part
    return found
