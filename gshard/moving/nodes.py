"""The nodes of a plan: communication that is decided but not yet emitted.

A rule that needs a tensor under another sharding binds a node. In the plan it is one equation that
says what is wanted and why; `emission` replaces it by what `Node.run` does, which decides nothing.
So a plan can be read, compared, priced and changed before any collective is written.
"""

from __future__ import annotations

import abc
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Primitive

from gshard.graph.reason import Reason
from gshard.graph.regions import bodies, runs_of
from gshard.tensors.devices import Place

UNEXPLAINED = Reason("node")  # replaces a node's own reason


@dataclass(frozen=True)
class Node(abc.ABC):
    """A communication step: what one device sends, and its result."""

    name: ClassVar[str]
    needs_device: ClassVar[bool] = True  # whether its code depends on the number of the device
    reason: Reason

    @abc.abstractmethod
    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The local shape of the result, of an operand of the local shape `local`."""

    @abc.abstractmethod
    def sent(self, local: tuple[int, ...], dtype: Any) -> int:
        """Bytes that one device sends for it; tests compare them with what `run` emits."""

    @abc.abstractmethod
    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """Emit it."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """A readable description."""

    def unexplained(self) -> Self:
        """The same node without its reason, for comparisons."""
        return replace(self, reason=UNEXPLAINED)


def communicate(node: Node, array: jax.Array, place: Place) -> jax.Array:
    """Add a node to the plan that is being traced; returns its result."""
    if not place.planned:
        return node.run(place, array)
    if node.needs_device:
        return _primitive(type(node)).bind(array, place.device_id(), node=node)
    return add_node(node, array)


def add_node(node: Node, array: jax.Array) -> jax.Array:
    """`communicate` for a node that does not need the number of the device."""
    return _primitive(type(node)).bind(array, node=node)


def node_of(eqn: JaxprEqn) -> Node | None:
    """The node that an equation of a plan is; None for local work."""
    return eqn.params["node"] if eqn.primitive in _NODES else None


def planned_bytes(jaxpr: Jaxpr) -> int:
    """What one device sends for the nodes of a plan, in the bodies of loops too."""
    total = 0
    for eqn in jaxpr.eqns:
        if node := node_of(eqn):
            aval: Any = eqn.invars[0].aval
            total += node.sent(tuple(aval.shape), aval.dtype)
        total += runs_of(eqn) * sum(map(planned_bytes, bodies(eqn)))
    return total


_NODES: dict[Primitive, str] = {}
_PRIMITIVES: dict[str, Primitive] = {}


def _primitive(kind: type[Node]) -> Primitive:
    """The primitive for nodes of a kind."""
    if kind.name not in _PRIMITIVES:
        made = _PRIMITIVES[kind.name] = Primitive(kind.name)
        made.def_abstract_eval(_result_aval)
        _NODES[made] = kind.name
    return _PRIMITIVES[kind.name]


def _result_aval(array: Any, *device: Any, node: Node) -> ShapedArray:
    return ShapedArray(node.result(array.shape), array.dtype)
