"""A partitioned program as the explanations need it: before and after partitioning."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from gshard.graph import bodies
from gshard.graph.regions import walk
from gshard.moving.inventory import Collective, collectives_of
from gshard.planning.plan import Plan
from gshard.propagation.flow import Flow
from gshard.propagation.propagate import Propagated
from gshard.tensors.annotate import annotate_p
from gshard.tensors.sharding import Sharding


@dataclass(frozen=True, eq=False)
class Subject:
    """The logical program, its shardings, and the per-device program made of them.

    `variant` plans a changed copy of the logical program, for asking what a change would do.
    `names` are the arguments as the user's function calls them, "" for one without a name.
    """

    flat: ClosedJaxpr
    found: Propagated
    jaxpr: Jaxpr
    num_devices: int
    variant: Callable[[ClosedJaxpr], Plan]
    names: tuple[str, ...] = ()

    @functools.cached_property
    def collectives(self) -> list[Collective]:
        """What moves."""
        return collectives_of(self.jaxpr, self.num_devices)

    @functools.cached_property
    def values(self) -> list[Collective]:
        """What is sent, value by value: combined ones separately."""
        return [v for c in self.collectives for v in c.members or (c,)]

    @property
    def argument_names(self) -> tuple[str, ...]:
        """`names` without those that are of gshard's own wrapper."""
        return tuple("" if name.startswith("arrays[") else name for name in self.names)

    @property
    def sent(self) -> int:
        """Bytes that one device sends."""
        return sum(c.total_bytes for c in self.collectives)

    @property
    def conflicts(self) -> tuple[Any, ...]:
        """Conflicting splits of the same tensors, and what was decided."""
        return self.found.conflicts

    @functools.cached_property
    def equations(self) -> list[JaxprEqn]:
        """All equations of the logical program, those of loops included."""
        return list(walk(self.flat.jaxpr))

    @functools.cached_property
    def flow(self) -> Flow:
        """Which dims of which values are neighbours through which operator."""
        return Flow(self.flat.jaxpr, self.num_devices)

    @functools.cached_property
    def loops(self) -> dict[Any, JaxprEqn]:
        """The loop or branch whose bodies take or return a value."""
        return {
            atom: eqn
            for eqn in self.equations
            for body in bodies(eqn)
            for atom in (*body.invars, *body.outvars)
            if not isinstance(atom, Literal)
        }

    @functools.cached_property
    def annotations(self) -> list[JaxprEqn]:
        """The equations that the user's annotations left."""
        return [e for e in self.equations if e.primitive is annotate_p]

    @functools.cached_property
    def annotated(self) -> dict[Any, JaxprEqn]:
        """The values that are annotated, each with its annotation."""
        return {v: e for e in self.annotations for v in e.outvars}

    def sharding(self, atom: Any) -> Sharding | None:
        """The sharding of a value; constants have none."""
        return None if isinstance(atom, Literal) else self.found.shardings.get(atom)
