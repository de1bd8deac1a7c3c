"""The nodes of a plan: communication that is decided but not yet emitted.

A rule that needs a tensor under another sharding binds a node. In the plan it is one equation that
says what is wanted and why; later it is replaced by its code, which is what `Node.run` does: local
work and collectives. So a plan can be read, compared, priced and changed before any collective is
written, and what a node sends is what its code sends.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import jax
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Primitive

from gshard._jax import without_mesh
from gshard.graph.caching import cached
from gshard.graph.graph import renamed
from gshard.graph.reason import Reason
from gshard.graph.regions import bodies, runs_of
from gshard.tensors.devices import Place
from gshard.tensors.sharding import Sharding

UNEXPLAINED = Reason("node")  # replaces a node's own reason
Sizes = tuple[tuple[str, int], ...]  # of the axes of a mesh


@dataclass(frozen=True)
class Node(abc.ABC):
    """A communication step: what one device sends, and its result."""

    name: ClassVar[str]
    needs_device: ClassVar[bool]  # whether its code depends on the number of the device
    reason: Reason

    @abc.abstractmethod
    def result(self, local: tuple[int, ...]) -> tuple[int, ...]:
        """The local shape of the result, of an operand of the local shape `local`."""

    @abc.abstractmethod
    def sent(self, local: tuple[int, ...], dtype: Any) -> int:
        """Bytes that one device sends for it."""

    @abc.abstractmethod
    def run(self, place: Place, array: jax.Array) -> jax.Array:
        """Emit it."""

    @abc.abstractmethod
    def __str__(self) -> str:
        """A readable description."""

    def unexplained(self) -> Self:
        """The same node without its reason, for comparisons."""
        return replace(self, reason=UNEXPLAINED)


@dataclass(frozen=True)
class TensorNode(Node):
    """A node for a tensor under a `sharding`: its code is local work and collectives."""

    needs_device: ClassVar[bool] = True
    sharding: Sharding

    def sent(self, local: tuple[int, ...], dtype: Any) -> int:
        """Bytes sent by the collectives that it expands to."""
        return planned_bytes(code_of(self.unexplained(), local, (dtype, np.dtype(np.int32))))


def communicate(node: Node, array: Any, place: Place) -> Any:
    """Add a node to the plan that is being traced; returns its result (`Tile.blank` for such)."""
    if type(array) is ShapedArray:
        return _result_aval(array, node=node)
    if not place.planned or (place.blocks > 1 and node.needs_device):
        return node.run(place, array)  # in blocks only collectives are nodes, each over all blocks
    if node.needs_device:
        return _primitive(type(node)).bind(array, place.device_id(), node=node)
    return add_node(node, array)


def add_node(node: Node, array: jax.Array) -> jax.Array:
    """`communicate` for a node that does not need the number of the device."""
    return _primitive(type(node)).bind(array, node=node)


def node_of(eqn: JaxprEqn) -> Node | None:
    """The node that an equation of a plan is; None for local work."""
    return eqn.params.get("node")


@dataclass(frozen=True)
class Code:
    """The code of a node, or of several: for each the local array, and the device if needed."""

    inputs: tuple[Any, ...]
    eqns: tuple[JaxprEqn, ...]
    results: tuple[Any, ...]

    @staticmethod
    def of(run: Callable[..., Any], types: Sequence[Any], sizes: Sizes = ()) -> Code:
        """The code of a function of local arrays."""
        with without_mesh():
            traced = jax.make_jaxpr(run, axis_env=list(sizes))(*types)
        jaxpr = traced.jaxpr
        values = zip(jaxpr.constvars, traced.consts, strict=True)
        consts = {v: Literal(np.asarray(c), v.aval) for v, c in values}
        eqns = tuple([renamed(e, consts) for e in jaxpr.eqns])
        return Code(tuple(jaxpr.invars), eqns, tuple(jaxpr.outvars))


@cached  # by value: it serves all layers, and later programs
def code_of(node: Node, shape: tuple[int, ...], dtypes: tuple[Any, ...], sizes: Sizes = ()) -> Code:
    """The code of a node for operands of these types, on a mesh with axes of these sizes.

    That of a reshard, a reduction or a halo does not name axes: its collectives are nodes again.
    """
    axes = tuple(name for name, _ in sizes)
    devices = node.sharding.num_devices if isinstance(node, TensorNode) else 0

    def run(x: jax.Array, *number: jax.Array) -> jax.Array:
        place = Place(axes, devices)
        return node.run(place.numbered(*number) if number else place, x)

    types = [jax.ShapeDtypeStruct(s, d) for s, d in zip((shape, ()), dtypes, strict=False)]
    return Code.of(run, types, sizes)


def planned_bytes(program: Jaxpr | Code) -> int:
    """What one device sends for the nodes of a plan or of a code, in the bodies of loops too."""
    total = sum(map(node_bytes, program.eqns))
    return total + sum(runs_of(e) * sum(map(planned_bytes, bodies(e))) for e in program.eqns)


def node_bytes(eqn: JaxprEqn) -> int:
    """What one device sends for a node, in one execution; 0 for local work."""
    node = node_of(eqn)
    if node is None:
        return 0
    aval: Any = eqn.invars[0].aval
    return node.sent(tuple(aval.shape), aval.dtype)


@functools.cache
def _primitive(kind: type[Node]) -> Primitive:
    """The primitive for nodes of a kind; no other has a parameter `node`."""
    made = Primitive(kind.name)
    made.def_abstract_eval(_result_aval)
    return made


def _result_aval(array: Any, *device: Any, node: Node) -> ShapedArray:
    return ShapedArray(node.result(array.shape), array.dtype)
