"""The inventory of what a program sends: its bytes, reasons and lines of the user's code.

It is read from a plan, whose nodes say what they send. The collectives that the user wrote in a
manual region are calls of `lax` in a plan, too; after emission all are.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from jax.extend.core import Jaxpr, JaxprEqn
from jax.extend.core import primitives as p

from gshard._jax import private_primitives
from gshard.graph import bodies, history
from gshard.graph.readable import table
from gshard.graph.reason import Reason
from gshard.graph.source import reason_of, runs_inside, source_of
from gshard.moving.collectives import CollectiveNode
from gshard.moving.costs import sent_bytes
from gshard.moving.nodes import TensorNode, node_bytes, node_of
from gshard.tensors.devices import Groups
from gshard.tensors.tile import byte_size

_SHOWN = 20  # collectives that a terminal shows
_parallel = functools.partial(private_primitives, "lax.parallel")
COLLECTIVES = {  # of `lax`: the kind, and how values are combined
    **dict.fromkeys([p.psum_p, *_parallel("psum_invariant_p")], ("all_reduce", "sum")),
    p.pmax_p: ("all_reduce", "max"),
    p.pmin_p: ("all_reduce", "min"),
    p.all_gather_p: ("all_gather", ""),
    p.all_to_all_p: ("all_to_all", ""),
    p.ragged_all_to_all_p: ("all_to_all", ""),  # as if all were sent: the sizes are data
    p.ppermute_p: ("collective_permute", ""),
    **dict.fromkeys(_parallel("reduce_scatter_p"), ("reduce_scatter", "")),
}


@dataclass(frozen=True)
class Transfer:
    """One value that a collective moves, of `size` bytes on each device.

    `groups` of devices, none if all take part in their order; of a permute, the pairs.
    """

    kind: str
    size: int
    dtype: str
    groups: Groups
    reduction: str = ""

    def members(self, num_devices: int) -> int:
        """How many devices take part; in the largest group, if there are several."""
        if self.kind == "collective_permute":
            return len({d for pair in self.groups for d in pair})
        return max(map(len, self.groups)) if self.groups else num_devices

    def sent(self, num_devices: int) -> int:
        """Bytes that one device sends."""
        return sent_bytes(self.kind, self.size, self.members(num_devices))


def transfers(eqn: JaxprEqn) -> list[Transfer]:
    """What a collective moves: a node of a plan, or a call of `lax`; none for local work."""
    node, called = node_of(eqn), COLLECTIVES.get(eqn.primitive)
    groups: Sequence[Sequence[int]] | None
    if isinstance(node, CollectiveNode):
        kind, groups = (node.name.replace("-", "_"), getattr(node, "kind", "")), node.listed()
    elif called:
        kind, groups = called, eqn.params.get("perm") or eqn.params.get("axis_index_groups")
    else:
        return []
    # A ragged one also has operands with offsets.
    moved = eqn.invars[:1] if eqn.primitive is p.ragged_all_to_all_p else eqn.invars
    members = tuple(tuple(map(int, g)) for g in groups or ())
    return [
        Transfer(
            kind[0], byte_size(a.aval.shape, a.aval.dtype), str(a.aval.dtype), members, kind[1]
        )
        for a in moved
    ]


@dataclass(frozen=True)
class Collective:
    """One communication of the program.

    `bytes` is what one device sends in one execution; `count` how often it runs. Where data decide
    that, `count` is 1, and 0 for a fallback that balanced data do not take (rows by index, experts
    without a capacity). All branches of a conditional are counted; where the schedule of a pipeline
    chooses one, as often as a device takes it. `source` is the user's operation, `why` the reason
    for the collective. If several values are combined, `members` has one entry each, with its own
    bytes, line and reason. `overlapped_with` are the lines of the products that hide it, on
    hardware that overlaps.
    """

    kind: str
    bytes: int
    count: int
    group_size: int
    dtype: str
    source: str
    why: Reason
    members: tuple[Collective, ...] = ()
    overlapped_with: tuple[str, ...] = ()

    @property
    def reason(self) -> str:
        """The reason as text."""
        return str(self.why)

    @property
    def values(self) -> int:
        """How many values it moves: more than one if small ones are combined."""
        return len(self.members) or 1

    @property
    def total_bytes(self) -> int:
        """What one device sends over all executions."""
        return self.bytes * self.count

    def __str__(self) -> str:
        times = f" x {self.count}" if self.count != 1 else ""
        others = len({c.source for c in self.members}) - 1
        more = f" and {others} more line{'s' * (others > 1)}" if others > 0 else ""
        during = f"  during {', '.join(self.overlapped_with)}" if self.overlapped_with else ""
        return (
            f"{self.kind:<18} {self.bytes:>12,} B{times}  {self.dtype} over {self.group_size} "
            f"devices  {self.source}{more}  {self.reason}{during}"
        )


class Collectives(list[Collective]):
    """The collectives of a program: a list that notebooks show as a table."""

    def __repr__(self) -> str:
        shown = [str(c) for c in self[:_SHOWN]]
        more = [f"and {len(self) - _SHOWN} more"] if len(self) > _SHOWN else []
        return "\n".join([*shown, *more]) or "no collectives"

    def _repr_html_(self) -> str:
        rows = [
            (c.kind, f"{c.bytes:,}", f"{c.count:,}", f"{c.group_size:,}", c.source, c.reason)
            for c in self
        ]
        total = sum(c.total_bytes for c in self)
        caption = f"{total:,} bytes sent by each device"
        return table(("collective", "bytes", "runs", "devices", "line", "because"), rows, caption)


Overlaps = Mapping[Any, tuple[str, ...]]  # by a collective's first result: lines of products


def collectives_of(
    jaxpr: Jaxpr, num_devices: int, overlaps: Overlaps | None = None
) -> list[Collective]:
    """What a per-device program or a plan of it sends, in its order.

    `overlaps`: the products during which a collective runs, by its first result.
    """
    return list(_walk(jaxpr, num_devices, 1, overlaps or {}))


def count_equations(jaxpr: Jaxpr) -> int:
    """Equations of a program, those of the bodies in it included."""
    return sum(1 + sum(map(count_equations, bodies(eqn))) for eqn in jaxpr.eqns)


def program_text(jaxpr: Jaxpr, num_devices: int) -> str:
    """The program as one line per equation; collectives with their reasons."""
    return history.program_text(
        jaxpr, f"program for each of {num_devices} devices", collective_note
    )


def collective_note(eqn: JaxprEqn) -> str:
    """The reason of a collective; empty for local work."""
    return f"{source_of(eqn)}: {reason_of(eqn)}" if eqn.primitive in COLLECTIVES else ""


def _walk(jaxpr: Jaxpr, num_devices: int, count: int, overlaps: Overlaps) -> Iterator[Collective]:
    for eqn in jaxpr.eqns:
        for found in collectives_in(eqn, num_devices, count):
            members = _members(found, combined_values(jaxpr, eqn))
            hidden = overlaps.get(eqn.outvars[0], ())
            yield replace(found, members=members, overlapped_with=hidden)
        for inner, runs in zip(bodies(eqn), runs_inside(eqn, count), strict=True):
            yield from _walk(inner, num_devices, runs, overlaps)


def collectives_in(eqn: JaxprEqn, num_devices: int, count: int) -> Iterator[Collective]:
    """The collectives of one equation, one for each value that it moves.

    A reshard, a reduction or a halo is one of that kind until its code has replaced it.
    """
    node = node_of(eqn)
    if isinstance(node, TensorNode):
        kind, dtype = node.name, str(eqn.invars[0].aval.dtype)
        yield Collective(
            kind, node_bytes(eqn), count, num_devices, dtype, source_of(eqn), node.reason
        )
    for t in transfers(eqn):
        sent, members = t.sent(num_devices), t.members(num_devices)
        yield Collective(t.kind, sent, count, members, t.dtype, source_of(eqn), reason_of(eqn))


def combined_values(jaxpr: Jaxpr, eqn: JaxprEqn) -> list[JaxprEqn]:
    """The values that a collective of `jaxpr` combines: the slices of its result.

    Each has the line, the name scopes and the reason of its value. Empty for a single value.
    """
    if reason_of(eqn).values == 1 or not transfers(eqn):
        return []
    (result,) = eqn.outvars
    views = {result, *(e.outvars[0] for e in jaxpr.eqns if result in e.invars)}
    return [e for e in jaxpr.eqns if e.primitive is p.slice_p and e.invars[0] in views]


def shares(total: int, values: Sequence[JaxprEqn]) -> list[int]:
    """`total` distributed over combined values by their sizes, without a remainder."""
    ends = list(itertools.accumulate(math.prod(e.outvars[0].aval.shape) for e in values))
    rounded = [total * end // ends[-1] for end in ends]
    return [end - start for start, end in itertools.pairwise([0, *rounded])]


def _members(collective: Collective, values: Sequence[JaxprEqn]) -> tuple[Collective, ...]:
    sent = shares(collective.bytes, values) if values else []
    return tuple(
        replace(collective, bytes=share, source=source_of(e), why=reason_of(e))
        for e, share in zip(values, sent, strict=True)
    )
