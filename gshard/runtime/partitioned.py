"""`Partitioned`: what a partitioner makes of a traced function, its own program or XLA's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import jax
from jax.extend.core import Jaxpr

from gshard.explanation import Subject
from gshard.graph.history import History
from gshard.moving import inventory as explain
from gshard.planning.plan import Plan
from gshard.tensors.sharding import Sharding


class Partitioned(Protocol):
    """What a partitioner makes of a traced function, for arguments in a flat list."""

    @property
    def traced(self) -> jax.stages.Traced:
        """The function that XLA compiles, on the arrays that cross its border."""

    @property
    def jaxpr(self) -> Jaxpr:
        """The program: per device, or before XLA partitions it."""

    @property
    def num_devices(self) -> int:
        """How many devices the program is for."""

    @property
    def per_device(self) -> bool:
        """Whether `jaxpr` is what each device runs, not what XLA is still to partition."""

    @property
    def subject(self) -> Subject:
        """What explanations are made of, where there is a per-device program."""

    @property
    def conflicts(self) -> tuple[Any, ...]:
        """Splits that wanted the same tensors, and what was decided."""

    @property
    def plan(self) -> Plan:
        """What each device is to do, where there is a per-device program."""

    @property
    def history(self) -> History:
        """The program after every stage, where there is a per-device program."""

    @property
    def wraps(self) -> bool:
        """Whether some arguments or results cross otherwise than the user sees them."""

    @property
    def wraps_arguments(self) -> bool:
        """Whether some arguments do."""

    def fits(self, given: Sequence[Sharding | None]) -> bool:
        """Whether it takes arguments that lie like that as they are."""

    def collectives(self) -> list[explain.Collective]:
        """What moves, how much, and because of which line."""

    def text(self) -> str:
        """The program, readable."""

    def input_shardings(self) -> list[Any]:
        """The shardings of the arguments."""

    def output_shardings(self) -> list[Any]:
        """The shardings of the results."""

    def named_results(self) -> list[Any]:
        """JAX's shardings of the results."""

    def structs(self, dtypes: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
        """The arguments as shapes with JAX's own shardings."""

    def compile(self, compiler_options: dict[str, Any] | None) -> jax.stages.Compiled:
        """The executable, or an error where there is nothing to run it on."""

    def placed_consts(self) -> list[jax.Array]:
        """The values that the user's function closes over, where the executable wants them."""

    def put(self, leaves: Sequence[Any]) -> list[jax.Array]:
        """The arguments as the arrays that cross; nothing moves that is in place."""

    def shown(self, arrays: Sequence[jax.Array]) -> list[jax.Array]:
        """What the user sees of arguments that would cross as these."""

    def get(self, out: Sequence[jax.Array]) -> list[jax.Array]:
        """What the user sees of results that crossed."""

    def logical(self, arguments: Sequence[jax.Array]) -> list[jax.Array]:
        """The program on logical values, to be traced."""
